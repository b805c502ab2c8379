"""Steps of a draft head's objective on the answers of a target that changes.

In reinforcement learning every step of the policy moves the distribution that a head has learnt.
The answers of the latest step are texts of almost the same policy, and they are there anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.fallback import Fallback
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.results import Generation
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, batch_of
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import RECIPES, HeadOptions
from eagle3_jax.training.texts import Text, Texts

# A schedule without an end: the rate stays at its peak.
_ENDLESS = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshConfig:
    """What a step of the head's objective runs on.

    Raises:
        ValueError: A value is out of range.
    """

    every: int = 1  #: Policy steps between two steps of the head.
    rows: int = 8  #: Answers of a step, chosen at random.
    length: int = 256  #: Tokens of an answer with its prompt; what is beyond is not learnt.
    depth: int = 3  #: Draft positions that the head learns, one after the other.
    learning_rate: float = 1e-4  #: Of AdamW, after 20 steps of warm-up.
    seed: int = 0  #: Random seed of the choice of answers.

    def __post_init__(self) -> None:
        for name in ("every", "rows", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.length < 3:
            raise ValueError(f"length is {self.length}; expected at least 3 tokens")


class HeadRefresh:
    """A draft head that is trained while its target is.

    Example::

        refresh = HeadRefresh(decoder, RefreshConfig())
        decoder = decoder.with_params(new_policy)
        decoder = refresh.step(decoder, answers)

    Attributes:
        state: The head's parameters in float32, and the optimiser's state.
        metrics: The loss and the metrics of the latest step.
    """

    def __init__(self, decoder: SpeculativeDecoder, config: RefreshConfig = RefreshConfig()):
        """Prepares the optimiser; nothing is compiled yet.

        Raises:
            ValueError: The decoder's drafter is not a head with a recipe, or its kernels are stored
                in eight bits.
        """
        drafter = decoder.loop.drafter
        head = drafter.second if isinstance(drafter, Fallback) else drafter
        methods = {recipe.drafter: recipe for recipe in RECIPES.values()}
        recipe = methods.get(type(head))
        if recipe is None or not isinstance(decoder.params.drafter, dict):
            raise ValueError(
                f"the drafter is {type(head).__name__}, which has no parameters to refresh;"
                " expected a draft head, such as EAGLE-3"
            )
        params = decoder.params.drafter["head"]
        if not all(isinstance(leaf, jax.Array) for leaf in _nodes(params)):
            raise ValueError("the head has kernels in eight bits; expected one of floats")

        self.config = config
        self.metrics: dict[str, float] = {}
        self._random = np.random.default_rng(config.seed)
        model = decoder.target.model
        assert isinstance(model, DecoderTarget)
        options = HeadOptions(depth=config.depth)

        def loss(params: Params, inputs: tuple[TTTBatch, Frozen]) -> Loss:
            batch, frozen = inputs
            return recipe.loss(head, model, params, frozen, batch, options)

        optimizer = OptimizerConfig(
            learning_rate=config.learning_rate,
            num_steps=_ENDLESS,
            warmup_steps=20,
            weight_decay=0.0,
        )
        self._trainer = Trainer(loss, optimizer)
        # The optimiser's sums need more bits than a head in bfloat16 has.
        self.state = self._trainer.start(
            jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        )

    def step(
        self, decoder: SpeculativeDecoder, answers: Sequence[Generation]
    ) -> SpeculativeDecoder:
        """Takes a step of the head's objective against the decoder's target.

        Args:
            decoder: The decoder, with the new parameters of its target.
            answers: Answers to learn from, such as those of the latest step of the policy.

        Returns:
            The decoder with the head after the step.

        Raises:
            NotFinite: The loss or its gradient is not finite. The head stays as it was.
        """
        before = decoder.params
        frozen = Frozen(
            target_params=before.target,
            embedding=before.drafter["embedding"],
            draft_to_target=before.drafter.get("draft_to_target"),
        )
        batch = self._batch(answers)
        number = int(self.state.step)
        steps = self._trainer.run(self.state, lambda step: (batch, frozen), number + 1)
        self.state, self.metrics = next(steps)

        head = jax.tree.map(
            lambda new, old: new.astype(old.dtype), self.state.params, before.drafter["head"]
        )
        return decoder.with_params(before.target, {**before.drafter, "head": head})

    def _batch(self, answers: Sequence[Generation]) -> TTTBatch:
        """Returns some of the answers, chosen at random."""
        config = self.config
        count = min(config.rows, len(answers))
        chosen = self._random.choice(len(answers), count, replace=False)
        texts = []
        for index in chosen:
            answer = answers[index]
            learn = [False] * len(answer.prompt_tokens) + [True] * len(answer.tokens)
            tokens = answer.prompt_tokens + answer.tokens
            texts.append(Text(tokens[: config.length], learn[: config.length], 0))

        return batch_of(
            Texts.of(texts),
            np.arange(count),
            length=config.length,
            count=config.rows,
            key=jax.random.key(self._random.integers(2**31)),
        )


def _nodes(params: Any) -> list[Any]:
    """Returns the parameters, a kernel in eight bits as one."""
    return jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "divided"))
