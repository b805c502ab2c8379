"""Who takes part in ``eagle3 bench``: our decoders, and the rivals that are there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.cli._errors import Misuse, one_line
from eagle3_jax.cli._options import read_drafter, read_target, read_verifier

if TYPE_CHECKING:
    from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget, StaticTree
    from eagle3_jax.measure.contenders import Contender
    from eagle3_jax.measure.results import NotMeasured
    from eagle3_jax.rivals.vllm.bridge import VLLM
    from eagle3_jax.types import Drafter, Verifier

RIVALS = ("transformers", "vllm")


@dataclasses.dataclass(frozen=True)
class Usual:
    """What is measured unless options say otherwise: ``--chains``, ``--tree``, ``--ngram``, and the acceptance.

    Attributes:
        chains: As the option has it.
        tree: As the option has it.
        ngram: As the option has it.
        simulated_rates: A name of :data:`~eagle3_jax.simulated.PUBLISHED_RATES`, or the exact rule.
    """

    chains: str
    tree: str
    ngram: str
    simulated_rates: str | None


USUAL = Usual("1-7", "num_nodes=60,max_depth=8,top_k=10", "5", None)
# Each program of a large shape takes long to compile, and heads without training are never right.
USUAL_OF_SHAPES = Usual(
    "3,5", "num_nodes=60,max_depth=7,top_k=10", "none", "Llama-3.1-8B with its EAGLE-3 head on MT-Bench"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Methods:
    """What is drafted, and how.

    Attributes:
        chains: Lengths ``K`` for every head.
        trees: For every head.
        ngrams: Lengths ``K`` of prompt lookup.
        simulated_length: τ that the heads' drafts are made to have; their output is not the target's then.
        simulated_rate: The conditional acceptance rate that they are made to have.
        simulated_rates: The name of the published rates that they are made to have.
        verifier: An acceptance rule by its name, or ``module:name`` of the user's own.
    """

    chains: Sequence[int]
    trees: Sequence[DynamicTree | StaticTree]
    ngrams: Sequence[int]
    simulated_length: float | None = None
    simulated_rate: float | None = None
    simulated_rates: str | None = None
    verifier: str | None = None

    @property
    def simulates(self) -> bool:
        """Whether the heads' acceptance is simulated."""
        return self.simulation is not None

    @property
    def simulation(self) -> str | None:
        """Where the acceptance comes from that is simulated; ``None`` for a rule that looks at the target."""
        if self.simulated_length is not None:
            return f"τ of {self.simulated_length:g}"
        if self.simulated_rate is not None:
            return f"every draft token with probability {self.simulated_rate:g} once all before it were"
        return None if self.simulated_rates is None else f"as published for {self.simulated_rates}"

    @property
    def mark(self) -> str:
        """What the name of a row says of the acceptance rule: nothing of the exact one.

        Raises:
            ValueError: It is none.
        """
        from eagle3_jax.boundary import require_verifier

        if self.simulates:
            return " (simulated, not lossless)"
        rule = read_verifier(self.verifier)
        if rule is None:
            return ""
        require_verifier(rule)
        return f" ({type(rule).__name__}{'' if rule.lossless else ', not lossless'})"

    def rule(self, depth: int) -> Verifier | None:
        """The acceptance rule for drafts of a depth; ``None`` for the exact one.

        Raises:
            ValueError: They cannot have it.
        """
        from eagle3_jax import SimulatedAcceptance

        if self.simulated_length is not None:
            return SimulatedAcceptance.of_length(self.simulated_length, depth)
        if self.simulated_rate is not None:
            return SimulatedAcceptance.of_conditional_rate(self.simulated_rate, depth)
        if self.simulated_rates is not None:
            return SimulatedAcceptance.of_published(self.simulated_rates, depth)
        return read_verifier(self.verifier)


@dataclasses.dataclass
class Field:
    """All that take part, and those that do not.

    Attributes:
        contenders: In the order of the report.
        baselines: Names of our plain decoders.
        missing: Who is not measured, and why.
    """

    contenders: list[Contender] = dataclasses.field(default_factory=list)
    baselines: list[str] = dataclasses.field(default_factory=list)
    missing: list[NotMeasured] = dataclasses.field(default_factory=list)

    def lacks(self, name: str, reason: str) -> None:
        """Say who is not there."""
        from eagle3_jax.measure.results import NotMeasured

        self.missing.append(NotMeasured(name, one_line(reason)))


