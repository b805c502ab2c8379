"""Draft models and layer skip against whole-sequence forwards: no cache, no block, no rollback."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import softmax
from tokenizers import Tokenizer, models

from eagle3_jax import conversion
from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import DraftModel, DraftModelState, draft_model, layer_skip
from eagle3_jax.files.sources import is_named
from eagle3_jax.load import load_drafter, load_target
from eagle3_jax.topology import Chain, StaticTree, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import DraftSampling

pytestmark = pytest.mark.core

TARGET = tiny.target(13, num_layers=3)
PROMPTS = tiny.random_prompts(4, 13, seed=3)
TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)))


def logits_after(model: LoadedTarget, texts: list[list[int]]) -> np.ndarray:
    """Returns ``[texts V]``: the logits after each text, without a cache."""
    # One program for any number of texts.
    padded = tiny.padded([*texts, *[[]] * (32 - len(texts))], 48)
    last = [len(text) - 1 for text in texts]
    logits, _ = tiny.forward(model.model, model.params, jnp.array(padded))
    return np.asarray(logits)[range(len(texts)), last]


def rounds_of(
    target: LoadedTarget, drafter: LoadedDrafter
) -> list[tuple[list[list[int]], np.ndarray, np.ndarray]]:
    """Returns the texts of the rows, their drafts and accepted counts for each round.

    The text of a row that has ended is empty.
    """
    loop, params = tiny.bind(target, drafter)
    state = loops.prefill(loop, params, tiny.prompts(PROMPTS, limit=20), capacity=64)
    seen = []

    while bool(state.running.any()):
        texts = [
            row[:length].tolist()
            for row, length in zip(np.asarray(state.tokens), state.length, strict=True)
        ]
        texts = [text if runs else [] for text, runs in zip(texts, state.running, strict=True)]

        latest = loops.step(loop, params, state)
        state = latest.state
        seen.append(
            (texts, np.asarray(latest.draft.tokens), np.asarray(latest.verdict.num_accepted))
        )

    return seen


@pytest.mark.parametrize("topology", [Chain(3), TREE], ids=["chain", "tree"])
def test_each_node_is_the_token_of_its_rank_after_its_path(topology: Topology) -> None:
    """Rounds accept everything and nothing, under a window shorter than the texts."""
    options = {"layers": tiny.layers(2, window=4)}
    target = tiny.target(13, **options)
    small = tiny.target(13, **options)
    noise = 0.3 * jax.random.normal(jax.random.key(5), (16, 13))
    small.params["head"] = {"kernel": small.params["head"]["kernel"] + noise}
    loaded = draft_model(small, target)
    drafter = LoadedDrafter(loaded.drafter.with_topology(topology, None), loaded.params)

    ranks = [0] * topology.num_nodes
    parents = list(range(-1, topology.num_nodes - 1))
    if isinstance(topology, StaticTree):
        ranks = [0, *(path[-1] for path in topology.paths)]
        parents = list(topology.parents)

    accepted = set()

    for texts, drafts, counts in rounds_of(target, drafter):
        paths = []
        ranked_tokens = []
        for row, text in enumerate(texts):
            path = {0: text}
            for node in range(1, topology.num_nodes if text else 0):
                path[node] = [*path[parents[node]], int(drafts[row, node])]
                paths.append(path[parents[node]])
                ranked_tokens.append((ranks[node], drafts[row, node]))

        order = np.argsort(-logits_after(small, paths), axis=-1, kind="stable")
        assert all(order[index, rank] == token for index, (rank, token) in enumerate(ranked_tokens))
        accepted |= {int(count) for text, count in zip(texts, counts, strict=True) if text}

    assert {0, topology.max_depth} <= accepted, (
        "no round followed a full acceptance and one without any"
    )


def after(loaded: LoadedDrafter, text: list[int]) -> DraftModelState:
    """Returns the drafter's state after a text, whose last token is the root."""
    known = jnp.array([text[:-1]])
    features = jnp.zeros((*known.shape, 0, 16))
    seen = tiny.seen_of(known, features, [len(text) - 1], [text[-1]])
    return jax.jit(loaded.drafter.observe)(
        loaded.params, loaded.drafter.init(loaded.params, 1, 32), seen
    )


