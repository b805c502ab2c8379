"""``eagle3 bench``: the speed of every way of decoding, measured on this machine now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli import _bench_report as reporting
from eagle3_jax.cli._errors import Misuse, one_line
from eagle3_jax.cli._options import (
    DRAFTERS,
    JsonOption,
    MeasuredDtypeOption,
    TargetOption,
    VerifierOption,
    WeightsOption,
    announce_input,
    grouped,
    measured_dtype,
    parse_numbers,
    parse_tree,
    print_json,
)
from eagle3_jax.cli._parts import fetch_first, find_own, read_drafter, read_target, read_verifier
from eagle3_jax.cli._progress import Activity, counted, spinner
from eagle3_jax.files.sources import is_named, without_lookup

if TYPE_CHECKING:
    from eagle3_jax import LoadedDrafter, LoadedTarget
    from eagle3_jax.bench.contenders import Contender
    from eagle3_jax.bench.results import NotMeasured, Report
    from eagle3_jax.files.prompts import Prompt
    from eagle3_jax.types import Drafter, Verifier

EXAMPLE = """\b
Examples, the second for a first look:
  eagle3 bench --tasks code --max-prompts 4 --batch-size 1,4 --output results
  eagle3 bench --max-prompts 2 --repeats 2 --chains 3 --tree none --rivals none"""
ENGINES = ("transformers", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target and its drafters, from files or with random weights."""

    target: TargetOption = None
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of a named shape instead of --target, such as Llama-100M or Llama-3.1-8B. Acceptance "
            "of drafts is simulated (NOT LOSSLESS). Default rates: those published for Llama-3.1-8B."
        ),
    ] = None
    drafter: Annotated[
        list[str] | None, typer.Option(help=f"{DRAFTERS}; may be repeated. Default: the bundled head.")
    ] = None
    dtype: MeasuredDtypeOption = None
    weights: WeightsOption = "dense"

    def check(self) -> None:
        """Refuses options that exclude each other."""
        if self.shape is not None and self.weights != "dense":
            raise Misuse(f"--weights {self.weights}: --shape draws dense weights; leave one of them out")
        if self.shape is not None and (self.target is not None or self.drafter):
            raise Misuse("--shape has random weights of its own; leave out --target and --drafter")
        if "none" in (self.drafter or []) and len(self.drafter or []) > 1:
            raise Misuse("--drafter none is plain decoding alone; give it once, or other drafters")

    def read(self, dtype: str) -> Models:
        """Loads the target and its drafters, or makes their random weights."""
        from eagle3_jax import LoadedDrafter
        from eagle3_jax.bench.gpu import on_gpu

        if self.shape is not None:
            from eagle3_jax.bench.random_models import random_pair
            from eagle3_jax.load import precision_named

            target, drafter = random_pair(self.shape, precision=precision_named(dtype))
            return Models(target, dtype, None, {"eagle3": drafter})
        target = read_target(self.target, dtype, weights=self.weights)
        found: dict[str, LoadedDrafter | None] = {}
        for source in self.drafter or [None]:
            one: LoadedDrafter | Drafter[Any] | None = read_drafter(source, target=target, target_source=self.target)
            head_source = without_lookup(source or "eagle3")
            name = (source or "").removesuffix(head_source) + Path(head_source).name
            if one is not None:
                head = one if isinstance(one, LoadedDrafter) else LoadedDrafter(one, name=name)
                found[name] = None if source == "ngram" else head  # the lengths of --ngram are rows of their own
        name = dtype if self.weights == "dense" else f"{dtype}, {self.weights}"
        has_float32 = name == "float32" or on_gpu()
        return Models(target, name, None if has_float32 else read_target(self.target, "float32"), found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL file (texts, token ids, MT-bench, Spec-Bench, HumanEval, GSM8K), or 'random'; may be repeated. "
            "Default: the held-out prompts of the bundled pair."
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Exact length of every prompt: cut to its end, or repeated.", min=1)
    ] = None
    tasks: Annotated[str | None, typer.Option(help="Only prompts of these categories: 'code,prose'.")] = None
    max_prompts: Annotated[
        int, typer.Option(help="Maximum number of prompts decoded in each repeat.", min=1, max=100_000)
    ] = 8
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.", min=2, max=100_000)] = 96

    def read(self, target: LoadedTarget, *, usual: str) -> list[Prompt]:
        """Prompts of all categories in turn, put together by category.

        Args:
            target: The target that encodes them.
            usual: The file, or ``random``, if no prompts were given.
        """
        from eagle3_jax.files.prompts import in_turn, random_prompts, read_prompts

        found: list[Prompt] = []
        length = self.prompt_tokens or min(128, target.max_positions // 2)
        limit = self.max_new_tokens
        for file in self.prompts or [usual]:
            is_sized = file == "random" or self.prompt_tokens is not None
            if is_sized and length + limit > target.max_positions:
                raise Misuse(
                    f"prompts of {length} tokens and --max-new-tokens {limit} exceed the target's "
                    f"{target.max_positions} positions; lower --prompt-tokens or --max-new-tokens"
                )
            if file == "random":
                found += random_prompts(self.max_prompts, target.vocab_size, length)
                continue
            announce_input(file)
            found += read_prompts(Path(file), target, max_new_tokens=limit, length=self.prompt_tokens)
        names = list(dict.fromkeys(prompt.category for prompt in found))
        wanted = names if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        for name in wanted:
            if name not in names:
                raise Misuse(f"--tasks {self.tasks!r}: there are no prompts of {name!r}; there are {', '.join(names)}")
        return in_turn([prompt for prompt in found if prompt.category in wanted], self.max_prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The drafts of every head and their acceptance."""

    chains: Annotated[
        str | None, typer.Option(help="Chain lengths K: '1-7', '1,3,5' or 'none'.  [default: 1-7; of a --shape 3,5]")
    ] = None
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="A tree, or 'none'; may be repeated.  [default: num_nodes=60,max_depth=8,top_k=10; of a --shape "
            "max_depth=7]"
        ),
    ] = None
    ngram: Annotated[
        str | None, typer.Option(help="Lengths K of prompt lookup, or 'none'.  [default: 5; of a --shape none]")
    ] = None
    simulated_acceptance_length: Annotated[
        float | None, typer.Option(help="NOT LOSSLESS: simulate this τ for the heads' drafts, to measure its speed.")
    ] = None
    simulated_acceptance_rate: Annotated[
        float | None,
        typer.Option(help="NOT LOSSLESS: simulate this conditional acceptance rate for the heads' drafts."),
    ] = None
    verifier: VerifierOption = None


_PUBLISHED = "Llama-3.1-8B with its EAGLE-3 head on MT-Bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Other software to compare with."""

    rivals: Annotated[str, typer.Option(help="Other software to measure: 'transformers' or 'none'.")] = "transformers"

    @property
    def has_transformers(self) -> bool:
        """Whether transformers is measured.

        Raises:
            Misuse: The name is unknown.
        """
        if self.rivals not in ENGINES:
            raise Misuse(f"--rivals {self.rivals!r} is none of {', '.join(ENGINES)}")
        return self.rivals == "transformers"


@grouped
def bench(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
    methods: MethodOptions,
    engines: EngineOptions,
    repeats: Annotated[int, typer.Option(help="Measured passes.", min=1, max=10_000)] = 5,
    batch_size: Annotated[str, typer.Option(help="Prompts decoded at once: '1', or several to sweep: '1,4,8'.")] = "1",
    output: Annotated[Path | None, typer.Option(help="New directory for bench.json and bench.md.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure drafts against plain decoding and other engines.

    All are interleaved on the same prompts: plain decoding, chains, trees, prompt lookup and transformers.

    Ctrl-C ends the measurement; the repeats completed until then are reported.

    Ends with exit code 1, after everything is written, if a measurement is faster than the memory can be read.
    """
    from eagle3_jax.bench.environment import hardware
    from eagle3_jax.bench.memory import allocate_on_demand
    from eagle3_jax.files.sources import bundled

    drafts = Methods(methods, is_shape=models.shape is not None)
    sizes = parse_numbers(batch_size, "--batch-size")
    models.check()
    has_transformers = engines.has_transformers
    if models.shape is not None and [name for name in prompts.prompts or [] if name != "random"]:
        raise Misuse("--shape has no tokenizer; leave --prompts out, and choose a length with --prompt-tokens")
    reporting.check_directory(output)
    fetch_first(models.target)
    with spinner("loading") as now:
        if has_transformers and models.shape is None:
            allocate_on_demand()
        dtype = measured_dtype(models.dtype)
        loaded = models.read(dtype)
        field = Field()
        field.add_ours(loaded, drafts)
        usual = "random" if models.shape else str(bundled("prompts.jsonl"))
        chosen = prompts.read(loaded.target, usual=usual)
        if len(chosen) < max(sizes):
            raise Misuse(
                f"--batch-size {max(sizes)} needs as many prompts, and there are {len(chosen)}; see --max-prompts"
            )
        if has_transformers:
            now.say("loading transformers")
            field.add_transformers(models, "float32" if dtype == "mixed" else dtype)
        field.drop_broken(chosen[0].tokens)
        taken = [one for one in field.contenders for size in sizes if size <= (one.largest_batch or size)]
        now = counted(now, len(taken) * (1 + repeats))
        reports = []
        try:
            for size in sizes:
                limit = prompts.max_new_tokens
                reports.append(_measure(field, chosen, size, max_new_tokens=limit, repeats=repeats, now=now))
                if reports[-1].repeats < repeats:
                    break
        except KeyboardInterrupt:
            if not reports:
                raise
    about = _about(models, prompts.prompts or [], chosen)
    about["weights"] = models.weights
    about["simulated_acceptance"] = drafts.simulation
    about["drafter_methods"] = ["NGram" if one is None else one.described for one in loaded.drafters.values()]
    findings = reporting.Findings(device=hardware(), about=about, reports=reports, missing=field.missing)
    if output is not None:
        reporting.write(findings, output)
    if as_json:
        print_json(findings.to_json())
    else:
        reporting.show(findings)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    for line in findings.failures:
        typer.echo(f"error: {line}", err=True)
    interrupted = [report.repeats for report in reports] != [repeats] * len(sizes)
    if interrupted:
        done = ", ".join(f"{report.repeats} of {repeats} at batch {report.batch_size}" for report in reports)
        typer.echo(f"interrupted: measured repeats {done}", err=True)
    if findings.failures or interrupted:
        raise typer.Exit(130 if interrupted else 1)


class Models(NamedTuple):
    """A target and its drafters."""

    target: LoadedTarget  #: In the precision asked for.
    dtype: str  #: That precision, and the weights where they are not dense.
    #: The same target as a second baseline; ``None`` where the first one is in float32, or on a GPU, where float32 is
    #: never the fastest and memory is shared.
    float32: LoadedTarget | None
    #: Heads under their names; ``None`` for prompt lookup alone; empty for plain decoding only.
    drafters: dict[str, LoadedDrafter | None]


class Methods:
    """Drafts to measure, and the rule that accepts them.

    With random weights fewer drafts are measured, since programs of large shapes take long to compile. Acceptance is
    then simulated, since heads without training are never right.

    Attributes:
        chains: Lengths ``K`` for every head.
        trees: For every head.
        ngrams: Lengths ``K`` of prompt lookup.
        simulation: The simulated acceptance in words; ``None`` for a rule that looks at the target.
        rule: Gives the acceptance rule for drafts of a depth, ``None`` for the exact one. It raises ``ValueError`` if
            drafts of this depth cannot have the simulated acceptance.
    """

    simulation: str | None = None
    rule: Callable[[int], Verifier | None]

    def __init__(self, given: MethodOptions, *, is_shape: bool):
        from eagle3_jax import SimulatedAcceptance

        trees = [f"num_nodes=60,max_depth={7 if is_shape else 8},top_k=10"] if given.tree is None else given.tree
        if "none" in trees and len(trees) > 1:
            raise Misuse("--tree none leaves trees out; give it once, or trees")
        chains = ("3,5" if is_shape else "1-7") if given.chains is None else given.chains
        ngram = ("none" if is_shape else "5") if given.ngram is None else given.ngram
        self.chains = parse_numbers(chains, "--chains", or_none=True)
        self.trees = [tree for tree in (parse_tree(text) for text in trees if text != "none") if tree is not None]
        self.ngrams = parse_numbers(ngram, "--ngram", or_none=True)
        length = given.simulated_acceptance_length
        rate = given.simulated_acceptance_rate
        verifier = given.verifier
        if length is not None and rate is not None:
            raise Misuse("--simulated-acceptance-length and --simulated-acceptance-rate were both given; give one")
        if (length is not None or rate is not None) and verifier is not None:
            raise Misuse("--verifier and a simulated acceptance were both given; a draft is accepted by one rule")
        if length is not None:
            if not length >= 1:
                raise Misuse(f"--simulated-acceptance-length {length:g}: expected 1 or more")
            self.simulation = f"τ of {length:g}"
            self.rule = lambda depth: SimulatedAcceptance.of_length(length, depth)
        elif rate is not None:
            if not 0 <= rate <= 1:
                raise Misuse(f"--simulated-acceptance-rate {rate:g}: expected 0 to 1")
            self.simulation = f"every draft token with probability {rate:g} once all before it were"
            self.rule = lambda depth: SimulatedAcceptance.of_conditional_rate(rate, depth)
        elif is_shape and verifier is None:
            self.simulation = f"as published for {_PUBLISHED}"
            self.rule = lambda depth: SimulatedAcceptance.of_published(_PUBLISHED, depth)
        else:
            self.rule = lambda depth: read_verifier(verifier)

    @property
    def mark(self) -> str:
        """The acceptance rule in the name of a row; empty for the exact one.

        Raises:
            ValueError: It is not an acceptance rule.
        """
        from eagle3_jax.checks import require_part

        if self.simulation is not None:
            return " (simulated, not lossless)"
        rule = self.rule(1)
        if rule is None:
            return ""
        require_part(rule, "verifier")
        return f" ({type(rule).__name__}{'' if rule.lossless else ', not lossless'})"


@dataclasses.dataclass
class Field:
    """All contenders, and those that cannot take part."""

    contenders: list[Contender] = dataclasses.field(default_factory=list)  #: In the order of the report.
    #: Contenders that are not measured, with the reason.
    missing: list[NotMeasured] = dataclasses.field(default_factory=list)

    def lacks(self, name: str, reason: str) -> None:
        """Records a contender that cannot take part."""
        from eagle3_jax.bench.results import NotMeasured

        self.missing.append(NotMeasured(name, one_line(reason)))

    def add_ours(self, models: Models, methods: Methods) -> None:
        """Adds plain decoding in the asked precision and in float32, and every draft of every head."""
        from eagle3_jax import SpeculativeDecoder
        from eagle3_jax.bench.contenders import DecoderContender
        from eagle3_jax.checks import Drafting
        from eagle3_jax.drafters import NGram
        from eagle3_jax.topology import tree_name

        def add(name: str, dtype: str, target: LoadedTarget, *drafter: Any, **draft: Any) -> None:
            decoder = SpeculativeDecoder(target, *drafter, **draft, stop_tokens=())
            self.contenders.append(DecoderContender(name, dtype, decoder))

        add(f"plain {models.dtype}", models.dtype, models.target)
        if models.float32 is not None:
            add("plain float32", "float32", models.float32)
        for head, drafter in models.drafters.items():
            if drafter is None:
                continue
            shapes: list[tuple[str, int, dict[str, Any]]] = [
                (f"chain K={length}", length, {"num_speculative_tokens": length}) for length in methods.chains
            ]
            shapes += [(tree_name(tree), tree.max_depth, {"tree": tree}) for tree in methods.trees]
            if not isinstance(drafter.drafter, Drafting):  # it has the one shape that it was built with
                shapes = [(drafter.name, drafter.drafter.max_depth, {})]
            for shape, depth, options in shapes:
                name = f"{head} " * (len(models.drafters) > 1) + shape + methods.mark
                try:
                    add(name, models.dtype, models.target, drafter, **options, verifier=methods.rule(depth))
                except ValueError as error:
                    if "num_speculative_tokens" in options and methods.simulation is None:
                        raise Misuse(f"{name}: {error}") from None
                    self.lacks(name, str(error))  # a tree is among the defaults, and not every drafter has one
        for length in methods.ngrams if models.drafters else ():
            add(f"n-gram K={length}", models.dtype, models.target, NGram(length))

    def add_transformers(self, models: ModelOptions, dtype: str) -> None:
        """Adds the rows of transformers, or the reason why it cannot take part.

        Args:
            models: Sources of the target and its drafters.
            dtype: Precision to load the target in, ``float32`` or ``bfloat16``.
        """
        import jax

        from eagle3_jax.bench.memory import is_out_of_memory
        from eagle3_jax.load import locate

        if models.shape is not None or find_own("--target", models.target) is not None:
            made = "--shape has random weights" if models.shape else "--target is a part of yours"
            self.lacks("transformers", f"{made}, which no other software can load")
            return
        directory = locate(models.target, "target")
        try:
            from eagle3_jax.bench.transformers import TransformersContender

            on_gpu = jax.default_backend() != "cpu"
            self.contenders += TransformersContender.load(directory, dtype=dtype, on_gpu=on_gpu)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.lacks("transformers", str(error))
        except ModuleNotFoundError as error:
            self.lacks("transformers", f"{error.name} is not installed: pip install 'eagle3-jax[bench]'")
        except (ImportError, OSError, ValueError) as error:
            self.lacks("transformers", f"it cannot load the target ({str(error).splitlines()[0]})")

    def drop_broken(self, prompt: list[int]) -> None:
        """Lets every other engine write two tokens; removes one that cannot, and records its reason."""
        from eagle3_jax.bench.contenders import DecoderContender

        for one in list(self.contenders):
            if isinstance(one, DecoderContender):
                continue
            try:
                one.run([prompt], 2)
            except (RuntimeError, ValueError, OSError) as error:
                self.contenders.remove(one)
                self.lacks(one.name, str(error))


def _measure(
    field: Field, prompts: Sequence[Prompt], batch_size: int, *, max_new_tokens: int, repeats: int, now: Activity
) -> Report:
    import jax

    from eagle3_jax.bench.contenders import DecoderContender
    from eagle3_jax.bench.run import measure

    plain = [one.name for one in field.contenders if isinstance(one, DecoderContender) and not one.drafts]
    full = prompts[: len(prompts) // batch_size * batch_size]  # no batch is left half full
    return measure(
        field.contenders,
        [prompt.tokens for prompt in full],
        tasks=[prompt.category for prompt in full],
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        baselines=plain,
        batch_size=batch_size,
        large=2**28 if jax.default_backend() == "cpu" else 2**31,
        on_progress=lambda what: now.say(f"batch {batch_size}: {what}"),
        on_result=lambda what: now.tell(f"batch {batch_size}, {what}"),
    )


def _about(models: ModelOptions, files: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Everything that a stranger needs to judge a number."""
    from eagle3_jax.bench.environment import environment, sha256_of_prompts, source
    from eagle3_jax.files.published import is_published

    usual = models.target if is_published(models.target) else None
    prompt_files = [name for name in files if name != "random"]
    about = environment(target=models.target, drafter=usual, prompt_files=prompt_files)
    heads = [source(without_lookup(name), "eagle3") for name in models.drafter or [] if not is_named(name)]
    about["drafters"] = heads or [about["drafter"]]
    del about["drafter"]
    if models.shape is not None:
        about |= {"target": {"name": f"{models.shape}, random weights"}, "drafters": [{"name": "random weights"}]}
    tokens = [prompt.tokens for prompt in prompts]
    about["prompts_measured"] = {
        "names": [prompt.name for prompt in prompts],
        "tasks": [prompt.category for prompt in prompts],
        "tokens": [len(ids) for ids in tokens],
        "sha256": sha256_of_prompts(tokens),
    }
    return about
