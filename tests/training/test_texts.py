"""Texts to learn from: held-out texts, batches and files; and stored features of the target."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_pair import VOCAB, random_pair

from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.training import features as storage
from eagle3_jax.training.batches import text_batches
from eagle3_jax.training.features import stored_features
from eagle3_jax.training.texts import Text, Texts, buckets_of, document_hash, token_counts
from eagle3_jax.tree import causal_mask

LENGTHS = [5, 40, 17, 33, 8, 12, 40, 21, 30, 9, 16, 6]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Returns a target, the head's layers, and the function of the features of the random texts."""
    monkeypatch.setattr(storage, "TEXTS_OF_A_PART", 5)
    model, drafter, _, frozen = random_pair()
    target = LoadedTarget(
        model=model, params=frozen["target_params"], vocab_size=VOCAB, max_positions=64
    )
    layers = drafter.aux_layers
    return target, layers, lambda: stored_features(target, random_texts(), layers, tmp_path)


def random_texts() -> Texts:
    """Texts of several lengths; the last two thirds of each are learnt."""
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    return Texts.of(
        Text(row, [index >= len(row) // 3 for index in range(len(row))], document_hash(str(row)))
        for row in rows
    )


def test_a_document_is_held_out_by_its_hash():
    expected = int(hashlib.sha256("Why? Größe".encode()).hexdigest()[:16], 16)
    assert document_hash("Why? Größe") == expected
    texts = Texts.of(Text([1], [True], document_hash(str(index))) for index in range(2000))
    for share in (0.0, 0.02, 0.5, 1.0):
        is_held_out = texts.held_out(share)
        # The standard deviation of the share is at most 0.011, so larger mistakes of the limit are
        # detected.
        assert abs(is_held_out.mean() - share) < 0.05
        assert np.array_equal(is_held_out, texts.document < share * 2.0**64)


def test_texts_are_read_as_they_were_written(tmp_path):
    texts = random_texts()
    texts.save(tmp_path / "texts.npz")
    again = Texts.joined([Texts.load(tmp_path / "texts.npz"), texts.chosen(np.arange(12) == 3)])
    assert np.array_equal(again.tokens, np.concatenate([texts.tokens, texts.tokens[62:95]]))
    assert np.array_equal(again.length, [*LENGTHS, 33])
    assert again.document[-1] == texts.document[3]


def test_the_tokens_that_are_learnt_are_counted():
    texts = Texts.of(
        [Text([0, 1, 1, 3], [False, True, True, True], 0), Text([3, 3, 0], [False, True, False], 1)]
    )
    assert token_counts(texts, 5).tolist() == [0, 2, 0, 2, 0]
    with pytest.raises(ValueError, match="another tokenizer"):
        token_counts(texts, 3)


def test_buckets_hold_every_text_once_with_little_padding():
    random = np.random.default_rng(0)
    length = random.integers(30, 352, 3000)
    buckets = buckets_of(length)
    assert sorted(np.concatenate([bucket.texts for bucket in buckets])) == list(range(3000))
    assert all(length[bucket.texts].max() <= bucket.length for bucket in buckets)
    padded = sum(bucket.length * len(bucket.texts) for bucket in buckets)
    assert padded < 1.2 * length.sum()


def test_a_pass_sees_every_text_once_and_depends_on_the_step_alone():
    texts = random_texts()
    batch_at, steps = text_batches(texts, 2, seed=3)

    rows = []
    for step in range(steps):
        batch = batch_at(step)
        for tokens, real, learn in zip(
            batch.tokens, batch.attention_mask, batch.loss_mask, strict=True
        ):
            row = np.asarray(tokens)[np.asarray(real)]
            if len(row) == 1:
                # A row without a text.
                assert not learn.any()
                continue

            rows.append(row.tolist())
            # Entry t is for token t + 2; the first token of the answer is the target's.
            expected = np.arange(len(learn)) + 2
            assert np.array_equal(learn, (expected > len(row) // 3) & (expected < len(row)))

    all_texts = [row.tolist() for row in np.split(texts.tokens, np.cumsum(LENGTHS)[:-1])]
    assert sorted(rows) == sorted(all_texts)

    again, _ = text_batches(texts, 2, seed=3)
    for step in (steps + 2, 1, steps + 2):
        assert np.array_equal(again(step).tokens, batch_at(step).tokens)
    passes = range(steps), range(steps, 2 * steps)
    first, second = (
        [np.asarray(batch_at(step).tokens).tolist() for step in steps] for steps in passes
    )
    assert first != second


def test_stored_features_are_those_of_a_text_in_a_batch_of_one(stored):
    target, layers, compute = stored
    *_, features = compute()
    known = features.of(np.array([1, 11, 7, 6]), 48, 4)

    size = LENGTHS[7]
    row = jnp.asarray(np.split(random_texts().tokens, np.cumsum(LENGTHS))[7])[None]
    positions = jnp.arange(size)[None]
    output = target.model(target.params, row, positions, causal_mask(size), aux_layers=layers)
    logits = target.model.unembed(target.params, output.final)
    # bfloat16 has 8 bits: features differ by 0.4 % at most.
    for stored, expected in ((known.features, output.features), (known.final, output.final)):
        np.testing.assert_allclose(
            np.asarray(stored[2, :size], np.float32), expected[0], rtol=0.01, atol=0.01
        )
    assert np.array_equal(known.likeliest[2, :size], jnp.argmax(logits, -1)[0])
    np.testing.assert_allclose(known.log_norm[2, :size], jax.nn.logsumexp(logits, -1)[0], rtol=1e-5)


def test_features_are_computed_once_and_a_damaged_part_is_named(stored, tmp_path):
    _, _, compute = stored
    run = compute()
    assert next(run) is None
    run.close()  # interrupted after the first of three parts
    first = (tmp_path / "00000.npy").read_bytes()
    parts = list(compute())
    assert [part is None for part in parts] == [True, True, False]
    assert (tmp_path / "00000.npy").read_bytes() == first
    (tmp_path / "00001.npy").write_bytes(first[:-8])
    with pytest.raises(ValueError, match=r"00001\.npy is damaged; remove it"):
        list(compute())
