"""``eagle3 plan rollout``: a staged plan for serving with speculation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption, check_writable
from eagle3_jax.cli._printing import finite
from eagle3_jax.cli.plan.options import DeploymentOptions, DraftOptions, deployment_json
from eagle3_jax.measure.tables import write_text
from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name
from eagle3_jax.theory.rollout import MeasuredCosts, Traffic, plan_rollout, to_markdown

EXAMPLE = (
    "Example: eagle3 plan rollout --target Llama-3.3-70B --weights fp8 --gpu H200 --concurrency 16 "
    "--requests-per-second 5 --alpha 0.75 -K 4 --out rollout.md"
)

# Fields of a plan that describe its options.
_OPTIONS = {"deployment", "traffic", "num_draft_tokens", "memory"}


def rollout(
    *,
    deployed: DeploymentOptions,
    draft: DraftOptions,
    requests_per_second: Annotated[float, Option(help="Average over a day.")] = 5.0,
    prompt_tokens: Annotated[int, Option(help="Mean length of a prompt.", min=1)] = 1024,
    output_tokens: Annotated[int, Option(help="Mean length of an answer.", min=1)] = 256,
    concurrency: Annotated[
        int, Option(help="Sequences at once on a replica at the daily peak.", min=1)
    ] = 16,
    verify_cost: Annotated[
        float | None,
        Option(help="v as measured at the peak; with --draft-cost it replaces the roofline's."),
    ] = None,
    draft_cost: Annotated[float | None, Option(help="c as measured at the peak.")] = None,
    out: Annotated[Path | None, Option(help="File to write. Default: the standard output.")] = None,
    as_json: JsonOption = False,
) -> None:
    """A staged plan in Markdown, with gates.

    Offline proof, shadow, 1, 10, 50 and 100 % of the traffic; gates, PromQL, alerts and the way
    back.
    """
    check_writable(out)
    if (verify_cost is None) != (draft_cost is None):
        raise Misuse("--verify-cost and --draft-cost are measured together; give both or neither")

    deployment = deployed.read()
    draft.read_for(deployment)
    measured = None
    if verify_cost is not None and draft_cost is not None:
        measured = MeasuredCosts(verify_cost, draft_cost)
    plan = plan_rollout(
        deployment,
        Traffic(requests_per_second, prompt_tokens, output_tokens, concurrency),
        num_draft_tokens=draft.num_speculative_tokens,
        conditional_acceptance_rate=draft.acceptance().conditional_acceptance_rate,
        measured=measured,
    )

    if as_json:
        fields = dataclasses.asdict(plan)
        values = {name: value for name, value in fields.items() if name not in _OPTIONS}
        text = json.dumps(finite(deployment_json(deployment) | values))
    else:
        source = deployed.target
        target = "TARGET" if source is None or known_name(source, KNOWN_MODELS) else source
        text = to_markdown(plan, target=target, head=deployed.drafter or "HEAD").rstrip("\n")

    if out is None:
        typer.echo(text)
        return
    write_text(out, text + "\n")
    typer.echo(f"wrote {out}", err=True)
