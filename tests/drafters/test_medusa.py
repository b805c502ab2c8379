"""Medusa heads against PyTorch and numpy: the network, its inputs and its drafts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import expit

from eagle3_jax import loop as loops
from eagle3_jax.drafters import MedusaConfig, MedusaDrafter
from eagle3_jax.topology import PUBLISHED_TREES, Chain, StaticTree, tree_name

pytestmark = pytest.mark.core

TARGET = tiny.target(13)
PROMPTS = tiny.random_prompts(3, 13, seed=5)


@pytest.mark.torch
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (2, False)])
def test_the_network_is_that_of_its_independent_torch_twin(layers: int, bias: bool) -> None:
    import medusa_torch

    heads = medusa_torch.random_heads(16, 13, heads=3, layers=layers, bias=bias)
    tensors = medusa_torch.tensors_of(heads)
    shape = {"vocab_size": 13, "draft_vocab_size": 13, "target_width": 16, "num_target_layers": 2}
    config = MedusaConfig(**shape, num_heads=3, num_layers=layers, bias=bias)

    def linear(name: str) -> dict[str, np.ndarray]:
        kernel = {"kernel": tensors[f"{name}.weight"].T}
        return kernel | ({"bias": tensors[f"{name}.bias"]} if f"{name}.bias" in tensors else {})

    blocks = {
        k: {"layers": {n: linear(f"{k}.{n}.linear") for n in range(layers)}} for k in range(3)
    }
    outputs = {k: linear(f"{k}.{layers}") for k in range(3)}
    head = {"blocks": blocks, "outputs": outputs}
    drafter = MedusaDrafter(config)
    state = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    truth = medusa_torch.logits_of(heads, state)
    for count in (1, 3):
        ours = drafter.bind({"head": jax.tree.map(jnp.asarray, head)})(jnp.array(state), count)
        difference = np.asarray(ours) - truth[:, :count]
        assert np.abs(difference).max() < 1e-5 * np.abs(truth).max()


def read_off(
    head: dict, shared: bool, ids: np.ndarray, text: list[int], paths: list[tuple[int, ...]]
) -> list[int]:
    """Returns the tokens of a tree after a text that ends with the root.

    One forward pass of the target, then numpy.
    """
    known = jnp.zeros((1, 48), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    hidden = np.asarray(tiny.forward(TARGET.model, TARGET.params, known)[1][0, len(text) - 2])

    ranked = []
    for k in range(max(map(len, paths))):
        z = hidden.astype(np.float64)
        for layer in head["blocks"][k]["layers"].values():
            y = z @ np.asarray(layer["kernel"]) + np.asarray(layer.get("bias", 0.0))
            z = z + y * expit(y)

        output = head["outputs"][0 if shared else k]
        logits = z @ np.asarray(output["kernel"])
        ranked.append(ids[np.argsort(-logits)])

    return [int(ranked[len(path) - 1][path[-1]]) for path in paths]


@pytest.mark.parametrize(
    ("topology", "variant"),
    [
        (Chain(2), {"bias": True, "num_layers": 2}),
        (tiny.STATIC_TREE, {"shared_output": True, "draft_vocab_size": 7}),
    ],
    ids=["a chain shorter than the heads", "a tree of a part of the vocabulary"],
)
def test_every_round_drafts_from_the_state_behind_the_last_committed_token(
    topology, variant
) -> None:
    heads = tiny.medusa(TARGET, topology, seed=3, **variant)
    table = np.asarray(heads.params.get("draft_to_target", np.arange(13)))
    paths = (
        [(0,) * depth for depth in (1, 2)] if isinstance(topology, Chain) else list(topology.paths)
    )

    loop, params = tiny.bind(TARGET, heads)
    state = loops.prefill(loop, params, tiny.prompts(PROMPTS, limit=20), capacity=48)

    lengths = []
    for _ in range(6):
        known = np.asarray(state.tokens)
        length = np.asarray(state.length)
        texts = [known[row, : length[row]].tolist() for row in range(3)]
        lengths.append(length)

        after = loops.step(loop, params, state)
        state = after.state

        for row, text in enumerate(texts):
            expected = read_off(
                heads.params["head"], variant.get("shared_output", False), table, text, paths
            )
            assert after.draft.tokens[row].tolist() == [text[-1], *expected]

    steps = np.diff(np.array(lengths), axis=0)
    assert steps.max() > 1 or not isinstance(topology, StaticTree), (
        "nothing was accepted, so nothing was rolled back"
    )


# The authors' own order, which is that in which they added nodes.
MC_SIM_7B_63 = [
    [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0], [0, 5], [0, 0, 1], [5],
    [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], [9], [1, 0, 0], [0, 2, 0],
    [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5],
]  # fmt: skip


def test_the_published_trees_have_63_nodes_and_names() -> None:
    assert set(map(tuple, MC_SIM_7B_63)) < set(PUBLISHED_TREES["medusa-63"].paths)
    of_medusa = {name: tree for name, tree in PUBLISHED_TREES.items() if name.startswith("medusa-")}
    assert len(of_medusa) == 8
    for name, tree in of_medusa.items():
        assert tree.num_nodes == 64
        assert max(max(path) for path in tree.paths) == 9
        assert tree.max_depth == (3 if name == "medusa-vicuna-33b-stage1" else 4)
        assert tree_name(tree) == f"tree {name}"
    assert tree_name(tiny.STATIC_TREE) == "tree N=7 G=3"
