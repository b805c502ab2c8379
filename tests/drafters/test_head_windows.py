"""A tree of a head with a sliding window: a node sees the last positions of its own path."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
import torch
from checkpoints import Head, TorchHead, loaded_head, target_tables

pytestmark = pytest.mark.torch


def test_a_tree_under_a_window_is_that_of_the_torch_twin() -> None:
    """Two rounds; the second follows the draft of the first."""
    head = Head(windows=(2,), draft_vocab=61)
    random = np.random.default_rng(5)
    features = random.normal(size=(11, 3, head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, 11)
    network = TorchHead(head, target_tables()[0])

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

    drafter, params = loaded_head(head.write, tiny.STATIC_TREE)
    state = drafter.init(params, 1, 24)
    for (length,), seen in tiny.ragged_rounds(tokens[None], features[None], [[7], [3]]):
        draft = tiny.next_draft(drafter, params, state, seen)
        state = draft.state
        expected = [after(path[:-1], length)[path[-1]] for path in tiny.STATIC_TREE.paths]
        assert draft.tokens[0, 1:].tolist() == expected
