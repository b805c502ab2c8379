"""EAGLE-3 speculative decoding in one file of plain JAX: a Llama target, the draft head, chains and dynamic trees.

    python examples/nano_eagle3.py                                # a chain of 3, greedy
    python examples/nano_eagle3.py --tree 8 5 2 --temperature 0.8 # a tree: 8 nodes, 5 levels, 2 children each
    python examples/nano_eagle3.py --target DIR --head eagle3_jax/assets/smollm2 # eagle3 convert smollm2 DIR --to vllm

Read it from top to bottom. One round has five steps: `propose` drafts tokens with the head, the target scores all of
them in one forward, `verify` accepts some of them, the accepted ones enter the target's cache (commit) and the head's
cache (observe). One sequence at a time, in float32. For the same seed, tokens and rounds are those of the library.

Shapes: T tokens of a block, S slots of a cache, D width, V vocabulary, N nodes of a draft (the root included), k nodes
of one level. Papers: EAGLE-3, arXiv 2503.01840; EAGLE-2 (the tree), 2406.16858; speculative sampling, 2211.17192.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from safetensors.flax import load_file
from tokenizers import Tokenizer

SHIPPED = Path(__file__).resolve().parent.parent / "eagle3_jax" / "assets"


# ------------------------------------------------------------------------------------------------------------ networks
class Config(NamedTuple):
    """What the programs need to know of a model besides its weights. The draft head has the same attention heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    stop: int
    head_theta: float = 0.0  # the head's own rotary base

    @property
    def aux_layers(self):
        """EAGLE-3 reads the features that enter these three layers: a low, a middle and a high one."""
        return 2, self.num_layers // 2, self.num_layers - 3


def load(directory):
    """Weights in float32 by the names of the file, and the configuration."""
    weights = {name: array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
               for name, array in load_file(directory / "model.safetensors").items()}  # fmt: skip
    said = json.loads((directory / "config.json").read_text())
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    head_dim = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
    stop = -1 if said["eos_token_id"] is None else said["eos_token_id"]
    theta = said.get("rope_theta") or said["rope_parameters"]["rope_theta"]
    weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight"))  # tied
    return weights, Config(*(said[name] for name in names), head_dim, said["rms_norm_eps"], theta, stop)