def test_layer_skip_drafts_from_the_stream_that_leaves_a_layer_and_copies_nothing() -> None:
    loaded = layer_skip(TARGET, 2)
    shared = {id(leaf) for leaf in jax.tree.leaves(TARGET.params)}
    assert {id(leaf) for leaf in jax.tree.leaves(loaded.params)} <= shared

    text = PROMPTS[0]
    tokens = jnp.array([text])
    positions = jnp.arange(len(text))[None]
    mask = causal_mask(len(text))
    stream = np.asarray(
        TARGET.model(TARGET.params, tokens, positions, mask, aux_layers=(2,)).features[0, -1, 0]
    )

    root_mean_square = np.sqrt(np.mean(np.square(stream)) + 1e-6)
    scale = np.asarray(TARGET.params["norm"]["scale"])
    normed = stream / root_mean_square * scale

    state = after(loaded, text)
    assert np.allclose(state.final[0], normed, atol=1e-5)


def test_a_sampled_chain_declares_the_softmax_of_the_draft_model() -> None:
    drafter = tiny.draft_model(TARGET, Chain(2), draft_sampling=DraftSampling.PROBABILISTIC)
    small = tiny.target(13, seed=1, num_layers=1)
    text = PROMPTS[1][:4]
    state = after(drafter, text)
    sampling = tiny.per_row(tiny.SamplingParams(temperature=0.7), 1)
    draft = jax.jit(drafter.drafter.propose)(
        drafter.params, state, jax.random.split(jax.random.key(0), 1), sampling
    )
    for node in (1, 2):
        scores = logits_after(small, [[*text, *draft.tokens[0, 1:node].tolist()]])[0] / 0.7
        assert np.allclose(draft.probs[0, node], softmax(scores), atol=1e-5)


def with_words(model: LoadedTarget, words: list[str]) -> LoadedTarget:
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0])
    )
    return dataclasses.replace(model, tokenizer=tokenizer, name="some model")


def test_what_cannot_draft_is_refused_in_one_line() -> None:
    words = [f"word{index}" for index in range(13)]
    target = with_words(TARGET, words)
    draft_model(with_words(tiny.target(13), words), target)

    with pytest.raises(
        ValueError, match="vocabulary of 11 tokens and some model one of 13; a draft"
    ):
        draft_model(tiny.target(11), target)

    with pytest.raises(ValueError, match="the token 'word4' is id 5 there and id 4 here"):
        draft_model(with_words(tiny.target(13), [*words[:4], "other", *words[4:12]]), target)

    for size in (0, 3, 4):
        with pytest.raises(
            ValueError, match=f"layer skip of {size} layers: some model has 3, so give 1 to 2"
        ):
            layer_skip(target, size)


def test_a_sequence_longer_than_the_draft_model_is_refused() -> None:
    decoder = SpeculativeDecoder(TARGET, tiny.draft_model(TARGET, max_positions=40), stop_tokens=())
    assert len(decoder.generate([1, 2, 3], max_new_tokens=37).tokens[0]) == 37
    with pytest.raises(ValueError, match=r"41 tokens .* 40 positions; lower max_new_tokens"):
        decoder.generate([1, 2, 3], max_new_tokens=38)
    with pytest.raises(ValueError, match="41 tokens"):
        decoder.prefill([[1], [1, 2, 3]], max_new_tokens=38)


def test_a_directory_with_a_language_model_is_loaded_as_a_draft_model(tmp_path: Path) -> None:
    target = load_target(tiny.GOLDEN / "vllm/target")
    native = tmp_path / "native"
    conversion.convert(tiny.GOLDEN / "vllm/target", native, "jax")

    prompt = tiny.random_prompts(1, 512, seed=7)[0]
    for source in (tiny.GOLDEN / "vllm/target", native):
        loaded = load_drafter(source, target=target)
        assert isinstance(loaded.drafter, DraftModel)
        assert loaded.name == str(source)
        assert tiny.same_bits(loaded.params, target.params)

    result = SpeculativeDecoder(target, loaded, num_speculative_tokens=3, stop_tokens=()).generate(
        prompt, max_new_tokens=17
    )
    assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens > 0

    with pytest.raises(
        ValueError, match=r"official/target has a vocabulary of .* one of 512; a draft model needs"
    ):
        load_drafter(tiny.GOLDEN / "official/target", target=target)


def test_names_of_drafters_are_not_paths() -> None:
    assert all(map(is_named, ("layer-skip", "layer-skip=half", "layer-skip=3", "ngram=3")))
    assert not any(map(is_named, (None, "./ngram", "some/head")))
