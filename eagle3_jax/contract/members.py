"""What the loop relies on in a target: members, shapes and types, and what it lends to drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.boundary import require_target
from eagle3_jax.cache import Cache, LayerCache
from eagle3_jax.contract.report import Broken, Skipped
from eagle3_jax.contract.texts import CAPACITY, COUNTS, LENGTHS, PARENTS, PATHS, ROWS, SIZE, Answer, TargetSubject
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.types import Tables, TargetOutput


def keeps_the_protocol(subject: TargetSubject) -> str:
    """It is an instance with every member, the same static argument whenever it is asked, and of one vocabulary."""
    model = subject.target.model
    require_target(model)
    if hash(model) != hash(model) or model != model:
        raise Broken("its hash changes, or it is not equal to itself, so every call would compile anew")
    if model.vocab_size != subject.target.vocab_size:
        raise Broken(f"it has {model.vocab_size} tokens, and was loaded as one of {subject.target.vocab_size}")
    return f"a vocabulary of {model.vocab_size}"


def cache_leads_with_the_batch(subject: TargetSubject) -> str:
    """An empty cache has a part for each layer, whose leaves lead with the batch, and lengths of 0."""
    for batch in (1, ROWS):
        cache = subject.target.model.init_cache(batch, CAPACITY)
        if not isinstance(cache, Cache):
            raise Broken(f"init_cache returned {type(cache).__name__}; expected an eagle3_jax.Cache")
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, LayerCache):
                raise Broken(f"layer {index} of the cache is {type(layer).__name__}; expected `fill` and `commit`")
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
            if np.shape(leaf)[:1] != (batch,):
                raise Broken(
                    f"cache{jax.tree_util.keystr(path)} has shape {list(np.shape(leaf))}; expected it to lead with "
                    f"the batch, {batch}"
                )
        if cache.length.dtype != np.int32 or np.asarray(cache.length).any():
            raise Broken(f"an empty cache has length {cache.length}; expected zeros of int32")
    return f"parts: {', '.join(type(layer).__name__ for layer in cache.layers)}"


def keeps_shapes(subject: TargetSubject) -> str:
    """Forwards give the sizes that the protocol says, with a cache and without."""
    for cache in (None, subject.target.model.init_cache(ROWS, CAPACITY)):
        final, features = _traced(subject, cache)
        for name, found, wanted in (("final", final, "B T D"), ("features", features, "B T A D")):
            size = (ROWS, SIZE, 0, final.shape[-1]) if name == "features" else (ROWS, SIZE, final.shape[-1])
            if found.shape != size:
                raise Broken(f"`{name}` has shape {list(found.shape)}; expected {list(size)}: {wanted}")
    return f"width {final.shape[-1]}"


def gives_float32(subject: TargetSubject) -> str:
    """Logits are float32 ``[.. V]``, whatever stands before the width."""
    model, params = subject.target.model, subject.target.params
    final, _ = _traced(subject, None)
    for leading in ((), (ROWS,), (ROWS, SIZE)):
        rows = jax.ShapeDtypeStruct((*leading, final.shape[-1]), final.dtype)
        logits = jax.eval_shape(model.unembed, params, rows)
        if logits.shape != (*leading, model.vocab_size) or logits.dtype != np.float32:
            raise Broken(
                f"unembed gave {logits.dtype.name}{list(logits.shape)} for {list(rows.shape)}; expected "
                f"float32{[*leading, model.vocab_size]}"
            )
    return ""


def commit_keeps_shapes(subject: TargetSubject) -> str:
    """A cache has the same structure, shapes and types after a prefill and after every commit."""
    text = subject.text()[:, :SIZE]
    empty = subject.target.model.init_cache(ROWS, CAPACITY)
    cache = _like(empty, subject.prefill(text)[1], "a prefill", LENGTHS)
    cache = _like(
        empty, subject.commit(cache, subject.block(cache, text, PARENTS), COUNTS, PATHS), "committing a path",
        np.add(LENGTHS, COUNTS),
    )  # fmt: skip
    cache = subject.commit(cache, subject.block(cache, text), COUNTS)
    _like(empty, cache, "committing in order", np.add(LENGTHS, COUNTS) + COUNTS)
    return f"{len(jax.tree.leaves(empty))} arrays"


def _like(empty: Cache, cache: Cache, after: str, length: Sequence[int] | np.ndarray) -> Cache:
    one, other = jax.tree.structure(empty), jax.tree.structure(cache)
    if one != other:
        raise Broken(f"after {after} the cache is {other}; expected {one}, as it was when empty")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(empty), jax.tree.leaves(cache), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise Broken(
                f"after {after} cache{jax.tree_util.keystr(path)} is {new.dtype.name}{list(new.shape)}; expected "
                f"{old.dtype.name}{list(old.shape)}, as it was when empty: every round would be another program"
            )
    if (np.asarray(cache.length) != length).any():
        raise Broken(f"after {after} the cache has lengths {np.asarray(cache.length).tolist()}; expected {[*length]}")
    return cache


def gives_features(subject: TargetSubject) -> str:
    """Features are ``[B T A D]``, in the order asked for, of a block as of a prefill, and end in the final state."""
    layers, text = (0, subject.layers, subject.layers + 1), subject.text()[:, :SIZE]
    answer, _ = _with_features(subject, text, layers)
    wanted = (*answer.final.shape[:2], len(layers), answer.final.shape[2])
    if answer.features.shape != wanted:
        raise Broken(f"features of {len(layers)} layers have shape {list(answer.features.shape)}; expected {[*wanted]}")
    backward, _ = _with_features(subject, text, layers[::-1])
    empty = subject.target.model.init_cache(ROWS, CAPACITY)
    block = subject.block(empty, text, aux_layers=layers)
    worst = 0.0
    for index, layer in enumerate(layers):
        here = answer.features[:, :, index]
        others = [
            (backward.features[:, :, -1 - index], "when the layers are asked for in another order"),
            (block.features[:, :, index], "in a block with a cache"),
        ]
        if layer == layers[-1]:
            others.append((answer.final, "from the final state, which it should be,"))
        for other, how in others:
            off = float(np.abs(other - here).max() / max(np.abs(here).max(), 1e-9))
            worst = max(worst, off)
            if not off <= subject.tolerance:
                raise Broken(f"features of layer {layer} differ {how}: by {off:.1g} of the largest value")
    return f"layers {', '.join(map(str, layers))}; off by {worst:.0e} at most"


def lends_tables(subject: TargetSubject) -> str:
    """Its tables have the sizes of the vocabulary, and do what it does with them, up to a factor."""
    model, params = subject.target.model, subject.target.params
    lend = getattr(model, "tables", None)
    if lend is None:
        raise Skipped("it has no `tables`; draft heads must bring their own")
    tables, text = lend(params), subject.text()[:, :SIZE]
    answer, _ = subject.prefill(text, (SIZE,) * ROWS)
    width = answer.final.shape[-1]
    if not isinstance(tables, Tables):
        raise Broken(f"`tables` returned {type(tables).__name__}; expected eagle3_jax.Tables")
    for name, shape in (("embedding", (model.vocab_size, width)), ("unembedding", (width, model.vocab_size))):
        if np.shape(getattr(tables, name)) != shape:
            raise Broken(f"its {name} has shape {list(np.shape(getattr(tables, name)))}; expected {list(shape)}")
    wide = lambda array: np.asarray(array, np.float64)
    product = answer.final @ wide(tables.unembedding)
    said, off = _fitted(product, answer.logits)
    if off > subject.tolerance:
        # A cap on the logits keeps their order, which is what greedy drafts go by.
        ranked = np.take_along_axis(answer.logits, product.argsort(-1), axis=-1)
        if (np.diff(ranked, axis=-1) < -subject.tolerance * subject.scale).any():
            raise Broken(f"logits are off by {off:.1g} of the largest from the final state times its unembedding")
    factors = [f"logits are {said:.4g} times the product"] if abs(said - 1) > 1e-2 else []
    try:
        entering = _with_features(subject, text, (0, subject.layers, subject.layers + 1))[0].features[:, :, 0]
    except Skipped:
        return "; ".join([f"off by {off:.0e}, the embedding not compared", *factors])
    scaled, apart = _fitted(wide(tables.embedding)[text], entering)
    if apart > subject.tolerance:
        raise Broken(f"what enters layer 0 is off by {apart:.1g} of its largest value from its embedding's rows")
    factors += [f"layer 0 is entered by {scaled:.4g} times the embedding"] if abs(scaled - 1) > 1e-2 else []
    return "; ".join([f"off by {max(off, apart):.0e} at most", *factors])


def _with_features(subject: TargetSubject, text: np.ndarray, layers: tuple[int, ...]) -> tuple[Answer, Cache]:
    """A prefill with features, which a target may refuse to give."""
    try:
        return subject.prefill(text, (SIZE,) * ROWS, aux_layers=layers)
    except ValueError as refusal:
        raise Skipped(f"refused: {(str(refusal).splitlines() or [''])[0]}") from None


def _fitted(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The factor by which one comes nearest to the other, and what it is off then, as a share of the largest value."""
    factor = float((one * other).sum() / max((one * one).sum(), 1e-30))
    return factor, float(np.abs(factor * one - other).max() / max(np.abs(other).max(), 1e-9))


def _positions(size: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (ROWS, size))


def _traced(subject: TargetSubject, cache: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Final states and features of a forward of SIZE tokens in every row, traced and not run; no layers asked for."""
    model = subject.target.model
    length = jnp.full((ROWS,), SIZE, jnp.int32) if cache is None else None
    tokens = jnp.zeros((ROWS, SIZE), jnp.int32)

    def run(params: Any, cache: Any) -> tuple[jax.Array, jax.Array]:
        output = model(params, tokens, _positions(SIZE), causal_mask(SIZE), cache, length=length)
        if not isinstance(output, TargetOutput):
            raise Broken(f"a forward returned {type(output).__name__}; expected an eagle3_jax.TargetOutput")
        if not isinstance(output.written, tuple) or len(output.written) != subject.layers:
            raise Broken(f"`written` is no tuple with one part for each of the {subject.layers} layers of the cache")
        return output.final, output.features

    return jax.eval_shape(run, subject.target.params, cache)