def rms_norm(x, weight, eps):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """Rotary position embedding of ``x [T heads H]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (jnp.arange(half) / half)
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    first = x[..., :half]
    second = x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(w, name, config, x, residual, positions, cache, slot, mask):
    """A Llama layer. The head's layer is the same, with an input ``x`` twice as wide.

    Args:
        x: ``[T D]`` or ``[T 2D]``, the normalized input of attention.
        residual: ``[T D]``, what attention and MLP are added to.
        cache: ``[2 S C H]``, keys and values; this block is written from ``slot`` on.
        mask: ``[T S]``, the slots that each token attends to.
    """
    tokens = x.shape[0]
    groups = config.num_heads // config.num_kv_heads
    project = lambda letter: (x @ w[f"{name}.self_attn.{letter}_proj.weight"].T).reshape(tokens, -1, config.head_dim)
    keys = rotate(project("k"), positions, config.theta)
    cache = lax.dynamic_update_slice(cache, jnp.stack([keys, project("v")]), (0, slot, 0, 0))
    queries = rotate(project("q"), positions, config.theta).reshape(
        tokens, config.num_kv_heads, groups, config.head_dim
    )
    scores = jnp.einsum("tcgh,sch->tcgs", queries, cache[0]) / config.head_dim**0.5
    shares = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("tcgs,sch->tcgh", shares, cache[1]).reshape(tokens, -1)
    residual = residual + attended @ w[f"{name}.self_attn.o_proj.weight"].T
    x = rms_norm(residual, w[f"{name}.post_attention_layernorm.weight"], config.eps)
    gate, up = (x @ w[f"{name}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
    return residual + (jax.nn.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T, cache


def see(length, block, capacity):
    """The mask ``[T S]`` of a block after ``length`` committed slots: all of those, and ``block [T M]`` after them."""
    committed = jnp.broadcast_to(jnp.arange(capacity) < length, (block.shape[0], capacity))
    return lax.dynamic_update_slice(committed, block, (0, length))


def run_target(w, config, tokens, positions, cache, length, block):
    """Logits ``[T V]`` after each token, features ``[T 3D]``, and the cache ``[L 2 S C H]`` with the block in it."""
    x = w["model.embed_tokens.weight"][tokens]
    features = []
    layers = []
    mask = see(length, block, cache.shape[2])
    for index in range(config.num_layers):
        name = f"model.layers.{index}"
        features += [x] if index in config.aux_layers else []
        normed = rms_norm(x, w[f"{name}.input_layernorm.weight"], config.eps)
        x, written = layer(w, name, config, normed, x, positions, cache[index], length, mask)
        layers.append(written)
    logits = rms_norm(x, w["model.norm.weight"], config.eps) @ w["lm_head.weight"].T
    return logits, jnp.concatenate(features, axis=-1), jnp.stack(layers)


def run_head(head, embedding, config, tokens, stream, positions, cache, length, block):
    """One step of the draft head. It reads each token next to the ``stream`` of the position before it.

    Returns the outputs ``[T D]``, which are the stream of the next tokens, and the cache ``[2 S C H]``. The tokens are
    the last T of the M slots after ``length`` that the mask ``block [T M]`` is about.
    """
    embedded = rms_norm(embedding[tokens], head["midlayer.input_layernorm.weight"], config.eps)
    normed = rms_norm(stream, head["midlayer.hidden_norm.weight"], config.eps)
    slot = length + block.shape[1] - block.shape[0]
    mask = see(length, block, cache.shape[1])
    x = jnp.concatenate([embedded, normed], axis=-1)
    return layer(head, "midlayer", config._replace(theta=config.head_theta), x, stream, positions, cache, slot, mask)


def head_logits(head, config, output):
    """``[T W]`` over the draft vocabulary."""
    return rms_norm(output, head["norm.weight"], config.eps) @ head["lm_head.weight"].T


# ------------------------------------------------------------------------------------------------------------ sampling


def uniforms(seed, position, purpose, count):
    """Random numbers in [0, 1) that depend on the position in the text, not on how many rounds led there."""
    key = jax.random.fold_in(jax.random.key(seed), 0)  # row 0 of a batch
    bits = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, position), purpose), (count,), jnp.uint32)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def num_digits(size):
    """Random numbers that one draw takes: digits of a token id in base 64."""
    return 1 if size <= 64 else 1 + num_digits(-(-size // 64))


def draw(p, dice):
    """A token from ``p [V]``: the group of 64^n tokens first, then the group within it. Short sums lose no mass."""
    if p.shape[0] <= 64:
        total = jnp.where(p > 0, jnp.cumsum(p), 0.0)
        return jnp.argmax(total > dice[-1] * jnp.max(total))
    groups = jnp.pad(p, (0, -p.shape[0] % 64)).reshape(-1, 64)
    group = draw(groups.sum(axis=1), dice[:-1])
    return 64 * group + draw(groups[group], dice[-1:])


def distribution(logits, temperature):
    """``[N V]``. Temperature 0 is a point mass on the most likely token: greedy decoding needs no code of its own."""
    if temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jax.nn.softmax(logits / temperature, axis=-1)


# ------------------------------------------------------------------------------------------------------ propose, verify


class Draft(NamedTuple):
    """A tree of N nodes; node 0, the root, is the newest token of the text."""

    tokens: jax.Array  # [N]
    parents: jax.Array  # [N], -1 at the root
    q: jax.Array | None  # [N V], the distribution that each node was sampled from; None: chosen, not sampled


class Shape(NamedTuple):
    """A chain of ``depth`` tokens; with ``k``, a tree of ``num_nodes``. A depth of 0 is plain decoding."""

    depth: int
    num_nodes: int = 0
    k: int = 0


def draft_chain(run, output, logits, shape, to_target, vocab_size, root, temperature, dice):
    """K tokens one after the other: the most likely ones, or samples from the head's distribution.

    Args:
        run: Runs the head on one level: tokens, their stream, depth and mask to outputs and logits.
        output: ``[1 D]``, the head's output at the root; ``logits [1 W]`` follow from it.
        shape: How much is drafted.
        to_target: ``[W]``, target ids of draft ids. The head knows only the most frequent tokens.
        vocab_size: V.
        root: The newest token of the text.
        temperature: Of the samples.
        dice: ``[K U]``, the random numbers.
    """
    tokens = [root]
    q = [jnp.zeros((vocab_size,))]
    for depth in range(shape.depth):
        mine = distribution(logits, temperature)[0]
        tokens.append(to_target[draw(mine, dice[depth])])
        q.append(jnp.zeros((vocab_size,)).at[to_target].add(mine))
        if depth + 1 < shape.depth:  # nothing follows the last token
            output, logits = run(tokens[-1][None], output, depth, jnp.ones((1, depth + 1), bool))
    return Draft(jnp.stack(tokens), jnp.arange(-1, shape.depth), jnp.stack(q))


def draft_tree(run, output, logits, shape, to_target, root):
    """EAGLE-2: expands the k most likely nodes of each level, then keeps the ``num_nodes - 1`` most likely of all."""
    k = shape.k

    def top(logits):
        best, ids = lax.top_k(logits, k)
        return best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), to_target[ids]

    (scores,), (tokens,) = top(logits)
    nodes = jnp.arange(k)
    itself = jnp.eye(k, dtype=bool)
    all_scores = [scores]
    all_tokens = [tokens]
    all_parents = [jnp.full((k,), -1)]
    output = jnp.repeat(output, k, axis=0)
    mask = itself
    for depth in range(shape.depth - 1):
        output, logits = run(tokens, output, depth, mask)
        more, ids = top(logits)  # [k k]: the children of each expanded node
        children = (scores[:, None] + more).reshape(-1)
        all_scores.append(children)
        all_tokens.append(ids.reshape(-1))
        all_parents.append(jnp.repeat(nodes, k))
        scores, best = lax.top_k(children, k)
        tokens = ids.reshape(-1)[best]
        nodes = k + depth * k**2 + best
        output = output[best // k]
        mask = jnp.concatenate([mask[best // k], itself], axis=1)

    # A parent is at least as likely as its child and has a lower number, so every chosen node's ancestors are chosen.
    chosen = jnp.sort(lax.top_k(jnp.concatenate(all_scores), shape.num_nodes - 1)[1])
    parents = jnp.concatenate(all_parents)[chosen]
    parents = jnp.where(parents < 0, 0, 1 + jnp.searchsorted(chosen, parents))
    tokens = jnp.concatenate([root[None], jnp.concatenate(all_tokens)[chosen]])
    return Draft(tokens, jnp.concatenate([jnp.array([-1]), parents]), None)


def ancestors(parents, depth):
    """``[N N]``: each node attends to itself and its ancestors."""
    mask = jnp.eye(len(parents), dtype=bool)
    above = parents
    for _ in range(depth):
        mask = mask | (above[:, None] == jnp.arange(len(parents)))
        above = jnp.where(above < 0, -1, parents[above])
    return mask


def verify(draft, p, accept, choose, depth):
    """Accepts a path of the draft; the emitted tokens are distributed as if the target had sampled them one by one.

    A child x of the current node is accepted with probability ``min(1, p(x) / q(x))``. A rejection replaces p by the
    normalized ``max(p - q, 0)``, for its siblings and for the token that is drawn when no child is left.

    Returns:
        The root and the accepted nodes (``[depth + 1]``, padded), how many are accepted, and the next token.
    """

    def visit(node, walk):
        current, mass, path, count = walk
        token = draft.tokens[node]
        q = jax.nn.one_hot(token, p.shape[1]) if draft.q is None else draft.q[node]
        child = draft.parents[node] == current
        taken = child & (accept[node] * q[token] < mass[token])
        rest = jnp.maximum(mass - q, 0)
        rest = jnp.where(rest.sum() > 0, rest / jnp.maximum(rest.sum(), 1e-30), mass)
        return (
            jnp.where(taken, node, current),
            jnp.where(taken, p[node], jnp.where(child, rest, mass)),
            jnp.where(taken, path.at[count + 1].set(node, mode="drop"), path),
            count + taken,
        )

    start = (0, p[0], jnp.zeros((depth + 1,), jnp.int32), 0)
    _, mass, path, count = lax.fori_loop(1, len(draft.tokens), visit, start)
    return path, count, draw(mass, choose)


# ------------------------------------------------------------------------------------------------------------ the loop


class State(NamedTuple):
    """Between rounds. The caches hold all tokens of the text but the newest, whose key is not known yet."""

    text: jax.Array  # [S]
    length: jax.Array
    cache: jax.Array  # [L 2 S C H], the target's
    head_cache: jax.Array  # [2 S C H]
    output: jax.Array  # [1 D], the head's output at the newest token, from which the first draft token follows
    stopped: jax.Array
    rounds: jax.Array
    accepted: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "shape", "max_new_tokens", "temperature"))
def generate(w, head, prompt, seed, *, config, shape, max_new_tokens, temperature=0.0):
    """The whole generation as one program. Returns the final state; ``text[: length]`` is prompt and output."""
    fed = len(prompt)
    vocab_size = w["lm_head.weight"].shape[0]
    limit = fed + max_new_tokens
    capacity = limit + max(shape.num_nodes, shape.depth + 1, shape.k * shape.depth)
    kv = (2, capacity, config.num_kv_heads, config.head_dim)
    embedding = w["model.embed_tokens.weight"]
    to_target = jnp.arange(len(head["d2t"])) + head["d2t"]

    def observe(tokens, features, cache, length, newest):
        """Runs the head on committed tokens, whose features are known now: the pairs (feature of t, token t + 1)."""
        block = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        positions = length + jnp.arange(len(tokens))
        fused = features @ head["fc.weight"].T
        output, cache = run_head(head, embedding, config, tokens, fused, positions, cache, length, block)
        return output[newest][None], cache

    def propose(state):
        root = state.text[state.length - 1]
        length = state.length - 1
        if shape.depth == 0:
            return Draft(root[None], jnp.array([-1]), None)
        caches = [state.head_cache]  # with the guesses; thrown away after the round

        def run(tokens, output, depth, block):
            positions = jnp.full(tokens.shape, length + depth)
            output, cache = run_head(head, embedding, config, tokens, output, positions, caches[-1], length, block)
            caches.append(cache)
            return output, head_logits(head, config, output)

        logits = head_logits(head, config, state.output)
        if shape.k:
            return draft_tree(run, state.output, logits, shape, to_target, root)
        digits = num_digits(logits.shape[1])
        dice = uniforms(seed, state.length, 0, shape.depth * digits).reshape(shape.depth, digits)
        return draft_chain(run, state.output, logits, shape, to_target, vocab_size, root, temperature, dice)

    def one_round(state):
        draft = propose(state)
        length = state.length - 1
        num_nodes = len(draft.tokens)
        block = ancestors(draft.parents, shape.depth)
        positions = length + block.sum(axis=1) - 1
        logits, features, cache = run_target(w, config, draft.tokens, positions, state.cache, length, block)
        dice = uniforms(seed, state.length, 1, num_nodes + num_digits(vocab_size))
        p = distribution(logits, temperature)
        nodes, count, token = verify(draft, p, dice[:num_nodes], dice[num_nodes:], shape.depth)

        # Commit: the accepted nodes' keys and values move next to the committed ones. Later slots are ignored.
        cache = lax.dynamic_update_slice(cache, cache[:, :, length + nodes], (0, 0, length, 0, 0))
        emitted = jnp.roll(draft.tokens[nodes], -1).at[count].set(token)
        output, head_cache = observe(emitted, features[nodes], state.head_cache, length, count)

        index = jnp.arange(len(emitted))
        stops = (emitted == config.stop) & (index <= count)
        room = jnp.minimum(count + 1, limit - state.length)
        kept = jnp.where(stops.any(), jnp.minimum(jnp.argmax(stops) + 1, room), room)
        text = state.text.at[jnp.where(index < kept, state.length + index, capacity)].set(emitted, mode="drop")
        stopped = (stops & (index < kept)).any() | (state.length + kept >= limit)
        return State(
            text, state.length + kept, cache, head_cache, output, stopped, state.rounds + 1, state.accepted + count
        )

    cache = jnp.zeros((config.num_layers, *kv))
    causal = jnp.tril(jnp.ones((fed, fed), bool))
    logits, features, cache = run_target(w, config, prompt, jnp.arange(fed), cache, 0, causal)
    token = draw(distribution(logits[-1:], temperature)[0], uniforms(seed, fed, 1, num_digits(vocab_size)))
    text = jnp.zeros((capacity,), jnp.int32).at[:fed].set(prompt).at[fed].set(token)
    output, head_cache = observe(text[1 : fed + 1], features, jnp.zeros(kv), 0, fed - 1)
    stopped = (token == config.stop) | (max_new_tokens == 1)
    state = State(text, jnp.int32(fed + 1), cache, head_cache, output, stopped, jnp.int32(0), jnp.int32(0))
    return lax.while_loop(lambda state: ~state.stopped, one_round, state)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="def read_config(filename, encoding=None):\n", help="Text to continue.")
    parser.add_argument("--chain", type=int, default=3, help="Length of the draft.")
    parser.add_argument("--tree", type=int, nargs=3, metavar=("NODES", "LEVELS", "CHILDREN"), help="Draft a tree.")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--target", type=Path, default=SHIPPED / "target", help="Directory of a Llama in one file.")
    parser.add_argument("--head", type=Path, default=SHIPPED / "eagle3", help="Directory of its EAGLE-3 head.")
    asked = parser.parse_args()
    w, config = load(asked.target)
    head, of_head = load(asked.head)
    config = config._replace(head_theta=of_head.theta)
    tokenizer = Tokenizer.from_file(str(asked.target / "tokenizer.json"))
    prompt = jnp.array(tokenizer.encode(asked.prompt).ids)
    shape = Shape(asked.tree[1], asked.tree[0], asked.tree[2]) if asked.tree else Shape(asked.chain)
    options = {"config": config, "max_new_tokens": asked.max_new_tokens, "temperature": asked.temperature}
    for name, drafted in (("plain", Shape(0)), ("EAGLE-3", shape)):
        call = functools.partial(generate, w, head, prompt, asked.seed, shape=drafted, **options)
        jax.block_until_ready(call())  # compiles
        start = time.perf_counter()
        state = jax.block_until_ready(call())
        seconds = time.perf_counter() - start
        new = int(state.length) - len(prompt)
        print(tokenizer.decode(state.text[: int(state.length)].tolist()))
        print(f"[{name}: {new} tokens in {int(state.rounds)} rounds, {new / seconds:.0f} tokens/s]\n")


if __name__ == "__main__":
    main()
