"""How weights lie: kernels divided over devices on their last axis, and tensors that fill one array in turns."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_jax.conversion.rules import CheckpointError, Part, Rule, read_params, write_params


def experts(count: int, width: int, inner: int) -> list[Rule]:
    """Gate and up of every expert in one array ``[E, D, 2I]``."""
    return [
        Rule(f"{expert}.{name}", "gate_up", transpose=True, part=Part(inner, 2, 1, place, place + 1, (expert,)))
        for expert in range(count)
        for place, name in enumerate(("gate", "up"))
    ]


def test_an_array_that_many_tensors_fill_is_filled_and_taken_apart_exactly() -> None:
    rng, table = np.random.default_rng(0), experts(3, 4, 5)
    tensors = {rule.source: rng.normal(size=(5, 4)).astype(np.float32) for rule in table}
    shapes = {"gate_up": np.empty((3, 4, 10), np.float32)}
    params = read_params(table, tensors, shapes, where="here")
    for expert in range(3):
        np.testing.assert_array_equal(np.asarray(params["gate_up"])[expert, :, 0::2], tensors[f"{expert}.gate"].T)
        np.testing.assert_array_equal(np.asarray(params["gate_up"])[expert, :, 1::2], tensors[f"{expert}.up"].T)
    again = write_params(table, params, shapes, where="here")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], value) for name, value in tensors.items())


def test_an_array_that_is_not_filled_or_filled_twice_is_no_table() -> None:
    table = experts(3, 4, 5)
    tensors = {rule.source: np.ones((5, 4), np.float32) for rule in table}
    shapes = {"gate_up": np.empty((3, 4, 10), np.float32)}
    with pytest.raises(AssertionError, match="differ"):
        read_params(table[:-1], dict(list(tensors.items())[:-1]), shapes, where="here")
    twice = [*table[:-1], table[-1]._replace(part=table[0].part)]
    with pytest.raises(CheckpointError, match=r"gives gate_up twice, the second time as 2\.up"):
        read_params(twice, tensors, shapes, where="here")
