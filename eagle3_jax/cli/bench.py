"""``eagle3 bench``: how fast every way of decoding is, on this machine, now."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli import _bench_contenders as who
from eagle3_jax.cli import _bench_output as output_of
from eagle3_jax.cli._activity import Activity, activity
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    JsonOption,
    MeasuredDtypeOption,
    TargetOption,
    VerifierOption,
    WeightsOption,
    parse_numbers,
    parse_tree,
)
from eagle3_jax.named import FORMS, is_named

if TYPE_CHECKING:
    from eagle3_jax.measure.results import Report
    from eagle3_jax.prompts import Prompt

EXAMPLE = "Example: eagle3 bench --tasks code --max-prompts 4 --batch-size 1,4 --chains 1-5 --output results"


def bench(
    *,
    target: TargetOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of a named shape instead of --target, such as Llama-100M or Llama-3.1-8B. Drafts "
            "are accepted by dice (NOT LOSSLESS), at rates published for Llama-3.1-8B unless others are given."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Directory or hub id of a draft head or a smaller language model, or {FORMS}; may be repeated."
        ),
    ] = None,
    dtype: MeasuredDtypeOption = None,
    weights: WeightsOption = "dense",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL file (texts, token ids, MT-bench, Spec-Bench, HumanEval, GSM8K); may be repeated; or 'random'. "
            "The held-out prompts of the bundled pair if left out."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Make every prompt exactly this long: cut to its end, or repeated.", min=1)
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Only prompts of these categories: 'code,prose'.")] = None,
    max_prompts: Annotated[int, typer.Option(help="Most prompts decoded in each repeat.", min=1, max=100_000)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens written for each prompt.", min=2, max=100_000)] = 96,
    repeats: Annotated[int, typer.Option(help="Measured passes.", min=1, max=10_000)] = 5,
    batch_size: Annotated[str, typer.Option(help="Prompts decoded at once: '1', or several to sweep: '1,4,8'.")] = "1",
    chains: Annotated[
        str | None, typer.Option(help="Chain lengths K: '1-7', '1,3,5' or 'none'.  [default: 1-7; of a --shape 3,5]")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="A tree, or 'none'; may be repeated.  [default: num_nodes=60,max_depth=8,top_k=10; of a --shape "
            "max_depth=7]"
        ),
    ] = None,
    ngram: Annotated[
        str | None, typer.Option(help="Lengths K of prompt lookup, or 'none'.  [default: 5; of a --shape none]")
    ] = None,
    simulated_acceptance_length: Annotated[
        float | None, typer.Option(help="NOT LOSSLESS: make the heads' drafts have this τ, to see what speed it gives.")
    ] = None,
    simulated_acceptance_rate: Annotated[
        float | None, typer.Option(help="NOT LOSSLESS: the same by the conditional acceptance rate of every token.")
    ] = None,
    verifier: VerifierOption = None,
    rivals: Annotated[
        str | None,
        typer.Option(help="'transformers', 'vllm', both or 'none'. Left out: transformers, and vLLM if it is named."),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Interpreter of an environment with vLLM, which is started for the run.")
    ] = None,
    vllm_url: Annotated[
        list[str] | None, typer.Option(help="Running vLLM server, such as http://localhost:8000; may be repeated.")
    ] = None,
    vllm_chains: Annotated[str, typer.Option(help="Chain lengths K of vLLM with the head; 0 is plain.")] = "0,3",
    vllm_memory: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory for each vLLM engine, beside JAX's XLA_CLIENT_MEM_FRACTION.  "
            "[default: 0.3 for one engine, 0.4 divided among several]"
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of this machine; adds the cost of a million tokens.", min=0)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="New directory for bench.json, bench.csv, bench.md and bench.html.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure plain decoding, chains, trees, prompt lookup, transformers and vLLM, interleaved on the same prompts.

    Ends with exit code 1, after everything is written, where a measurement is faster than the memory can be read.
    """
    from eagle3_jax.cli._hardware import measured_dtype
    from eagle3_jax.cli._prompts import PromptSource
    from eagle3_jax.rivals.memory import share_memory, share_of_engine

    usual = who.USUAL if shape is None else who.USUAL_OF_SHAPES
    own_rule = verifier is not None or simulated_acceptance_length is not None or simulated_acceptance_rate is not None
    methods = who.Methods(
        chains=parse_numbers(usual.chains if chains is None else chains, "--chains", or_none=True),
        trees=_trees([usual.tree] if tree is None else tree),
        ngrams=parse_numbers(usual.ngram if ngram is None else ngram, "--ngram", or_none=True),
        simulated_rates=None if own_rule else usual.simulated_rates,
        simulated_length=simulated_acceptance_length,
        simulated_rate=simulated_acceptance_rate,
        verifier=verifier,
    )
    if vllm_memory is not None and not 0 < vllm_memory <= 1:
        raise Misuse(f"--vllm-memory is {vllm_memory:g}; expected a share above 0 and at most 1")
    sizes = parse_numbers(batch_size, "--batch-size")
    named = _rivals(rivals, has_vllm=vllm_python is not None or bool(vllm_url))
    lengths = parse_numbers(vllm_chains, "--vllm-chains", least=0, or_none=True)
    if shape is not None and weights != "dense":
        raise Misuse(f"--weights {weights}: --shape draws dense weights; leave one of them out")
    _check(methods, sizes, shape=shape, target=target, drafters=drafter or [], prompts=prompts or [])
    source = PromptSource(prompts or (["random"] if shape else []), prompt_tokens, tasks, max_prompts, max_new_tokens)
    output_of.check_directory(output)
    with activity() as now, contextlib.ExitStack() as closing:
        now.say("loading")
        if named and shape is None:
            share_memory(beside_vllm=vllm_python is not None)
        dtype = measured_dtype(dtype)
        models = who.random_models(shape, dtype) if shape else who.read_models(target, drafter or [], dtype, weights)
        field = who.Field()
        who.add_ours(field, models, methods)
        chosen = source.read(models.target, target)
        if len(chosen) < max(sizes):
            raise Misuse(
                f"--batch-size {max(sizes)} needs as many prompts, and there are {len(chosen)}; see --max-prompts"
            )
        longest = max(len(prompt.tokens) for prompt in chosen) + max_new_tokens
        options = who.RivalOptions(
            names=named,
            vllm_python=vllm_python,
            vllm_urls=vllm_url or [],
            vllm_chains=lengths,
            vllm_memory=vllm_memory or share_of_engine(len(lengths)),
            longest=min(longest + 16, models.target.max_positions),
            largest_batch=max(sizes),
        )
        now.say("loading rivals")
        _add_rivals(field, options, dtype=dtype, shape=shape, target=target, drafters=drafter or [], closing=closing)
        who.drop_broken(field, chosen[0].tokens)
        reports = [
            _measure(field, chosen, size, max_new_tokens=max_new_tokens, repeats=repeats, now=now) for size in sizes
        ]
    about = _about(shape, target, drafter or [], prompts or [], chosen)
    # None stands for prompt lookup alone.
    about["weights"] = weights
    about["simulated_acceptance"] = methods.simulation
    about["drafter_methods"] = ["NGram" if one is None else one.described for one in models.drafters.values()]
    findings = _findings(about, reports, field, price_per_hour)
    _tell(findings, output, as_json=as_json)


