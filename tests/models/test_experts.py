"""Experts against a sum in float64, in every form and precision, and the choices of routers.

`test_families.py` compares every family's experts with transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import expit
from tiny import draw

from eagle3_jax.models import mixture
from eagle3_jax.models.config import Experts
from eagle3_jax.models.experts import ExpertMLP
from eagle3_jax.models.functional import init_params
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision, cast
from eagle3_jax.models.mixture import Stack
from eagle3_jax.models.routers import Routing, route, router_logits

WIDTH = 16
COUNT = 8
INNER = 6
BUILD = functools.partial(ExpertMLP, WIDTH)
SOFTMAX = Experts(num_experts=COUNT, per_token=3, width=INNER, router="softmax")
SIGMOID = Experts(num_experts=COUNT, per_token=3, width=INNER, router="sigmoid", scaling=2.5)
CLAMPED = Experts(
    num_experts=COUNT,
    per_token=3,
    width=INNER,
    router="softmax-of-chosen",
    bias=True,
    limit=1.5,
    normalise=False,
)
AT_INPUT = Experts(num_experts=COUNT, per_token=1, width=INNER, router="sigmoid-of-input")


def written_out(x: np.ndarray, routing: Routing, stack: Stack, config: Experts) -> np.ndarray:
    """Returns the sum over the chosen experts in float64, one token after the other."""
    wide = lambda array: np.asarray(array, np.float64)
    out = np.zeros(x.shape)

    for token in range(len(x)):
        for expert, weight in zip(
            np.asarray(routing.chosen[token]), wide(routing.weights[token]), strict=True
        ):
            if not 0 <= expert < len(stack.gate_up):
                continue

            inputs = wide(x[token]) * (weight if config.router == "sigmoid-of-input" else 1)
            both = inputs @ wide(stack.gate_up[expert])
            both = both if stack.gate_up_bias is None else both + wide(stack.gate_up_bias[expert])

            gate = both[0::2]
            up = both[1::2]
            if config.limit is None:
                inner = gate * expit(gate) * up
            else:
                gate = np.minimum(gate, config.limit)
                up = np.clip(up, -config.limit, config.limit)
                inner = (up + 1) * gate * expit(1.702 * gate)

            y = inner @ wide(stack.down[expert])
            y = y if stack.down_bias is None else y + wide(stack.down_bias[expert])
            out[token] += y * (1 if config.router == "sigmoid-of-input" else weight)

    return out


def stack_of(config: Experts) -> Stack:
    biases = (draw(6, COUNT, 2 * INNER), draw(7, COUNT, WIDTH)) if config.bias else (None, None)
    arrays = (draw(4, COUNT, WIDTH, 2 * INNER) / 4, draw(5, COUNT, INNER, WIDTH) / 2, *biases)
    return Stack(*(array if array is None else jnp.asarray(array) for array in arrays))


FORMS = {
    "one by one": mixture.loop_over_experts,
    "runs of 1": functools.partial(mixture.loop_over_runs, rows=1, skip=True),
    "runs of 3": functools.partial(mixture.loop_over_runs, rows=3, skip=True),
    "runs of 3, all": functools.partial(mixture.loop_over_runs, rows=3, skip=False),
    "runs of all": functools.partial(mixture.loop_over_runs, rows=11, skip=True),
    "of all": mixture.run_all,
    "of chosen": mixture.gather_chosen,
}


def routings() -> dict[str, Routing]:
    """Returns usual and unusual choices of experts for 11 tokens."""
    rng = np.random.default_rng(8)
    sampled = np.sort(np.stack([rng.choice(COUNT, 3, replace=False) for _ in range(11)]), axis=1)

    choices = {
        "sampled": sampled,
        "one expert for all": np.full((11, 1), 5),
        "all experts": np.broadcast_to(np.arange(COUNT), (11, COUNT)),
        "some are elsewhere": sampled * 2 - 3,
        "all are elsewhere": np.full((11, 2), -1),
    }

    return {
        name: Routing(jnp.asarray(experts), jnp.asarray(rng.random(experts.shape), jnp.float32))
        for name, experts in choices.items()
    }


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "config",
    [SOFTMAX, CLAMPED, dataclasses.replace(AT_INPUT, bias=True)],
    ids=lambda config: config.router,
)
def test_every_form_is_the_sum_written_out(
    form: str, config: Experts, precision: Precision
) -> None:
    x, stack = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, precision.operands), (draw(9, 11, WIDTH), stack_of(config))
    )

    run = jax.jit(functools.partial(FORMS[form], config=config, precision=precision))
    for name, routing in routings().items():
        actual = run(x, routing, stack)
        expected = written_out(x, routing, stack, config)
        atol = 1e-5 if precision is FLOAT32 else 0.02 * np.abs(expected).max()
        assert actual.dtype == precision.activations
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), expected, atol=atol, err_msg=name
        )


def test_few_and_many_tokens_take_other_forms_and_get_the_same() -> None:
    """Accelerators take a form by the number of tokens: two choose at most six of eight experts."""
    config = SOFTMAX
    stack = stack_of(SOFTMAX)

    for tokens, form in ((2, mixture.gather_chosen), (3, mixture.run_all), (200, None)):
        x = draw(10, tokens, WIDTH)
        chosen = np.sort(np.argsort(draw(11, tokens, COUNT), axis=1)[:, :3], axis=1)
        routing = Routing(jnp.asarray(chosen), jnp.asarray(np.abs(draw(12, tokens, 3))))

        compiled = jax.jit(mixture.mixture, static_argnums=(3, 4))
        traced = compiled.trace(jnp.asarray(x), routing, stack, config, FLOAT32)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()

        assert ("while" in text) == (form is None)
        assert ("dynamic_slice" in text) == (form is None)
        assert (text.count("dot_general") == 0) == (form is mixture.gather_chosen)

        expected = written_out(x, routing, stack, config)
        actual = compiled(jnp.asarray(x), routing, stack, config, FLOAT32)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "softmax-of-chosen", "sigmoid-of-input"])
def test_of_equals_the_first_are_chosen(router: Any) -> None:
    config = Experts(num_experts=COUNT, per_token=3, width=INNER, router=router)
    logits = jnp.asarray([[1.0, 2.0, 1.0, 1.0, 0.0, 1.0, 2.0, 1.0]])
    routing = route(logits, jnp.zeros(COUNT) if router == "sigmoid" else None, config)
    np.testing.assert_array_equal(routing.chosen, [[0, 1, 6]])


def test_all_of_the_experts_may_be_chosen() -> None:
    config = dataclasses.replace(SOFTMAX, per_token=COUNT)
    logits = draw(14, 4, COUNT)
    routing = route(jnp.asarray(logits), None, config)
    np.testing.assert_array_equal(routing.chosen, np.broadcast_to(np.arange(COUNT), (4, COUNT)))
    np.testing.assert_allclose(routing.weights, jax.nn.softmax(logits), atol=1e-6)
    unnormalised = route(jnp.asarray(logits), None, dataclasses.replace(SOFTMAX, normalise=False))
    np.testing.assert_allclose(
        unnormalised.weights,
        np.take_along_axis(routing.weights, unnormalised.chosen, axis=1),
        atol=1e-6,
    )


def test_an_unknown_router_is_refused() -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match="router is 'soft'; expected one of"):
        dataclasses.replace(SIGMOID, router="soft")  # type: ignore[arg-type]


def test_groups_that_are_not_kept_have_no_chance_however_low_the_others_are() -> None:
    """Every biased score is negative; a group counts with the sum of its two best scores."""
    config = dataclasses.replace(
        SIGMOID, groups=4, kept_groups=1, per_token=2, normalise=False, scaling=1.0
    )
    logits = jnp.asarray([[3.0, -9.0, 1.0, 1.0, -9.0, -9.0, -9.0, -9.0]])
    routing = route(logits, jnp.full(COUNT, -5.0), config)
    np.testing.assert_array_equal(routing.chosen, [[2, 3]])
    # With another k the rest of the group stays the only choice.
    config = dataclasses.replace(config, groups=2, per_token=4)
    np.testing.assert_array_equal(
        route(logits, jnp.full(COUNT, -5.0), config).chosen, [[0, 1, 2, 3]]
    )


def test_weights_of_nothing_but_zeros_are_zeros() -> None:
    routing = route(jnp.full((1, COUNT), -200.0), jnp.zeros(COUNT), SIGMOID)
    np.testing.assert_array_equal(routing.weights, np.zeros((1, 3)))


@pytest.mark.parametrize(
    "precision", [FLOAT32, MIXED, BFLOAT16], ids=lambda precision: precision.name
)
def test_a_token_chooses_the_same_alone_and_among_others(precision: Precision) -> None:
    """The choice is equal bit for bit, where sums of blocks differ in their last bits."""
    x = jnp.asarray(draw(15, 60, 2048)).astype(precision.activations)
    kernel = jnp.asarray(draw(16, 2048, 128))
    run = jax.jit(lambda x: router_logits(x, kernel, None, SOFTMAX, precision))
    together = np.asarray(run(x), np.float32)
    for size in (1, 2, 6, 16):
        rows = slice(7, 7 + size)
        fewer = np.asarray(run(x[rows]), np.float32)
        np.testing.assert_array_equal(fewer, together[rows])
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    exact = {"float32": 2e-6, "mixed": 2e-6, "bfloat16": 6e-3}[precision.name]
    np.testing.assert_allclose(together, expected, atol=exact * np.abs(expected).max())


def test_a_sigmoid_router_multiplies_in_float32_whatever_the_model_is() -> None:
    x = jnp.asarray(draw(17, 9, 64)).astype(jnp.bfloat16)
    kernel = jnp.asarray(draw(18, 64, COUNT))
    actual = router_logits(x, kernel, None, SIGMOID, BFLOAT16)
    assert actual.dtype == jnp.float32

    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(actual, expected, atol=1e-4)

    rounded = np.asarray(router_logits(x, kernel, None, SOFTMAX, BFLOAT16), np.float64)
    assert np.abs(rounded - expected).max() > 1e-3


def test_a_router_stays_float32_in_every_precision() -> None:
    config = dataclasses.replace(SIGMOID, shared_width=4)
    params = cast(init_params(BUILD, config, BFLOAT16, jax.random.key(0)), BFLOAT16)
    types = jax.tree.map(lambda leaf: leaf.dtype.name, params)
    assert types["router"] == {"kernel": "float32"}
    assert types["correction"] == "float32"
    assert {types["gate_up"], types["down"], types["shared"]["down"]["kernel"]} == {"bfloat16"}


def test_a_correction_chooses_and_does_not_weigh() -> None:
    config = dataclasses.replace(SIGMOID, per_token=1, normalise=False, scaling=1.0)
    logits = jnp.zeros((1, COUNT)).at[0, 2].set(3.0)
    correction = jnp.zeros(COUNT).at[6].set(9.0)
    routing = route(logits, correction, config)
    np.testing.assert_array_equal(routing.chosen, [[6]])
    np.testing.assert_allclose(routing.weights, [[0.5]])
