"""Targets that somebody wrote badly: each breaks one rule of the contract, most of them only where a draft branches,
is refused, or stands beside another row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import recurrent
from flax import struct
from jaxtyping import Array
from recurrent import Recurrent, RecurrentTarget

from eagle3_jax.cache import Cache
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.types import EmbeddingTables as Tables
from eagle3_jax.types import TargetOutput


def replaced(**members: Any) -> LoadedTarget:
    """A recurrent target with some members replaced; functions become methods."""
    model = type("Replaced", (RecurrentTarget,), members)()
    return LoadedTarget(model, model.init(0), model.vocab_size, 512)


def asked(**changes: Callable[[dict], Any]) -> LoadedTarget:
    """One that runs with other arguments than it was given."""
    return answering(lambda output, given: output, **changes)


def answering(change: Callable[[TargetOutput, dict], TargetOutput], **changes: Callable[[dict], Any]) -> LoadedTarget:
    """One that answers something else."""

    def call(self, params, tokens, positions, mask, cache=None, aux_layers=(), length=None):
        given = {"tokens": tokens, "positions": positions, "mask": mask, "cache": cache}
        given |= {"aux_layers": aux_layers, "length": length}
        given |= {name: new(given) for name, new in changes.items()}
        return change(RecurrentTarget.__call__(self, params, **given), given)

    return replaced(__call__=call)


def with_final(change: Callable[[Array], Array]) -> Callable[[TargetOutput, dict], TargetOutput]:
    return lambda output, given: output.replace(final=change(output.final))


def with_cache(change: Callable[[Cache], Any]) -> LoadedTarget:
    return replaced(init_cache=lambda self, batch, capacity: change(RecurrentTarget.init_cache(self, batch, capacity)))


@struct.dataclass(kw_only=True)
class Halved(Recurrent):
    def commit(self, written, length, count, nodes):
        layer = Recurrent.commit(self, written, length, count, nodes)
        return layer.replace(state=layer.state.astype(jnp.bfloat16))


@struct.dataclass(kw_only=True)
class Late(Recurrent):
    """Keeps the state of the token before the last one."""

    def commit(self, written, length, count, nodes):
        return Recurrent.commit(self, written, length, jnp.where(count > 1, count - 1, count), nodes)


@struct.dataclass(kw_only=True)
class InOrder(Recurrent):
    def commit(self, written, length, count, nodes):
        return Recurrent.commit(self, written, length, count, None)


@struct.dataclass(kw_only=True)
class Restless(Recurrent):
    """Takes the root in when nothing is kept."""

    def commit(self, written, length, count, nodes):
        return Recurrent.commit(self, written, length, jnp.maximum(count, 1), nodes)


def keeping(layer: type[Recurrent]) -> LoadedTarget:
    return replaced(empty=lambda self, batch: layer(state=RecurrentTarget.empty(self, batch).state))


def of_the_node_before(self, params, x, mask, start):
    return RecurrentTarget.states(self, params, x, jnp.broadcast_to(causal_mask(x.shape[1]), mask.shape), start)


LONG = "a long text equals its tokens one by one"
CALLS = itertools.count()
LOGITS = RecurrentTarget.unembed
GOOD = recurrent.target()

# The check that must fail, and what it must say.
BROKEN: dict[str, tuple[LoadedTarget, str, str]] = {
    "an unstable hash": (replaced(__hash__=lambda self: next(CALLS)), "keeps the protocol", "its hash changes"),
    "a vocabulary of its own": (
        dataclasses.replace(GOOD, vocab_size=12), "keeps the protocol", "has 13 tokens, and was loaded as one of 12"
    ),
    "no cache": (with_cache(lambda cache: cache.layers), "its cache leads with the batch", "returned tuple; expected"),
    "a state for all rows": (
        with_cache(lambda cache: cache.replace(layers=(cache.layers[0], Recurrent(state=jnp.zeros((8, 8)))))),
        "its cache leads with the batch", r"layers\[1\].state as float32\[8, 8\]; expected an array that leads",
    ),
    "one layer that hands nothing over": (
        answering(lambda output, given: output.replace(written=output.written[:1])), "keeps shapes and types",
        "one part for each of the 2 layers",
    ),
    "logits in half precision": (
        replaced(unembed=lambda *given: LOGITS(*given).astype(jnp.float16)), "gives logits in float32",
        r"float16\[13\] for \[8\]; expected float32\[13\]",
    ),
    "a state that loses half its bits": (
        keeping(Halved), "a commit keeps shapes and types",
        r"as float32\[3, 8, 8\] and committing a path made it bfloat16\[3, 8, 8\]",
    ),
    "a prompt that sees what comes": (
        asked(mask=lambda given: given["mask"] | (given["cache"] is None)), "a prefill equals its tokens one by one",
        "of a prompt is not what it is one by one: logits off by",
    ),
    "padding in the state": (
        asked(length=lambda given: None), "a prefill leaves what its tokens leave", "row 1 behind a prompt padded with",
    ),
    "positions one off in a block": (
        asked(positions=lambda given: given["positions"] + int(given["cache"] is not None)),
        "a block equals its tokens one by one", "of a block is not",
    ),
    "a state that lags behind": (
        keeping(Late), "a committed block equals its text afresh", "token 0 of row . behind a chain is another"
    ),
    "a mask that is forgotten": (
        asked(mask=lambda given: causal_mask(given["tokens"].shape[1])), "a node of a tree equals its own path",
        "of a tree is not the end of its path",
    ),
    "a state of the node before": (
        replaced(states=of_the_node_before), "a node of a tree equals its own path", "is not the end of its path"
    ),
    "a state committed in the block's order": (
        keeping(InOrder), "a committed path equals its text afresh", "behind a path of a tree is not"
    ),
    "a commit of nothing that advances": (
        keeping(Restless), "committing nothing changes nothing", "differs after 0 tokens were kept"
    ),
    "rows that are mixed": (
        answering(with_final(lambda x: x + 0.01 * jnp.mean(x, axis=0, keepdims=True))),
        "rows are independent of their neighbours", "is another when its neighbours hold other tokens",
    ),
    "a block that is summed": (
        answering(with_final(lambda x: x + 0.01 * jnp.sum(x, axis=1, keepdims=True))),
        "what the mask hides has no influence", "changes with node ., which it does not see",
    ),
    "positions of a prompt that are off from 24 on": (
        asked(positions=lambda given: given["positions"] + given["positions"] // 24 * int(given["cache"] is None)),
        LONG, "of a long prompt is not what it is one by one",
    ),
    "a block that is wrong after eight tokens": (
        answering(with_final(lambda x: jnp.concatenate([x[:, :8], -x[:, 8:]], axis=1) if x.shape[1] == 16 else x)),
        LONG, "of a tree of 16 is not the end of its path",
    ),
    "features in an order of their own": (
        asked(aux_layers=lambda given: tuple(sorted(given["aux_layers"]))),
        "features are those of the layers asked for", "features of layer . differ when",
    ),
    "an unembedding of other ids": (
        replaced(tables=lambda self, params: Tables(params["embedding"], jnp.roll(params["embedding"].T, 1, axis=1))),
        "lends its tables", "from the final state times its unembedding",
    ),
    "blocks of four that go otherwise": (
        answering(with_final(lambda x: -x if x.shape[1] == 4 else x)), "greedy output is its own",
        "with a chain drafted, row . writes id",
    ),
}  # fmt: skip
