"""L5: texts of two engines, each scored token by token by the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import NGram
from validation.engines.vllm.bridge import VLLM, EngineOptions, Scored, Tokens
from validation.forcing import reference
from validation.margin import (
    Agreement,
    Control,
    bfloat16_ulp,
    classify,
    tie_tolerance,
    wrong_tolerance,
)

BATCH = 8
MOST_POSITIONS = 4096  # that vLLM reserves; the texts here are shorter
ENGINES = 2  # whose rounding errors add up where one judges the other
TREE = DynamicTree(num_nodes=16, max_depth=5, top_k=4)


class Agreed(NamedTuple):
    """How the texts of one engine look to another."""

    tokens: int
    ties: int
    disagreements: int
    largest_gap: float


@dataclasses.dataclass(frozen=True)
class Judged:
    """What one way of decoding wrote, as another sees it."""

    by: str  #: Name of the engine that wrote the tokens.
    scored_by: str  #: Name of the engine that scored them.
    dtype: str  #: Type whose rounding makes a tie.
    outputs: list[Tokens]  #: New tokens of every prompt.
    scored: list[Scored]  #: The judge's opinion of each of them.

    @property
    def gaps(self) -> np.ndarray:
        """The judge's highest logit minus that of the token, ``[n]``, prompt after prompt."""
        return np.concatenate([scores.gap for scores in self.scored])

    @property
    def values(self) -> np.ndarray:
        """The judge's highest logits, ``[n]``."""
        return np.concatenate([scores.best_value for scores in self.scored])

    @property
    def units(self) -> np.ndarray:
        """Gaps in bfloat16 units in the last place of the highest logit, ``[n]``."""
        return self.gaps / bfloat16_ulp(self.values)

    @property
    def verdicts(self) -> np.ndarray:
        """:class:`Agreement` of each token, ``[n]``."""
        rank = np.concatenate([scores.rank for scores in self.scored])
        return classify(self.gaps, rank, tie_tolerance(self.values, self.dtype))

    @property
    def agreed(self) -> Agreed:
        """All positions counted."""
        ties, disagreements = (
            int(np.sum(self.verdicts == verdict)) for verdict in (Agreement.TIE, Agreement.DISAGREE)
        )
        return Agreed(len(self.gaps), ties, disagreements, float(self.gaps.max()))

    def control(self, verdict: Agreement) -> Control:
        """How many verdicts are this one or a worse one."""
        return Control(int(np.sum(self.verdicts >= verdict)), len(self.gaps))

    @property
    def wrong(self) -> int:
        """Positions that are too far below the judge's choice for any rounding."""
        return int(np.sum(self.gaps > wrong_tolerance(self.values, self.dtype)))

    def texts_shared(self, others: Sequence[Tokens]) -> int:
        """How many texts are those, token for token."""
        return sum(output == text for output, text in zip(self.outputs, others, strict=False))


def ours(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    singly: int,
) -> dict[str, list[Tokens]]:
    """Texts of all decoders, in batches.

    The first ``singly`` prompts of the last decoder are also decoded one by one.
    """

    def written(decoder: SpeculativeDecoder, prompts: Sequence[Tokens], size: int) -> list[Tokens]:
        starts = range(0, len(prompts), size)
        batches = [
            decoder.generate(prompts[i : i + size], max_new_tokens=max_new_tokens).tokens
            for i in starts
        ]
        return [tokens for batch in batches for tokens in batch]

    texts = {
        f"ours, {name}": written(decoder, prompts, BATCH) for name, decoder in decoders.items()
    }
    name, decoder = list(decoders.items())[-1]
    if singly:
        texts[f"ours, {name}, batch 1"] = written(decoder, prompts[:singly], 1)
    return texts


