"""Runs inside the environment of vLLM: acceptance by dice for its CPU build."""

# Its imports are those of the other environment.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any


class GreedyByDice:
    """vLLM's Triton kernel of synthetic acceptance at temperature 0, in torch.

    A draft token is accepted where its uniform is below the conditional rate of its position.
    Without rates the shipped kernel runs.
    """

    def __init__(self, shipped: Any):
        self.shipped = shipped

    def register_warmup(self, **modes: Any) -> None:
        """As the shipped kernel's."""
        self.shipped.register_warmup(**modes)

    def __call__(
        self, output: Any, row_ends: Any, drafts: Any, choices: Any, bonus: Any, is_greedy: Any,
        longest: int, uniforms: Any, rates: Any,
    ) -> None:  # fmt: skip
        """Write accepted drafts, and the token after them, into ``output``, ``[B, longest + 1]``.

        Args:
            output: Filled in place.
            row_ends: ``[B]``, end of each request's drafts.
            drafts: ``[N]``, draft tokens of all requests; -1 is padding, and rejected.
            choices: The target's choices at the same places, ``[N]``.
            bonus: The target's choice after the last draft, ``[B]``.
            is_greedy: ``None`` where all requests are.
            longest: Draft.
            uniforms: ``[N]``; ``None`` without rates.
            rates: Conditional acceptance rate of each position, ``[longest]``.

        Raises:
            ValueError: A request has a temperature.
        """
        if rates is None:
            self.shipped(
                output, row_ends, drafts, choices, bonus, is_greedy, longest, uniforms, rates
            )
            return

        if is_greedy is not None:
            raise ValueError("acceptance by dice on a CPU is for temperature 0")

        start = 0
        bonus = bonus.flatten()
        for row, end in enumerate(row_ends.tolist()):
            count = end - start
            accepted = 0
            wins = (uniforms[start:end] < rates[:count]) & (drafts[start:end] >= 0)
            while accepted < count and wins[accepted]:
                accepted += 1

            output[row, :accepted] = drafts[start : start + accepted]
            output[row, accepted] = bonus[row] if accepted == count else choices[start + accepted]
            start = end


def install() -> None:
    """Put it into vLLM, once."""
    from vllm.v1.sample import rejection_sampler

    if not isinstance(rejection_sampler._rejection_greedy_sample, GreedyByDice):
        rejection_sampler._rejection_greedy_sample = GreedyByDice(
            rejection_sampler._rejection_greedy_sample
        )
