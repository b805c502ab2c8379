"""The contenders of ``eagle3 bench``: drafts of this library, plain decoding, and transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli._errors import Misuse, one_line
from eagle3_jax.cli._options import VerifierOption, parse_numbers, parse_tree
from eagle3_jax.cli._parts import read_verifier

if TYPE_CHECKING:
    from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget, StaticTree
    from eagle3_jax.bench.contenders import Contender, DecoderContender
    from eagle3_jax.bench.results import NotMeasured
    from eagle3_jax.types import Verifier

_PUBLISHED = "Llama-3.1-8B with its EAGLE-3 head on MT-Bench"
# Fewer drafts are measured with random weights, since programs of large shapes take long to
# compile.
_TRAINED = {"chains": "1-7", "tree": ["num_nodes=60,max_depth=8,top_k=10"], "ngram": "5"}
_SHAPE = {"chains": "3,5", "tree": ["num_nodes=60,max_depth=7,top_k=10"], "ngram": "none"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The drafts of every head and their acceptance."""

    chains: Annotated[
        str | None,
        typer.Option(
            help="Chain lengths K: '1-7', '1,3,5' or 'none'.  [default: 1-7; of a --shape 3,5]"
        ),
    ] = None
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A tree, or 'none'; may be repeated.  [default: num_nodes=60,max_depth=8,top_k=10;"
                " of a --shape max_depth=7]"
            )
        ),
    ] = None
    ngram: Annotated[
        str | None,
        typer.Option(
            help="Lengths K of prompt lookup, or 'none'.  [default: 5; of a --shape none]"
        ),
    ] = None
    simulated_acceptance_length: Annotated[
        float | None,
        typer.Option(
            help="NOT LOSSLESS: simulate this τ for the heads' drafts, to measure its speed."
        ),
    ] = None
    simulated_acceptance_rate: Annotated[
        float | None,
        typer.Option(
            help="NOT LOSSLESS: simulate this conditional acceptance rate for the heads' drafts."
        ),
    ] = None
    verifier: VerifierOption = None

    def read(self, *, is_shape: bool) -> Methods:
        """Returns the drafts of these options, or the default ones of a kind of measurement."""
        options: dict[str, Any] = dict(_SHAPE if is_shape else _TRAINED)
        options |= {
            name: value
            for name, value in vars(self).items()
            if name in options and value is not None
        }
        trees = options["tree"]
        if "none" in trees and len(trees) > 1:
            raise Misuse("--tree none leaves trees out; give it once, or trees")

        chains = parse_numbers(options["chains"], "--chains", or_none=True)
        drafted = [parse_tree(text) for text in trees if text != "none"]
        ngrams = parse_numbers(options["ngram"], "--ngram", or_none=True)
        return Methods(chains, drafted, ngrams, *self._acceptance(is_shape=is_shape))

    def _acceptance(self, *, is_shape: bool) -> tuple[str | None, Callable[[int], Verifier | None]]:
        """Returns the simulated acceptance in words, and the rule.

        Acceptance is simulated for random weights, since heads without training are never right.
        """
        from eagle3_jax import SimulatedAcceptance

        length = self.simulated_acceptance_length
        rate = self.simulated_acceptance_rate
        verifier = self.verifier
        if length is not None and rate is not None:
            raise Misuse(
                "--simulated-acceptance-length and --simulated-acceptance-rate were both given;"
                " give one"
            )
        if (length is not None or rate is not None) and verifier is not None:
            raise Misuse(
                "--verifier and a simulated acceptance were both given; a draft is accepted by one"
                " rule"
            )
        if length is not None:
            if not length >= 1:
                raise Misuse(f"--simulated-acceptance-length {length:g}: expected 1 or more")
            return f"τ of {length:g}", lambda depth: SimulatedAcceptance.of_length(length, depth)
        if rate is not None:
            if not 0 <= rate <= 1:
                raise Misuse(f"--simulated-acceptance-rate {rate:g}: expected 0 to 1")
            words = f"every draft token with probability {rate:g} once all before it were"
            return words, lambda depth: SimulatedAcceptance.of_conditional_rate(rate, depth)
        if is_shape and verifier is None:
            words = f"as published for {_PUBLISHED}"
            return words, lambda depth: SimulatedAcceptance.of_published(_PUBLISHED, depth)
        return None, lambda depth: read_verifier(verifier)


class Models(NamedTuple):
    """A target and its drafters."""

    target: LoadedTarget  #: In the precision of ``--dtype``.
    dtype: str  #: That precision, and the weights if they are not dense.
    #: The same target in float32 as a second baseline; ``None`` if the first one is in float32, or
    #: on a GPU, where float32 is never the fastest.
    float32: LoadedTarget | None
    #: Heads under their names; ``None`` for prompt lookup; empty for plain decoding only.
    drafters: dict[str, LoadedDrafter | None]