@dataclasses.dataclass(frozen=True)
class BothDirections:
    """Two engines on the same prompts."""

    ours: list[Judged]  #: Our ways of decoding, plain first, scored by vLLM.
    theirs: list[Judged]  #: vLLM's, plain first, scored by us.
    #: Texts scored by the engine that wrote them (A/A), under the names of their writers: vLLM's
    #: texts, and our plain one against our target with sums in float32.
    controls: dict[str, Judged]

    @property
    def all(self) -> list[Judged]:
        """Ours, then theirs."""
        return [*self.ours, *self.theirs]

    @property
    def plain(self) -> list[Tokens]:
        """vLLM's own plain text."""
        return self.theirs[0].outputs

    @property
    def unexplained(self) -> list[str]:
        """Differences that rounding does not explain, in words; empty where both agree."""
        return list(self._exactly() if self.ours[0].dtype == "float32" else self._within_noise())

    def _exactly(self) -> Iterator[str]:
        for judged in self.all:
            agreed = judged.agreed
            num_different = len(judged.outputs) - judged.texts_shared(self.plain)

            if agreed.disagreements:
                yield (
                    f"{judged.by}: {agreed.disagreements} tokens are neither {judged.scored_by}'s"
                    " choice nor a tie"
                )
            # In float32 a text parts from another where two logits tie, and nowhere else.
            if num_different > agreed.ties:
                yield f"{judged.by}: texts differ that no tie explains"

    def _within_noise(self) -> Iterator[str]:
        for judged in [*self.all, *self.controls.values()]:
            if judged.wrong:
                judge = f"{judged.scored_by}'s choice"
                yield (
                    f"{judged.by}: {judged.wrong} tokens are too far below {judge} for any rounding"
                )

        for verdict in (Agreement.TIE, Agreement.DISAGREE):
            noise = self.noise(verdict)
            for judged in self.all:
                yield from too_many(judged, verdict, noise)
            # Noise of our decoding raises the bound above, so it is itself bounded by vLLM's,
            # before the same judge.
            yield from too_many(
                self.controls[self.ours[0].by], verdict, self.theirs[0].control(verdict)
            )

    def noise(self, verdict: Agreement) -> Control:
        """The A/A control of the engine that departs more often from itself, from a verdict on.

        Two engines may differ :data:`ENGINES` times as often, since their errors add up at most.
        vLLM's own count is 0 where the same kernels decode and score, although its errors are as
        large as ours.
        """
        controls = [
            self.controls[texts[0].by].control(verdict) for texts in (self.ours, self.theirs)
        ]
        return max(controls, key=lambda control: control.bound)


def too_many(judged: Judged, verdict: Agreement, noise: Control) -> Iterator[str]:
    """Says in words that tokens have a verdict, or a worse one, more often than noise allows."""
    control = judged.control(verdict)
    allowed = noise.allowed(judged.agreed.tokens, times=ENGINES)
    if control.flips > allowed:
        kind = "not its choice" if verdict is Agreement.TIE else "neither its choice nor a tie"
        yield (
            f"{judged.by}, scored by {judged.scored_by}: {control.flips} of {control.tokens} tokens"
            f" are {kind}; {noise.flips} of {noise.tokens} in plain decoding allow {allowed}"
        )


def both_directions(
    vllm: VLLM,
    directory: Path,
    target: LoadedTarget,
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Tokens],
    *,
    speculative: Sequence[dict],
    dtype: str,
    max_new_tokens: int,
    singly: int = 8,
) -> BothDirections:
    """Generate on both sides, score each on the other, and each against itself as the control."""
    our_texts = ours(decoders, prompts, max_new_tokens=max_new_tokens, singly=singly)
    options = EngineOptions(
        model=str(directory),
        dtype=dtype,
        max_model_len=min(target.max_positions, MOST_POSITIONS),
        max_num_seqs=BATCH,
    )

    speculating = {}
    for config in speculative:
        engine = vllm.engine(dataclasses.replace(options, speculative=config))
        generated = engine.generate(prompts, max_new_tokens=max_new_tokens)
        speculating[f"vLLM, {config['method']}"] = generated.outputs

    engine = vllm.engine(options)
    theirs = {
        "vLLM, plain": engine.generate(prompts, max_new_tokens=max_new_tokens).outputs
    } | speculating

    def judged(by: str, outputs: list[Tokens], judge: str) -> Judged:
        fed = prompts[: len(outputs)]
        scored = engine.score(fed, outputs) if judge == "vLLM" else reference(target, fed, outputs)
        return Judged(by, judge, dtype, outputs, scored)

    plain = next(iter(our_texts))
    controls = {name: judged(name, outputs, "vLLM") for name, outputs in theirs.items()}
    return BothDirections(
        ours=[judged(name, outputs, "vLLM") for name, outputs in our_texts.items()],
        theirs=[judged(name, outputs, "us") for name, outputs in theirs.items()],
        controls=controls | {plain: judged(plain, our_texts[plain], "us")},
    )


def decoders_of(target: LoadedTarget, drafter: LoadedDrafter) -> dict[str, SpeculativeDecoder]:
    """Plain decoding and every kind of draft."""
    return {
        "plain": SpeculativeDecoder(target, stop_tokens=()),
        "n-gram": SpeculativeDecoder(target, NGram(), num_speculative_tokens=4, stop_tokens=()),
        "EAGLE-3 tree": SpeculativeDecoder(target, drafter, tree=TREE, stop_tokens=()),
        "EAGLE-3 chain": SpeculativeDecoder(
            target, drafter, num_speculative_tokens=5, stop_tokens=()
        ),
    }
