"""EAGLE-3 in one file of plain JAX: a Llama target, the draft head, chains and dynamic trees.

    python examples/nano_eagle3.py                                  # a chain of 3, greedy
    python examples/nano_eagle3.py --tree 8 5 2 --temperature 0.8   # 8 nodes, 5 levels, top 2
    eagle3 convert smollm2 DIR --to vllm
    python examples/nano_eagle3.py --target DIR --head eagle3_jax/assets/smollm2

Read it from top to bottom. One round has five steps: `propose` drafts tokens with the head, the
target scores all of them in one forward, `verify` accepts some of them, the accepted ones enter the
target's cache (commit) and the head's cache (observe). One sequence at a time, in float32. For the
same seed, tokens and rounds are those of the library.

Shapes: T tokens of a block, S slots of a cache, D width, V vocabulary, N nodes of a draft (the root
included), k nodes of one level. Papers: EAGLE-3, arXiv 2503.01840; EAGLE-2 (the tree), 2406.16858;
speculative sampling, 2211.17192.
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


# ----------------------------------------------------------------------------------------- networks
class Config(NamedTuple):
    """Sizes and constants of a model. The draft head has the same attention heads as its target."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    stop: int
    head_theta: float = 0.0  # rotary base of the head

    @property
    def aux_layers(self):
        """EAGLE-3 reads the features that enter these layers: a low, a middle and a high one."""
        return 2, self.num_layers // 2, self.num_layers - 3


def load(directory):
    """Returns weights in float32, by the names of the file, and the configuration."""
    weights = load_file(directory / "model.safetensors")
    for name, array in weights.items():
        if array.dtype == jnp.bfloat16:
            weights[name] = array.astype(jnp.float32)
    embedding = weights.get("model.embed_tokens.weight")
    weights.setdefault("lm_head.weight", embedding)  # tied

    fields = json.loads((directory / "config.json").read_text())
    num_heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // num_heads
    theta = fields.get("rope_theta") or fields["rope_parameters"]["rope_theta"]
    stop = fields["eos_token_id"]
    config = Config(
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=head_dim,
        eps=fields["rms_norm_eps"],
        theta=theta,
        stop=-1 if stop is None else stop,
    )
    return weights, config


def rms_norm(x, weight, eps):
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + eps) * weight


def rotate(x, positions, theta):
    """Applies the rotary position embedding to ``x [T heads H]``."""
    half = x.shape[-1] // 2
    wavelengths = theta ** (jnp.arange(half) / half)
    angles = positions[:, None] / wavelengths
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    first = x[..., :half]
    second = x[..., half:]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    return jnp.concatenate([rotated_first, rotated_second], axis=-1)