@dataclasses.dataclass(frozen=True)
class Models:
    """The target in the precision asked for, what drafts for it, and the target in float32 as a second baseline.

    Attributes:
        target: In the precision asked for.
        dtype: That precision, and the weights where they are not dense.
        float32: The same target; ``None`` where the first one is in float32, or on a GPU, where float32 is never the
            fastest and memory is shared.
        drafters: Heads under their names; ``None`` for prompt lookup alone; empty for plain decoding only.
    """

    target: LoadedTarget
    dtype: str
    float32: LoadedTarget | None
    drafters: dict[str, LoadedDrafter | None]


def read_models(target: str | None, drafters: Sequence[str], dtype: str, weights: str = "dense") -> Models:
    """From checkpoints."""
    from eagle3_jax import LoadedDrafter
    from eagle3_jax.reporting.gpu import on_gpu

    loaded = read_target(target, dtype, weights=weights)
    found: dict[str, LoadedDrafter | None] = {}
    for source in drafters or [None]:
        one: LoadedDrafter | Drafter[Any] | None = read_drafter(source, target=loaded, target_source=target)
        if one is not None:
            # `ngram` stands for the lengths of --ngram, which are rows of their own.
            name = Path(source or "eagle3").name
            head = one if isinstance(one, LoadedDrafter) else LoadedDrafter(one, name=name)
            found[name] = None if source == "ngram" else head
    name = dtype if weights == "dense" else f"{dtype}, {weights}"
    return Models(loaded, name, None if name == "float32" or on_gpu() else read_target(target, "float32"), found)


def random_models(shape: str, dtype: str) -> Models:
    """Random weights of a named shape: what a step costs, not what is accepted."""
    from eagle3_jax.load import precision_named
    from eagle3_jax.measure.random_models import random_pair

    target, drafter = random_pair(shape, precision=precision_named(dtype))
    return Models(target, dtype, None, {"eagle3": drafter})


def add_ours(field: Field, models: Models, methods: Methods) -> None:
    """Plain decoding in the asked precision and in float32, and every draft of every head."""
    from eagle3_jax import SpeculativeDecoder
    from eagle3_jax.drafters import NGram
    from eagle3_jax.measure.contenders import DecoderContender

    plain = {models.dtype: models.target} | ({} if models.float32 is None else {"float32": models.float32})
    for dtype, target in plain.items():
        decoder = SpeculativeDecoder(target, stop_tokens=())
        field.contenders.append(DecoderContender(f"plain {dtype}", dtype, decoder))
        field.baselines.append(f"plain {dtype}")
    for name, drafter in models.drafters.items():
        if drafter is not None:
            _add_head(field, models, methods, drafter, f"{name} " if len(models.drafters) > 1 else "")
    for length in methods.ngrams if models.drafters else ():
        decoder = SpeculativeDecoder(models.target, NGram(length), stop_tokens=())
        field.contenders.append(DecoderContender(f"n-gram K={length}", models.dtype, decoder))


def _add_head(field: Field, models: Models, methods: Methods, drafter: LoadedDrafter, prefix: str) -> None:
    from eagle3_jax import SpeculativeDecoder
    from eagle3_jax.boundary import Drafting
    from eagle3_jax.measure.contenders import DecoderContender
    from eagle3_jax.published_trees import tree_name

    shapes: list[tuple[str, int, dict[str, Any]]] = [
        (f"chain K={length}", length, {"num_speculative_tokens": length}) for length in methods.chains
    ]
    shapes += [(tree_name(tree), tree.max_depth, {"tree": tree}) for tree in methods.trees]
    if not isinstance(drafter.drafter, Drafting):  # it has the one shape that it was built with
        shapes = [(drafter.name, drafter.drafter.max_depth, {})]
    for name, depth, shape in shapes:
        name = f"{prefix}{name}{methods.mark}"
        try:
            rule = methods.rule(depth)
            decoder = SpeculativeDecoder(models.target, drafter, **shape, stop_tokens=(), verifier=rule)
        except ValueError as error:
            if "num_speculative_tokens" in shape and not methods.simulates:
                raise Misuse(f"{name}: {error}") from None
            field.lacks(name, str(error))  # a tree is among the defaults, and not every drafter has one
            continue
        field.contenders.append(DecoderContender(name, models.dtype, decoder))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RivalOptions:
    """Whom to compare with.

    Attributes:
        names: Of :data:`RIVALS`.
        vllm_python: Interpreter of an environment with vLLM.
        vllm_urls: Running servers.
        vllm_chains: Lengths ``K`` for vLLM, 0 for plain decoding.
        vllm_memory: Share of a GPU's memory for each engine of ours.
        longest: Longest sequence.
        largest_batch: Of the sweep.
    """

    names: Sequence[str]
    vllm_python: Path | None
    vllm_urls: Sequence[str]
    vllm_chains: Sequence[int]
    vllm_memory: float
    longest: int
    largest_batch: int


