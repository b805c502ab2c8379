"""``eagle3 bench``: the speed of every way of decoding, measured on this machine now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    DRAFTERS,
    JsonOption,
    MeasuredDtypeOption,
    TargetOption,
    WeightsOption,
    announce_input,
    grouped,
    measured_dtype,
    parse_numbers,
)
from eagle3_jax.cli._parts import (
    announced,
    fetch_first,
    find_own,
    measured_drafter,
    read_drafter,
    read_target,
)
from eagle3_jax.cli._printing import print_page
from eagle3_jax.cli._progress import Activity, counted, spinner
from eagle3_jax.cli.bench.field import Field, MethodOptions, Models
from eagle3_jax.cli.bench.report import Findings, check_directory, write_report
from eagle3_jax.files.sources import is_named, without_lookup

if TYPE_CHECKING:
    from eagle3_jax import LoadedDrafter, LoadedTarget
    from eagle3_jax.bench.results import Report
    from eagle3_jax.prompts.benchmark import Prompt

EXAMPLE = """\b
Examples, the second for a first look:
  eagle3 bench --tasks code --max-prompts 4 --batch-size 1,4 --output results
  eagle3 bench --max-prompts 2 --repeats 2 --chains 3 --tree none --rivals none"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target and its drafters, from files or with random weights."""

    target: TargetOption = None
    shape: Annotated[
        str | None,
        typer.Option(
            help=(
                "Random weights of a named shape instead of --target, such as Llama-100M or"
                " Llama-3.1-8B. Acceptance of drafts is simulated (NOT LOSSLESS). Default rates:"
                " those published for Llama-3.1-8B."
            )
        ),
    ] = None
    drafter: Annotated[
        list[str] | None,
        typer.Option(help=f"{DRAFTERS}; may be repeated. Default: the bundled head."),
    ] = None
    dtype: MeasuredDtypeOption = None
    weights: WeightsOption = "dense"

    def check(self) -> None:
        """Refuses options that exclude each other."""
        if self.shape is not None and self.weights != "dense":
            raise Misuse(
                f"--weights {self.weights}: --shape makes dense weights; leave one of them out"
            )
        if self.shape is not None and (self.target is not None or self.drafter):
            raise Misuse("--shape makes random weights; leave out --target and --drafter")
        if "none" in (self.drafter or []) and len(self.drafter or []) > 1:
            raise Misuse("--drafter none is plain decoding; give it once, or other drafters")

    def read(self, dtype: str) -> Models:
        """Loads the target and its drafters, or makes their random weights."""
        from eagle3_jax.measure.gpu import on_gpu

        if self.shape is not None:
            from eagle3_jax.bench.random_models import random_pair
            from eagle3_jax.load import precision_named

            target, drafter = random_pair(self.shape, precision=precision_named(dtype))
            return Models(target, dtype, None, {"eagle3": drafter})
        target = read_target(self.target, dtype, weights=self.weights)
        name = dtype if self.weights == "dense" else f"{dtype}, {self.weights}"
        has_float32 = name == "float32" or on_gpu()
        float32 = None if has_float32 else read_target(self.target, "float32")
        return Models(target, name, float32, self._drafters(target))

    def _drafters(self, target: LoadedTarget) -> dict[str, LoadedDrafter | None]:
        from eagle3_jax import LoadedDrafter

        drafters: dict[str, LoadedDrafter | None] = {}
        for source in self.drafter or [None]:
            drafter: Any = read_drafter(source, target=target)
            head_source = without_lookup(source or "eagle3")
            name = (source or "").removesuffix(head_source) + Path(head_source).name
            # The lengths of --ngram are separate rows.
            if source == "ngram":
                drafters[name] = None
            elif isinstance(drafter, LoadedDrafter):
                drafters[name] = drafter
            elif drafter is not None:
                drafters[name] = LoadedDrafter(drafter, name=name)
        return drafters


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "JSONL file (texts, token ids, messages, MT-bench, Spec-Bench, HumanEval, GSM8K),"
                " or 'random'; may be repeated. Default: the held-out prompts of the bundled pair."
            )
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Exact length of every prompt: cut to its end, or repeated.", min=1),
    ] = None
    tasks: Annotated[
        str | None, typer.Option(help="Only prompts of these categories: 'code,prose'.")
    ] = None
    max_prompts: Annotated[
        int,
        typer.Option(help="Maximum number of prompts decoded in each repeat.", min=1, max=100_000),
    ] = 8
    max_new_tokens: Annotated[
        int, typer.Option(help="New tokens per prompt.", min=2, max=100_000)
    ] = 96

    def read(self, target: LoadedTarget, *, default: str) -> list[Prompt]:
        """Returns prompts of all categories in turn, ordered by category.

        Args:
            target: The target that encodes them.
            default: The file, or ``random``, if no prompts were given.
        """
        from eagle3_jax.prompts.benchmark import in_turn, random_prompts, read_prompts

        prompts: list[Prompt] = []
        length = self.prompt_tokens or min(128, target.max_positions // 2)
        limit = self.max_new_tokens
        for file in self.prompts or [default]:
            is_sized = file == "random" or self.prompt_tokens is not None
            if is_sized and length + limit > target.max_positions:
                raise Misuse(
                    f"prompts of {length} tokens and --max-new-tokens {limit} exceed the target's "
                    f"{target.max_positions} positions; lower --prompt-tokens or --max-new-tokens"
                )
            if file == "random":
                prompts += random_prompts(self.max_prompts, target.vocab_size, length)
                continue
            announce_input(file)
            prompts += read_prompts(
                Path(file), target, max_new_tokens=limit, length=self.prompt_tokens
            )

        categories = list(dict.fromkeys(prompt.category for prompt in prompts))
        tasks = categories
        if self.tasks is not None:
            tasks = [name.strip() for name in self.tasks.split(",")]
        for name in tasks:
            if name not in categories:
                known = ", ".join(categories)
                raise Misuse(
                    f"--tasks {self.tasks!r}: there are no prompts of {name!r}; there are {known}"
                )
        return in_turn([prompt for prompt in prompts if prompt.category in tasks], self.max_prompts)


@grouped
def bench(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
    methods: MethodOptions,
    rivals: Annotated[
        Literal["transformers", "none"],
        typer.Option(help="Other software to measure on the same prompts."),
    ] = "transformers",
    repeats: Annotated[int, typer.Option(help="Measured passes.", min=1, max=10_000)] = 5,
    batch_size: Annotated[
        str, typer.Option(help="Prompts decoded at once: '1', or several to sweep: '1,4,8'.")
    ] = "1",
    output: Annotated[
        Path | None, typer.Option(help="New directory for bench.json and bench.md.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure drafts against plain decoding and transformers.

    All take turns on the same prompts: plain decoding, chains, trees, prompt lookup and
    transformers.

    Ctrl-C ends the measurement; the repeats completed until then are reported.

    Ends with exit code 1, after everything is written, if a measurement is faster than the memory
    can be read.
    """
    from eagle3_jax.files.sources import bundled
    from eagle3_jax.measure.environment import hardware
    from eagle3_jax.measure.memory import allocate_on_demand

    drafts = methods.read(is_shape=models.shape is not None)
    sizes = parse_numbers(batch_size, "--batch-size")
    models.check()
    if models.shape is not None and [name for name in prompts.prompts or [] if name != "random"]:
        raise Misuse(
            "--shape has no tokenizer; leave --prompts out, and choose a length with"
            " --prompt-tokens"
        )

    check_directory(output)
    fetch_first(models.target, *(models.drafter or []))
    if not models.drafter and models.target is not None:
        drafter = announced(measured_drafter(models.target), models.target)
        models = dataclasses.replace(models, drafter=[drafter])

    with spinner("loading") as now:
        # PyTorch needs memory of the same GPU.
        if rivals != "none" and models.shape is None:
            allocate_on_demand()
        dtype = measured_dtype(models.dtype)
        loaded = models.read(dtype)
        field = Field()
        field.add_library(loaded, drafts)
        default = "random" if models.shape else str(bundled("prompts.jsonl"))
        chosen = prompts.read(loaded.target, default=default)
        if len(chosen) < max(sizes):
            raise Misuse(
                f"--batch-size {max(sizes)} needs as many prompts, and there are {len(chosen)}; see"
                " --max-prompts"
            )
        about = _about(models, loaded, prompts.prompts or [], chosen)
        about["simulated_acceptance"] = drafts.simulation
        if rivals != "none":
            now.say("loading transformers")
            _add_transformers(field, models, "float32" if dtype == "mixed" else dtype)
        field.drop_broken(chosen[0].tokens)
        reports = _measure(field, chosen, sizes, prompts.max_new_tokens, repeats, now)
    findings = Findings(
        device=hardware(),
        about=about,
        reports=reports,
        missing=field.missing,
        interruption=_interruption(reports, sizes, repeats),
    )

    if output is not None:
        write_report(findings, output)
    print_page(findings.page(), as_json=as_json)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    for failure in findings.failures:
        typer.echo(f"error: {failure}", err=True)
    if findings.interruption:
        typer.echo(f"interrupted: measured {findings.interruption}", err=True)
    if findings.failures or findings.interruption:
        raise typer.Exit(130 if findings.interruption else 1)


def _interruption(reports: Sequence[Report], sizes: Sequence[int], repeats: int) -> str:
    """Returns what was measured, in words, if that is less than everything."""
    if [report.repeats for report in reports] == [repeats] * len(sizes):
        return ""
    done = [f"{report.repeats} of {repeats} at batch {report.batch_size}" for report in reports]
    return f"repeats {', '.join(done)}"


def _add_transformers(field: Field, models: ModelOptions, dtype: str) -> None:
    reason = None
    if models.shape is not None:
        reason = "--shape has random weights, which no other software can load"
    elif find_own("--target", models.target) is not None:
        reason = "--target is a part of yours, which no other software can load"

    if reason is None:
        field.add_transformers(models.target, dtype=dtype)
    else:
        field.add_missing("transformers", reason)


def _measure(
    field: Field,
    prompts: Sequence[Prompt],
    sizes: list[int],
    max_new_tokens: int,
    repeats: int,
    now: Activity,
) -> list[Report]:
    """Measures at every batch size.

    Ctrl-C after the first repeat returns the reports that there are.
    """
    passes = sum(
        size <= (contender.largest_batch or size)
        for contender in field.contenders
        for size in sizes
    )
    now = counted(now, passes * (1 + repeats))

    reports: list[Report] = []
    try:
        for size in sizes:
            reports.append(_measure_batch(field, prompts, size, max_new_tokens, repeats, now))
            if reports[-1].repeats < repeats:
                break
    except KeyboardInterrupt:
        if not reports:
            raise
    return reports


def _measure_batch(
    field: Field,
    prompts: Sequence[Prompt],
    batch_size: int,
    max_new_tokens: int,
    repeats: int,
    now: Activity,
) -> Report:
    import jax

    from eagle3_jax.bench.run import measure

    # Every batch is full.
    full = prompts[: len(prompts) // batch_size * batch_size]
    return measure(
        field.contenders,
        [prompt.tokens for prompt in full],
        tasks=[prompt.category for prompt in full],
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        baselines=[contender.name for contender in field.of_library if not contender.drafts],
        batch_size=batch_size,
        large=2**28 if jax.default_backend() == "cpu" else 2**31,
        on_progress=lambda step: now.say(f"batch {batch_size}: {step}"),
        on_result=lambda result: now.tell(f"batch {batch_size}, {result}"),
    )


def _about(
    models: ModelOptions, loaded: Models, files: Sequence[str], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Returns the environment of a run, and hashes of its models and prompts."""
    from eagle3_jax.measure.environment import environment, sha256_of_prompts, source

    prompt_files = [name for name in files if name != "random"]
    about = environment(target=models.target, prompt_files=prompt_files)
    bundled_head = about.pop("drafter")
    heads = [
        source(without_lookup(name), "eagle3")
        for name in models.drafter or []
        if not is_named(name)
    ]
    about["drafters"] = heads if models.drafter else [bundled_head]
    if models.shape is not None:
        about |= {
            "target": {"name": f"{models.shape}, random weights"},
            "drafters": [{"name": "random weights"}],
        }
    tokens = [prompt.tokens for prompt in prompts]
    measured = {
        "names": [prompt.name for prompt in prompts],
        "tasks": [prompt.category for prompt in prompts],
        "tokens": [len(ids) for ids in tokens],
        "sha256": sha256_of_prompts(tokens),
    }
    methods = ["NGram" if head is None else head.described for head in loaded.drafters.values()]
    return about | {
        "prompts_measured": measured,
        "weights": models.weights,
        "drafter_methods": methods,
    }