def layer(w, name, config, x, residual, positions, cache, slot, mask):
    """Runs a Llama layer. The head's layer is the same, with an input ``x`` twice as wide.

    Args:
        x: ``[T D]`` or ``[T 2D]``, the normalized input of attention.
        residual: ``[T D]``, what attention and MLP are added to.
        cache: ``[2 S C H]``, keys and values; this block is written from ``slot`` on.
        mask: ``[T S]``, the slots that each token attends to.
    """
    tokens = x.shape[0]
    groups = config.num_heads // config.num_kv_heads

    def project(letter):
        weight = w[f"{name}.self_attn.{letter}_proj.weight"]
        return (x @ weight.T).reshape(tokens, -1, config.head_dim)

    keys = rotate(project("k"), positions, config.theta)
    block = jnp.stack([keys, project("v")])
    cache = lax.dynamic_update_slice(cache, block, (0, slot, 0, 0))
    queries = rotate(project("q"), positions, config.theta)
    queries = queries.reshape(tokens, config.num_kv_heads, groups, config.head_dim)
    scores = jnp.einsum("tcgh,sch->tcgs", queries, cache[0])
    scores = scores / config.head_dim**0.5
    visible = mask[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("tcgs,sch->tcgh", weights, cache[1])
    attended = attended.reshape(tokens, -1)
    residual = residual + attended @ w[f"{name}.self_attn.o_proj.weight"].T

    x = rms_norm(residual, w[f"{name}.post_attention_layernorm.weight"], config.eps)
    gate = x @ w[f"{name}.mlp.gate_proj.weight"].T
    up = x @ w[f"{name}.mlp.up_proj.weight"].T
    down = (jax.nn.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return residual + down, cache


def cache_mask(length, block, capacity):
    """Returns the mask ``[T S]`` over all slots: ``length`` committed, then ``block [T M]``."""
    is_committed = jnp.arange(capacity) < length
    committed = jnp.broadcast_to(is_committed, (block.shape[0], capacity))
    return lax.dynamic_update_slice(committed, block, (0, length))


def run_target(w, config, tokens, positions, cache, length, block):
    """Returns logits ``[T V]``, features ``[T 3D]``, and the cache ``[L 2 S C H]`` with them."""
    x = w["model.embed_tokens.weight"][tokens]
    features = []
    layers = []
    mask = cache_mask(length, block, cache.shape[2])
    for index in range(config.num_layers):
        name = f"model.layers.{index}"
        if index in config.aux_layers:
            features.append(x)
        normed = rms_norm(x, w[f"{name}.input_layernorm.weight"], config.eps)
        x, written = layer(w, name, config, normed, x, positions, cache[index], length, mask)
        layers.append(written)
    final = rms_norm(x, w["model.norm.weight"], config.eps)
    logits = final @ w["lm_head.weight"].T
    return logits, jnp.concatenate(features, axis=-1), jnp.stack(layers)


def run_head(head, embedding, config, tokens, stream, positions, cache, length, block):
    """Runs one step of the draft head.

    It reads each token with the ``stream`` of the position before it. Returns the outputs ``[T
    D]``, which are the stream of the next tokens, and the cache ``[2 S C H]``. The tokens are the
    last T of the M slots after ``length`` that the mask ``block [T M]`` is about.
    """
    embedded = rms_norm(embedding[tokens], head["midlayer.input_layernorm.weight"], config.eps)
    normed = rms_norm(stream, head["midlayer.hidden_norm.weight"], config.eps)
    slot = length + block.shape[1] - block.shape[0]
    mask = cache_mask(length, block, cache.shape[1])
    x = jnp.concatenate([embedded, normed], axis=-1)
    head_config = config._replace(theta=config.head_theta)
    return layer(head, "midlayer", head_config, x, stream, positions, cache, slot, mask)


def head_logits(head, config, output):
    """Returns logits ``[T W]`` over the draft vocabulary."""
    normed = rms_norm(output, head["norm.weight"], config.eps)
    return normed @ head["lm_head.weight"].T


# ----------------------------------------------------------------------------------------- sampling


def uniforms(seed, position, purpose, count):
    """Returns random numbers in [0, 1) that depend on the position in the text, not on rounds."""
    key = jax.random.fold_in(jax.random.key(seed), 0)  # row 0 of a batch
    key = jax.random.fold_in(key, position)
    key = jax.random.fold_in(key, purpose)
    bits = jax.random.bits(key, (count,), jnp.uint32)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def num_digits(size):
    """Returns how many random numbers one draw takes: the digits of a token id in base 64."""
    if size <= 64:
        return 1
    num_groups = -(-size // 64)
    return 1 + num_digits(num_groups)


def draw(p, dice):
    """Samples a token from ``p [V]``: first its group of 64 tokens, then the token in the group.

    Sums of at most 64 numbers lose no mass to rounding.
    """
    if p.shape[0] <= 64:
        cumulative = jnp.where(p > 0, jnp.cumsum(p), 0.0)
        threshold = dice[-1] * jnp.max(cumulative)
        return jnp.argmax(cumulative > threshold)
    padded = jnp.pad(p, (0, -p.shape[0] % 64))
    groups = padded.reshape(-1, 64)
    group = draw(groups.sum(axis=1), dice[:-1])
    return 64 * group + draw(groups[group], dice[-1:])


def distribution(logits, temperature):
    """Returns ``softmax(logits / temperature)``; at 0 a point mass on the most likely token."""
    if temperature == 0:
        likeliest = jnp.argmax(logits, axis=-1)
        return jax.nn.one_hot(likeliest, logits.shape[-1])
    return jax.nn.softmax(logits / temperature, axis=-1)


# ---------------------------------------------------------------------------------- propose, verify


class Draft(NamedTuple):
    """A tree of N nodes; node 0, the root, is the newest token of the text."""

    tokens: jax.Array  # [N]
    parents: jax.Array  # [N], -1 at the root
    q: (
        jax.Array | None
    )  # [N V], the distribution that each node was sampled from; None: not sampled


class Shape(NamedTuple):
    """A chain of ``depth`` tokens; with ``k`` a tree of ``num_nodes``; plain at depth 0."""

    depth: int
    num_nodes: int = 0
    k: int = 0


def draft_chain(run, output, logits, shape, to_target, vocab_size, root, temperature, dice):
    """Drafts K tokens one after the other: the likeliest, or samples of the head's distribution.

    Args:
        run: Runs the head on one level: tokens, their stream, depth and mask to outputs and logits.
        output: ``[1 D]``, the head's output at the root; ``logits [1 W]`` follow from it.
        shape: The length of the chain.
        to_target: ``[W]``, target ids of draft ids. The head knows only the most frequent tokens.
        vocab_size: V.
        root: The newest token of the text.
        temperature: Temperature of the samples; 0 drafts the most likely tokens.
        dice: ``[K U]``, random numbers.
    """
    nowhere = jnp.zeros((vocab_size,))
    tokens = [root]
    q = [nowhere]
    for depth in range(shape.depth):
        q_of_head = distribution(logits, temperature)[0]
        token = to_target[draw(q_of_head, dice[depth])]
        tokens.append(token)
        q.append(nowhere.at[to_target].add(q_of_head))
        is_last = depth + 1 == shape.depth
        if not is_last:
            mask = jnp.ones((1, depth + 1), bool)
            output, logits = run(token[None], output, depth, mask)
    parents = jnp.arange(-1, shape.depth)
    return Draft(jnp.stack(tokens), parents, jnp.stack(q))


def draft_tree(run, output, logits, shape, to_target, root):
    """EAGLE-2: expands the k likeliest nodes of a level, keeps the ``num_nodes - 1`` likeliest."""
    k = shape.k

    def top(logits):
        """The k most likely children: log-probabilities and tokens."""
        best, ids = lax.top_k(logits, k)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return best - total, to_target[ids]

    logprobs, tokens = top(logits[0])
    scores = logprobs
    nodes = jnp.arange(k)
    itself = jnp.eye(k, dtype=bool)
    all_scores = [scores]
    all_tokens = [tokens]
    all_parents = [jnp.full((k,), -1)]
    output = jnp.repeat(output, k, axis=0)
    mask = itself
    for depth in range(shape.depth - 1):
        output, logits = run(tokens, output, depth, mask)
        logprobs, children = top(logits)  # [k k]: the children of each expanded node
        children = children.reshape(-1)
        child_scores = (scores[:, None] + logprobs).reshape(-1)
        all_scores.append(child_scores)
        all_tokens.append(children)
        all_parents.append(jnp.repeat(nodes, k))
        scores, best = lax.top_k(child_scores, k)
        expanded = best // k
        tokens = children[best]
        nodes = k + depth * k**2 + best
        output = output[expanded]
        mask = jnp.concatenate([mask[expanded], itself], axis=1)

    # A parent is at least as likely as its child and has a lower number, so every chosen node's
    # ancestors are chosen.
    _, chosen = lax.top_k(jnp.concatenate(all_scores), shape.num_nodes - 1)
    chosen = jnp.sort(chosen)
    chosen_parents = jnp.concatenate(all_parents)[chosen]
    rank = jnp.searchsorted(chosen, chosen_parents)
    parents = jnp.where(chosen_parents < 0, 0, 1 + rank)
    chosen_tokens = jnp.concatenate(all_tokens)[chosen]
    tokens = jnp.concatenate([root[None], chosen_tokens])
    parents = jnp.concatenate([jnp.array([-1]), parents])
    return Draft(tokens, parents, None)


def ancestors(parents, depth):
    """Returns the mask ``[N N]`` with which each node attends to itself and its ancestors."""
    nodes = jnp.arange(len(parents))
    mask = jnp.eye(len(parents), dtype=bool)
    ancestor = parents
    for _ in range(depth):
        mask = mask | (ancestor[:, None] == nodes)
        ancestor = jnp.where(ancestor < 0, -1, parents[ancestor])
    return mask


def verify(draft, p, accept, choose, depth):
    """Accepts a path; the tokens are distributed as if the target had sampled them one by one.

    A child x of the current node is accepted with probability ``min(1, p(x) / q(x))``. A rejection
    replaces p by the normalized ``max(p - q, 0)``, for its siblings and for the token that is
    sampled when no child is left.

    Returns:
        The root and the accepted nodes (``[depth + 1]``, padded), how many are accepted, and the
        next token.
    """

    def visit(node, walk):
        current, p_here, path, count = walk
        token = draft.tokens[node]
        point_mass = jax.nn.one_hot(token, p.shape[1])
        q = point_mass if draft.q is None else draft.q[node]
        is_child = draft.parents[node] == current
        taken = is_child & (accept[node] * q[token] < p_here[token])

        residual = jnp.maximum(p_here - q, 0)
        mass = residual.sum()
        normalized = residual / jnp.maximum(mass, 1e-30)
        p_rejected = jnp.where(mass > 0, normalized, p_here)

        p_here = jnp.where(is_child, p_rejected, p_here)
        p_here = jnp.where(taken, p[node], p_here)
        longer_path = path.at[count + 1].set(node, mode="drop")
        path = jnp.where(taken, longer_path, path)
        current = jnp.where(taken, node, current)
        return current, p_here, path, count + taken

    root_only = jnp.zeros((depth + 1,), jnp.int32)
    start = (0, p[0], root_only, 0)
    _, p_last, path, count = lax.fori_loop(1, len(draft.tokens), visit, start)
    return path, count, draw(p_last, choose)


# ----------------------------------------------------------------------------------------- the loop


class State(NamedTuple):
    """The state between rounds. The caches hold all tokens except the newest, which was not run."""

    text: jax.Array  # [S]
    length: jax.Array
    cache: jax.Array  # [L 2 S C H], the target's
    head_cache: jax.Array  # [2 S C H]
    # [1 D], the head's output at the newest token, from which the first draft token follows.
    output: jax.Array
    stopped: jax.Array
    rounds: jax.Array
    accepted: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "shape", "max_new_tokens", "temperature"))
def generate(w, head, prompt, seed, *, config, shape, max_new_tokens, temperature=0.0):
    """Generates in one program. Returns the final state; ``text[:length]`` is prompt and output."""
    prompt_length = len(prompt)
    vocab_size = w["lm_head.weight"].shape[0]
    limit = prompt_length + max_new_tokens
    capacity = limit + max(shape.num_nodes, shape.depth + 1, shape.k * shape.depth)
    kv_shape = (2, capacity, config.num_kv_heads, config.head_dim)
    embedding = w["model.embed_tokens.weight"]
    to_target = jnp.arange(len(head["d2t"])) + head["d2t"]

    def observe(tokens, features, cache, length, newest):
        """Runs the head on committed tokens: the pairs (feature of t, token t + 1), known now."""
        count = len(tokens)
        causal = jnp.tril(jnp.ones((count, count), bool))
        positions = length + jnp.arange(count)
        fused = features @ head["fc.weight"].T
        output, cache = run_head(
            head, embedding, config, tokens, fused, positions, cache, length, causal
        )
        return output[newest][None], cache

    def propose(state):
        """Drafts a chain or a tree with the head."""
        root = state.text[state.length - 1]
        length = state.length - 1
        if shape.depth == 0:
            return Draft(root[None], jnp.array([-1]), None)
        caches = [state.head_cache]  # the last one has the guesses; it is not kept after the round

        def run(tokens, output, depth, mask):
            positions = jnp.full(tokens.shape, length + depth)
            output, cache = run_head(
                head, embedding, config, tokens, output, positions, caches[-1], length, mask
            )
            caches.append(cache)
            return output, head_logits(head, config, output)

        logits = head_logits(head, config, state.output)
        if shape.k:
            return draft_tree(run, state.output, logits, shape, to_target, root)
        digits = num_digits(logits.shape[1])
        dice = uniforms(seed, state.length, 0, shape.depth * digits)
        dice = dice.reshape(shape.depth, digits)
        return draft_chain(
            run, state.output, logits, shape, to_target, vocab_size, root, temperature, dice
        )

    def one_round(state):
        """Proposes, verifies, commits, observes."""
        draft = propose(state)
        length = state.length - 1
        num_nodes = len(draft.tokens)
        mask = ancestors(draft.parents, shape.depth)
        level = mask.sum(axis=1) - 1
        logits, features, cache = run_target(
            w, config, draft.tokens, length + level, state.cache, length, mask
        )
        p = distribution(logits, temperature)
        dice = uniforms(seed, state.length, 1, num_nodes + num_digits(vocab_size))
        nodes, count, token = verify(draft, p, dice[:num_nodes], dice[num_nodes:], shape.depth)

        # Commit: the accepted nodes' keys and values move next to the committed ones. Later slots
        # are ignored.
        accepted = cache[:, :, length + nodes]
        cache = lax.dynamic_update_slice(cache, accepted, (0, 0, length, 0, 0))
        emitted = jnp.roll(draft.tokens[nodes], -1)
        emitted = emitted.at[count].set(token)
        output, head_cache = observe(emitted, features[nodes], state.head_cache, length, count)

        # The text ends at a stop token or at the limit.
        index = jnp.arange(len(emitted))
        is_stop = (emitted == config.stop) & (index <= count)
        room = jnp.minimum(count + 1, limit - state.length)
        until_stop = jnp.minimum(jnp.argmax(is_stop) + 1, room)
        num_new = jnp.where(is_stop.any(), until_stop, room)
        is_new = index < num_new
        slots = jnp.where(is_new, state.length + index, capacity)
        new_length = state.length + num_new
        return State(
            text=state.text.at[slots].set(emitted, mode="drop"),
            length=new_length,
            cache=cache,
            head_cache=head_cache,
            output=output,
            stopped=(is_stop & is_new).any() | (new_length >= limit),
            rounds=state.rounds + 1,
            accepted=state.accepted + count,
        )

    # Prefill: the prompt through the target, the first token, and both to the head.
    causal = jnp.tril(jnp.ones((prompt_length, prompt_length), bool))
    empty_cache = jnp.zeros((config.num_layers, *kv_shape))
    positions = jnp.arange(prompt_length)
    logits, features, cache = run_target(w, config, prompt, positions, empty_cache, 0, causal)
    p = distribution(logits[-1:], temperature)[0]
    first = draw(p, uniforms(seed, prompt_length, 1, num_digits(vocab_size)))
    text = jnp.zeros((capacity,), jnp.int32)
    text = text.at[:prompt_length].set(prompt)
    text = text.at[prompt_length].set(first)
    next_tokens = text[1 : prompt_length + 1]
    output, head_cache = observe(next_tokens, features, jnp.zeros(kv_shape), 0, prompt_length - 1)
    state = State(
        text=text,
        length=jnp.int32(prompt_length + 1),
        cache=cache,
        head_cache=head_cache,
        output=output,
        stopped=(first == config.stop) | (max_new_tokens == 1),
        rounds=jnp.int32(0),
        accepted=jnp.int32(0),
    )
    return lax.while_loop(lambda state: ~state.stopped, one_round, state)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompt", default="def read_config(filename, encoding=None):\n", help="Text to continue."
    )
    parser.add_argument("--chain", type=int, default=3, help="Length of the draft.")
    parser.add_argument(
        "--tree", type=int, nargs=3, metavar=("NODES", "LEVELS", "CHILDREN"), help="Draft a tree."
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--target", type=Path, default=SHIPPED / "target", help="Directory of a Llama in one file."
    )
    parser.add_argument(
        "--head", type=Path, default=SHIPPED / "eagle3", help="Directory of its EAGLE-3 head."
    )
    options = parser.parse_args()
    w, config = load(options.target)
    head, head_config = load(options.head)
    config = config._replace(head_theta=head_config.theta)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    prompt = jnp.array(tokenizer.encode(options.prompt).ids)
    shape = Shape(options.chain)
    if options.tree:
        num_nodes, depth, k = options.tree
        shape = Shape(depth, num_nodes, k)
    for name, draft_shape in (("plain", Shape(0)), ("EAGLE-3", shape)):
        run = functools.partial(
            generate,
            w,
            head,
            prompt,
            options.seed,
            config=config,
            shape=draft_shape,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )
        jax.block_until_ready(run())  # compiles
        start = time.perf_counter()
        state = jax.block_until_ready(run())
        seconds = time.perf_counter() - start
        length = int(state.length)
        num_new = length - len(prompt)
        print(tokenizer.decode(state.text[:length].tolist()))
        rounds = int(state.rounds)
        speed = num_new / seconds
        print(f"[{name}: {num_new} tokens in {rounds} rounds, {speed:.0f} tokens/s]\n")


if __name__ == "__main__":
    main()