def _check(
    methods: who.Methods,
    sizes: Sequence[int],
    *,
    shape: str | None,
    target: str | None,
    drafters: Sequence[str],
    prompts: Sequence[str],
) -> None:
    """Refuse options that exclude each other, before anything is loaded."""
    if not sizes:
        raise Misuse("--batch-size 'none': expected numbers such as '1' or '1,4,8'")
    if methods.simulated_length is not None and methods.simulated_rate is not None:
        raise Misuse("--simulated-acceptance-length and --simulated-acceptance-rate were both given; give one")
    if methods.simulates and methods.verifier is not None:
        raise Misuse("--verifier and a simulated acceptance were both given; a draft is accepted by one rule")
    if methods.simulated_length is not None and not methods.simulated_length >= 1:
        raise Misuse(f"--simulated-acceptance-length {methods.simulated_length:g}: expected 1 or more")
    if methods.simulated_rate is not None and not 0 <= methods.simulated_rate <= 1:
        raise Misuse(f"--simulated-acceptance-rate {methods.simulated_rate:g}: expected 0 to 1")
    if shape is not None and (target is not None or drafters):
        raise Misuse("--shape has random weights of its own; leave out --target and --drafter")
    if shape is not None and [name for name in prompts if name != "random"]:
        raise Misuse("--shape has no tokenizer; leave --prompts out, and choose a length with --prompt-tokens")
    if "none" in drafters and len(drafters) > 1:
        raise Misuse("--drafter none is plain decoding alone; give it once, or other drafters")


