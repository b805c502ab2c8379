"""``eagle3 plan cost``: the price of a million tokens."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from eagle3_jax.cli._options import JsonOption
from eagle3_jax.cli._printing import Page, print_page, table_of
from eagle3_jax.cli.plan.options import (
    ContextOption,
    DeploymentOptions,
    DraftOptions,
    read_context,
    title_of,
)
from eagle3_jax.theory.bounds import round_bound
from eagle3_jax.theory.cost import cost_of

_COLUMNS = {
    "speed": "name",
    "tokens/s": "tokens_per_second",
    "per million tokens": "per_million_tokens",
    "tokens for 1": "tokens_per_unit",
    "for the same money": "relative",
}
EXAMPLE = (
    "Example: eagle3 plan cost --price-per-hour 1.40 --tokens-per-second 1700"
    " --tokens-per-second 6200"
)


def cost(
    *,
    price_per_hour: Annotated[float, Option(help="Price of the whole machine, in any currency.")],
    tokens_per_second: Annotated[
        list[float] | None,
        Option(
            help=(
                "Measured speed; repeat the option to compare several. Default: the roofline's"
                " bounds."
            )
        ),
    ] = None,
    busy: Annotated[
        float, Option(help="Share of the paid hours in which the machine works.")
    ] = 1.0,
    deployed: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[int, Option(help="Sequences at once.", min=1)] = 8,
    as_json: JsonOption = False,
) -> None:
    """Cost per million tokens, tokens per dollar.

    Computed from measured speeds, or from the upper bound of the hardware. Only output tokens are
    counted.
    """
    price = f"{price_per_hour:g} an hour, busy {busy:.0%} of the hours"
    if tokens_per_second:
        title = f"measured; {price}\n"
        speeds = {f"{speed:g} tokens/s": speed for speed in tokens_per_second}
    else:
        deployment = deployed.read()
        k, tau = draft.read_for(deployment)
        context = read_context(context, 1024, deployment)
        bound = round_bound(deployment, batch=batch_size, context=context, num_draft_tokens=k)
        about = (
            f"batch {batch_size}, context {context}; {price}\nFrom the roofline, so real costs are"
            " higher."
        )
        title = title_of(deployment, context, about)
        speeds = {"plain": bound.plain_tokens_per_second}
        if deployment.head is not None:
            speeds[f"K = {k}, τ = {tau:.2f}"] = bound.tokens_per_second(tau)

    paid = {"price_per_hour": price_per_hour, "busy": busy}
    rows = [{"name": name, **cost_of(speed, **paid)._asdict()} for name, speed in speeds.items()]
    values = {**paid, "from_roofline": not tokens_per_second, "costs": rows}
    first = rows[0]["per_million_tokens"]
    compared = [{**row, "relative": first / row["per_million_tokens"]} for row in rows]
    table = table_of("", compared, _COLUMNS)
    print_page(Page(values, [title, table]), as_json=as_json)
