"""A draft tree of a head with a sliding window: every node sees the last positions of its own path."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
import torch
from checkpoints import TARGET, Head, TorchHead

from eagle3_jax import conversion
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.types import Observation, SamplingParams


def test_a_tree_under_a_window_is_that_of_the_torch_twin(tmp_path: Path) -> None:
    """Over two rounds, the second behind what the first one drafted."""
    head = Head(windows=(2,), draft_vocab=61)
    checkpoint = conversion.read_head(head.write(tmp_path / "head"), TARGET)
    random, fed, more = np.random.default_rng(5), 7, 3
    features = random.normal(size=(fed + more, 3, head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, fed + more + 1)
    embedding = random.normal(size=(61, head.width)).astype(np.float32)
    network = TorchHead(head, embedding)

    def after(path: tuple[int, ...], length: int) -> list[int]:
        """The drafted tokens by rank below a path of ranks."""
        ids, stream = torch.from_numpy(tokens[1 : length + 1]).long(), network.fuse(features[:length])
        for rank in path:
            out = network.run(ids, stream)
            best = network.logits(out)[-1].argsort(descending=True)
            ids, stream = torch.cat([ids, best[rank : rank + 1]]), torch.cat([stream, out[-1:]])
        return network.logits(network.run(ids, stream))[-1].argsort(descending=True).tolist()

    drafter = Eagle3Drafter(checkpoint.config, tiny.STATIC_TREE)
    params = jax.tree.map(
        jnp.asarray, {"head": checkpoint.head, "embedding": embedding, "draft_to_target": np.arange(61)}
    )

    @jax.jit
    def two_rounds(params: dict) -> tuple:
        state, drafted = drafter.init(params, 1, 24), []
        for start, stop in ((0, fed), (fed, fed + more)):
            seen = Observation(
                tokens=jnp.asarray(tokens[start:stop], jnp.int32)[None],
                features=jnp.asarray(features[start:stop])[None],
                length=jnp.full((1,), stop - start),
                next_token=jnp.asarray(tokens[stop : stop + 1], jnp.int32),
            )
            state = drafter.observe(params, state, seen)
            draft = drafter.propose(params, state, jax.random.split(jax.random.key(0), 1), SamplingParams())
            drafted.append(draft.tokens[0])
            state = draft.state
        return tuple(drafted)

    for length, drafted in zip((fed, fed + more), two_rounds(params), strict=True):
        assert drafted[1:].tolist() == [after(path[:-1], length)[path[-1]] for path in tiny.STATIC_TREE.paths]
