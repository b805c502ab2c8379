"""Forms of the sum over chosen experts against each other, on the device at hand (docs/decisions/0018).

    python examples/experts.py                                     # 64 experts of 1024 x 512, 8 per token
    python examples/experts.py --experts 128 --width 2048 --inner 768 --precisions bfloat16   # a layer of Qwen3-30B-A3B

Prints a row for each precision and number of tokens: the median of the first form in milliseconds, and the median of
each other form's time divided by the first one's of the same repetition.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.models.config import Experts
from eagle3_jax.models.layers import PRECISIONS, Precision, matmul_precision
from eagle3_jax.models.mixture import Stack, in_runs, mixture, of_all, of_chosen, one_by_one
from eagle3_jax.models.routers import Routing


def ragged(x: jax.Array, routing: Routing, stack: Stack, *, config: Experts, precision: Precision) -> jax.Array:
    """Pairs of token and expert sorted by expert, and JAX's product of such runs."""
    flat, per_token = routing.chosen.reshape(-1), routing.chosen.shape[1]
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
    product = functools.partial(
        lax.ragged_dot,
        group_sizes=sizes,
        preferred_element_type=precision.activations,
        precision=matmul_precision(precision.operands),
    )
    both = product(x[order // per_token].astype(precision.operands), stack.gate_up).reshape(len(flat), -1, 2)
    out = product((jax.nn.silu(both[..., 0]) * both[..., 1]).astype(precision.operands), stack.down)
    out = out[jnp.argsort(order)].reshape(*routing.chosen.shape, -1).astype(jnp.float32)
    return jnp.sum(out * routing.weights[..., None], axis=1).astype(precision.activations)


def forms(tokens: int, config: Experts, precision: Precision) -> dict[str, Callable[..., jax.Array]]:
    """What is compared; first what the library takes here."""
    given: dict[str, Any] = {"config": config, "precision": precision}
    found: dict[str, Any] = {"mixture": lambda *args: mixture(*args, config, precision)}
    found["one by one"] = functools.partial(one_by_one, **given)
    found["in runs"] = functools.partial(in_runs, rows=min(8, tokens), skip=True, **given)
    found["in runs, no branch"] = functools.partial(in_runs, rows=min(8, tokens), skip=False, **given)
    found["of all"] = functools.partial(of_all, **given)
    if tokens * config.per_token <= config.num_experts:
        found["of chosen"] = functools.partial(of_chosen, **given)
    found["ragged_dot"] = functools.partial(ragged, **given)
    return found


def measured(tokens: int, config: Experts, width: int, precision: Precision, repeats: int) -> dict[str, float]:
    """Milliseconds of the first form, ratios of the others."""
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), 2)
    stack = Stack(
        (jax.random.normal(keys[0], (config.num_experts, width, 2 * config.width)) / width**0.5).astype(
            precision.operands
        ),
        (jax.random.normal(keys[1], (config.num_experts, config.width, width)) / config.width**0.5).astype(
            precision.operands
        ),
        None,
        None,
    )
    chosen = np.sort(np.stack([rng.permutation(config.num_experts)[: config.per_token] for _ in range(tokens)]), axis=1)
    routing = Routing(jnp.asarray(chosen), jnp.asarray(rng.random(chosen.shape), jnp.float32))
    x = jnp.asarray(rng.normal(size=(tokens, width)), precision.activations)
    compiled = {name: jax.jit(form) for name, form in forms(tokens, config, precision).items()}
    outputs = {name: np.asarray(form(x, routing, stack), np.float32) for name, form in compiled.items()}
    first = outputs["mixture"]
    for name, one in outputs.items():
        assert np.abs(one - first).max() <= 0.05 * np.abs(first).max(), f"{name} is not the same sum"
    took: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repeats):
        for name, form in compiled.items():
            jax.block_until_ready(form(x, routing, stack))  # what ran before leaves caches and memory as it needed them
            begun = time.perf_counter()
            jax.block_until_ready(form(x, routing, stack))
            took[name].append(1e3 * (time.perf_counter() - begun))
    base = np.asarray(took.pop("mixture"))
    return {"mixture": float(np.median(base))} | {
        name: float(np.median(np.asarray(one) / base)) for name, one in took.items()
    }


def main() -> None:
    """Print a row for each precision and number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("experts", 64), ("per-token", 8), ("width", 1024), ("inner", 512), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 60])
    parser.add_argument("--precisions", nargs="+", default=["float32", "mixed", "bfloat16"], choices=PRECISIONS)
    options = parser.parse_args()
    config = Experts(num_experts=options.experts, per_token=options.per_token, width=options.inner, router="softmax")
    for name in options.precisions:
        for tokens in options.tokens:
            found = measured(tokens, config, options.width, PRECISIONS[name], options.repeats)
            first = found.pop("mixture")
            rest = ", ".join(f"{form} {ratio:.2f}" for form, ratio in found.items())
            print(f"{name:9} {tokens:3} tokens: {first:8.1f} ms; {rest}", flush=True)


if __name__ == "__main__":
    main()