def _trees(given: Sequence[str]) -> list[Any]:
    if "none" in given and len(given) > 1:
        raise Misuse("--tree none leaves trees out; give it once, or trees")
    return [parse_tree(text) for text in given if text != "none"]


def _rivals(text: str | None, *, has_vllm: bool) -> list[str]:
    if text is None:
        return ["transformers", "vllm"] if has_vllm else ["transformers"]
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in who.RIVALS]
    if unknown:
        raise Misuse(f"--rivals {text!r}: {unknown[0]!r} is none of {', '.join(who.RIVALS)}")
    if "vllm" in names and not has_vllm:
        raise Misuse("--rivals vllm needs to know where vLLM is; add --vllm-python PYTHON or --vllm-url URL")
    return names


def _add_rivals(
    field: who.Field,
    options: who.RivalOptions,
    *,
    dtype: str,
    shape: str | None,
    target: str | None,
    drafters: Sequence[str],
    closing: contextlib.ExitStack,
) -> None:
    from eagle3_jax.load import locate

    if shape is not None:
        for name in options.names:
            field.lacks(name, "--shape has random weights, which no other software can load")
        return
    directory = locate(target, "target")
    if "transformers" in options.names:
        who.add_transformers(field, directory, dtype=dtype)
    if "vllm" in options.names:
        heads = [name for name in drafters if not is_named(name)]
        head = locate(heads[0] if heads else None, "eagle3") if heads or not drafters else None
        who.add_vllm(field, directory, head, options, dtype=dtype, closing=closing)


def _measure(
    field: who.Field,
    prompts: Sequence[Prompt],
    batch_size: int,
    *,
    max_new_tokens: int,
    repeats: int,
    now: Activity,
) -> Report:
    import jax

    from eagle3_jax.measure.bench import measure

    full = prompts[: len(prompts) // batch_size * batch_size]  # no batch is left half full
    return measure(
        field.contenders,
        [prompt.tokens for prompt in full],
        tasks=[prompt.category for prompt in full],
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        baselines=field.baselines,
        batch_size=batch_size,
        large=2**28 if jax.default_backend() == "cpu" else 2**31,
        on_progress=lambda what: now.say(f"batch {batch_size}: {what}"),
        on_result=lambda what: now.tell(f"batch {batch_size}, {what}"),
    )


def _about(
    shape: str | None, target: str | None, drafters: Sequence[str], files: Sequence[str], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Everything that a stranger needs to judge a number."""
    from eagle3_jax.reporting.environment import environment, sha256_of_prompts, source

    about = environment(target=target, drafter=None, prompt_files=[name for name in files if name != "random"])
    heads = [source(name, "eagle3") for name in drafters if not is_named(name)]
    about["drafters"] = heads or [about.pop("drafter")]
    about.pop("drafter", None)
    if shape is not None:
        about |= {"target": {"name": f"{shape}, random weights"}, "drafters": [{"name": "random weights"}]}
    tokens = [prompt.tokens for prompt in prompts]
    about["prompts_measured"] = {
        "names": [prompt.name for prompt in prompts],
        "tasks": [prompt.category for prompt in prompts],
        "tokens": [len(ids) for ids in tokens],
        "sha256": sha256_of_prompts(tokens),
    }
    return about


def _findings(
    about: dict[str, Any], reports: Sequence[Report], field: who.Field, price_per_hour: float | None
) -> output_of.Findings:
    from eagle3_jax.cli._hardware import hardware

    return output_of.Findings(
        device=hardware(), about=about, reports=reports, missing=field.missing, price_per_hour=price_per_hour
    )


def _tell(findings: output_of.Findings, output: Path | None, *, as_json: bool) -> None:
    """Write, print, and only then say what is wrong."""
    left_out = output_of.write(findings, output) if output is not None else ""
    if as_json:
        typer.echo(json.dumps(findings.to_json()))
    else:
        output_of.show(findings)
    if output is not None:
        typer.echo(f"wrote {output}" + (f" ({left_out})" if left_out else ""), err=True)
    output_of.say_failures(findings)