class Methods(NamedTuple):
    """Drafts to measure, and the rule that accepts them."""

    chains: list[int]  #: Lengths ``K`` for every head.
    trees: list[DynamicTree | StaticTree]  #: Trees for every head.
    ngrams: list[int]  #: Lengths ``K`` of prompt lookup.
    simulation: str | None  #: The simulated acceptance; ``None`` for a rule that uses the target.
    #: Returns the acceptance rule for drafts of a depth, ``None`` for the exact one. It raises
    #: ``ValueError`` if drafts of this depth cannot have the simulated acceptance.
    rule: Callable[[int], Verifier | None]

    @property
    def mark(self) -> str:
        """The acceptance rule in the name of a row; empty for the exact one.

        Raises:
            ValueError: It is not an acceptance rule.
        """
        from eagle3_jax.checks import check_part

        if self.simulation is not None:
            return " (simulated, not lossless)"
        rule = self.rule(1)
        if rule is None:
            return ""
        check_part(rule, "verifier")
        return f" ({type(rule).__name__}{'' if rule.lossless else ', not lossless'})"


class _Draft(NamedTuple):
    """A draft to measure, and the options of a decoder that give it."""

    name: str
    depth: int
    options: dict[str, Any]


@dataclasses.dataclass
class Field:
    """All contenders, and those that cannot take part."""

    #: In the order of the report.
    contenders: list[Contender] = dataclasses.field(default_factory=list)
    #: Contenders that are not measured, with the reason.
    missing: list[NotMeasured] = dataclasses.field(default_factory=list)

    @property
    def of_library(self) -> list[DecoderContender]:
        """Contenders of this library."""
        from eagle3_jax.bench.contenders import DecoderContender

        return [
            contender for contender in self.contenders if isinstance(contender, DecoderContender)
        ]

    def add_missing(self, name: str, reason: str) -> None:
        """Records a contender that cannot take part."""
        from eagle3_jax.bench.results import NotMeasured

        self.missing.append(NotMeasured(name, one_line(reason)))

    def add_library(self, models: Models, methods: Methods) -> None:
        """Adds plain decoding, also in float32, and every draft of every head."""
        from eagle3_jax.drafters import NGram

        self._add(f"plain {models.dtype}", models.dtype, models.target)
        if models.float32 is not None:
            self._add("plain float32", "float32", models.float32)
        for head, drafter in models.drafters.items():
            if drafter is not None:
                prefix = f"{head} " if len(models.drafters) > 1 else ""
                self._add_drafts(prefix, drafter, models, methods)
        for length in methods.ngrams if models.drafters else ():
            self._add(f"n-gram K={length}", models.dtype, models.target, NGram(length))

    def _add(
        self, name: str, dtype: str, target: LoadedTarget, *drafter: Any, **draft: Any
    ) -> None:
        from eagle3_jax import SpeculativeDecoder
        from eagle3_jax.bench.contenders import DecoderContender

        decoder = SpeculativeDecoder(target, *drafter, **draft, stop_tokens=())
        self.contenders.append(DecoderContender(name, dtype, decoder))

    def _add_drafts(
        self, prefix: str, drafter: LoadedDrafter, models: Models, methods: Methods
    ) -> None:
        """Adds the chains and trees of a head.

        A tree that the head cannot draft is recorded as missing.
        """
        from eagle3_jax.checks import Drafting
        from eagle3_jax.topology import tree_name

        drafts = [
            _Draft(f"chain K={length}", length, {"num_speculative_tokens": length})
            for length in methods.chains
        ]
        drafts += [
            _Draft(tree_name(tree), tree.max_depth, {"tree": tree}) for tree in methods.trees
        ]
        # Other drafters have the one shape that they were built with.
        if not isinstance(drafter.drafter, Drafting):
            drafts = [_Draft(drafter.name, drafter.drafter.max_depth, {})]

        for draft in drafts:
            name = f"{prefix}{draft.name}{methods.mark}"
            try:
                rule = methods.rule(draft.depth)
                self._add(
                    name, models.dtype, models.target, drafter, **draft.options, verifier=rule
                )
            except ValueError as error:
                # A tree is among the defaults, and not every drafter has one.
                is_chain = "num_speculative_tokens" in draft.options
                if is_chain and methods.simulation is None:
                    raise Misuse(f"{name}: {error}") from None
                self.add_missing(name, str(error))

    def add_transformers(self, target: str | None, *, dtype: str) -> None:
        """Adds transformers, or the reason why it cannot take part.

        Args:
            target: Source of the target.
            dtype: Precision of transformers.
        """
        import jax

        from eagle3_jax.files.sources import locate
        from eagle3_jax.measure.memory import is_out_of_memory

        try:
            from eagle3_jax.bench.transformers import TransformersContender

            on_gpu = jax.default_backend() != "cpu"
            self.contenders += TransformersContender.load(
                locate(target, "target"), dtype=dtype, on_gpu=on_gpu
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.add_missing("transformers", str(error))
        except ModuleNotFoundError as error:
            reason = f"{error.name} is not installed: pip install 'eagle3-jax[bench]'"
            self.add_missing("transformers", reason)
        except (ImportError, OSError, ValueError) as error:
            reason = f"it cannot load the target ({str(error).splitlines()[0]})"
            self.add_missing("transformers", reason)

    def drop_broken(self, prompt: list[int]) -> None:
        """Lets transformers write two tokens; removes it if it cannot, and records the reason."""
        from eagle3_jax.bench.contenders import DecoderContender

        for contender in list(self.contenders):
            if isinstance(contender, DecoderContender):
                continue
            try:
                contender.run([prompt], 2)
            except (RuntimeError, ValueError, OSError) as error:
                self.contenders.remove(contender)
                self.add_missing(contender.name, str(error))
