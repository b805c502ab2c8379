"""A draft tree of a head with a sliding window: every node sees the last positions of its own path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from eagle3_jax.types import Draft, Observation, SamplingParams

pytestmark = pytest.mark.torch


def test_a_tree_under_a_window_is_that_of_the_torch_twin(tmp_path: Path) -> None:
    """Two rounds; the second follows the draft of the first."""
    head = Head(windows=(2,), draft_vocab=61)
    checkpoint = conversion.read_head(head.write(tmp_path / "head"), TARGET)
    random = np.random.default_rng(5)
    features = random.normal(size=(11, 3, head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, 11)
    embedding = random.normal(size=(61, head.width)).astype(np.float32)
    network = TorchHead(head, embedding)

    def after(path: tuple[int, ...], length: int) -> list[int]:
        """Returns the drafted tokens by rank below a path of ranks."""
        ids = torch.from_numpy(tokens[1 : length + 1]).long()
        stream = network.fuse(features[:length])
        for rank in path:
            out = network.run(ids, stream)
            best = network.logits(out)[-1].argsort(descending=True)
            ids = torch.cat([ids, best[rank : rank + 1]])
            stream = torch.cat([stream, out[-1:]])
        return network.logits(network.run(ids, stream))[-1].argsort(descending=True).tolist()

    drafter = Eagle3Drafter(checkpoint.config, tiny.STATIC_TREE)
    params = jax.tree.map(
        jnp.asarray, {"head": checkpoint.head, "embedding": embedding, "draft_to_target": np.arange(61)}
    )

    @jax.jit
    def drafted(state: Any, seen: Observation) -> Draft:
        state = drafter.observe(params, state, seen)
        return drafter.propose(params, state, jax.random.split(jax.random.key(0), 1), SamplingParams())

    state = drafter.init(params, 1, 24)
    for (length,), seen in tiny.ragged_rounds(tokens[None], features[None], [[7], [3]]):
        draft = drafted(state, seen)
        state = draft.state
        expected = [after(path[:-1], length)[path[-1]] for path in tiny.STATIC_TREE.paths]
        assert draft.tokens[0, 1:].tolist() == expected