def rival_dtype(dtype: str) -> str:
    """The precision of ours that others have too."""
    return "float32" if dtype == "mixed" else dtype


def add_transformers(field: Field, directory: Path, *, dtype: str) -> None:
    """``generate`` and its prompt lookup, or why they are not there."""
    import jax

    from eagle3_jax.rivals.memory import is_out_of_memory

    on_gpu = jax.default_backend() != "cpu"
    try:
        from eagle3_jax.rivals.transformers import TransformersContender

        field.contenders += TransformersContender.load(directory, dtype=rival_dtype(dtype), on_gpu=on_gpu)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        field.lacks("transformers", str(error))
    except ModuleNotFoundError as error:
        field.lacks("transformers", f"{error.name} is not installed: pip install 'eagle3-jax[bench]'")
    except (ImportError, OSError, ValueError) as error:
        field.lacks("transformers", f"it cannot load the target ({str(error).splitlines()[0]})")


def add_vllm(
    field: Field,
    directory: Path,
    head: Path | None,
    options: RivalOptions,
    *,
    dtype: str,
    closing: contextlib.ExitStack,
) -> None:
    """VLLM plainly and with the head, each an engine of its own so that all can take turns, or why they are not there.

    Args:
        field: Where they are added.
        directory: Of the target.
        head: Its head's directory; ``None`` for plain decoding only.
        options: Which vLLM, and what of it.
        dtype: Ours.
        closing: Ends the processes.
    """
    from eagle3_jax.rivals.vllm.bridge import EngineOptions, VLLMError, VLLMUnavailable, eagle3
    from eagle3_jax.rivals.vllm.contender import VLLMContender

    connect = _vllm(options, closing)
    for length in options.vllm_chains:
        name = f"vLLM eagle3 K={length}" if length else "vLLM plain"
        name += ", compiled" if options.vllm_python is not None else ""  # a server is as its owner started it
        if length and head is None:
            continue
        try:
            engine = connect().engine(
                EngineOptions(
                    model=str(directory),
                    dtype=rival_dtype(dtype),
                    speculative=eagle3(head, length) if length and head is not None else None,
                    max_model_len=options.longest,
                    max_num_seqs=options.largest_batch,
                    gpu_memory_utilization=options.vllm_memory,
                    eager=False,
                )
            )
        except (VLLMError, VLLMUnavailable) as error:
            field.lacks(name, str(error))
            continue
        field.contenders.append(VLLMContender(name, rival_dtype(dtype), engine))


def _vllm(options: RivalOptions, closing: contextlib.ExitStack) -> Callable[[], VLLM]:
    """How to reach a vLLM: a new process each time, or the servers that are running."""
    from eagle3_jax.rivals.vllm.process import Process
    from eagle3_jax.rivals.vllm.server import Servers

    def start() -> VLLM:
        assert options.vllm_python is not None
        process = Process(options.vllm_python, threads=len(os.sched_getaffinity(0)))
        closing.callback(process.close)
        return process

    return start if options.vllm_python is not None else lambda: Servers(options.vllm_urls)


def drop_broken(field: Field, prompt: list[int]) -> None:
    """Let every rival write two tokens; one that cannot is named with its reason, and the rest is measured."""
    from eagle3_jax.measure.contenders import DecoderContender

    for one in list(field.contenders):
        if isinstance(one, DecoderContender):
            continue
        try:
            one.run([prompt], 2)
        except (RuntimeError, ValueError, OSError) as error:
            field.contenders.remove(one)
            field.lacks(one.name, str(error))
