"""The engine's rollouts are those of Tunix's own engine, and of the policy as it is now."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
import tiny
from flax import nnx
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix_models import END, MODELS, PAD, VOCABULARY, Letters, cache_config, policy, random_state

import eagle3_jax as e3
from eagle3_jax import LoadedTarget
from eagle3_jax.drafters import NGram
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.topology import Chain
from eagle3_jax.training.refresh import RefreshConfig
from eagle3_jax.tree import causal_mask
from eagle3_jax.tunix import SpeculativeRollout
from eagle3_jax.tunix.policies import flat, table_of

PROMPTS = ["hello", "hello", "a longer one", "x"]
GREEDY = RolloutConfig(
    max_tokens_to_generate=16,
    max_prompt_length=16,
    temperature=0.0,
    top_p=None,
    return_logprobs=True,
)
SAMPLED = RolloutConfig(
    max_tokens_to_generate=16, max_prompt_length=16, temperature=0.8, top_k=6, return_logprobs=True
)
PROVEN = ("Llama 3", "Qwen 3", "Gemma 3")


def engine_of(model: Any, **options: Any) -> SpeculativeRollout:
    length = {} if options.get("drafter") == "none" else {"num_speculative_tokens": 3}
    return SpeculativeRollout(model, Letters(), **length, **options)


def head(target: LoadedTarget) -> e3.LoadedDrafter:
    """Returns a random EAGLE-3 head that borrows the policy's embedding."""
    return tiny.eagle3(target, Chain(3))


def vanilla(model: Any) -> VanillaRollout:
    return VanillaRollout(model, Letters(), cache_config(model, 64))


def padded(output: RolloutOutput) -> tuple[jax.Array, jax.Array]:
    """Returns prompts and completions as Tunix's learners do."""
    completions = np.full((len(output.tokens), 16), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_and_its_translation_have_the_same_logits_and_parameters(name: str) -> None:
    model = policy(name)
    table = table_of(model)
    arrays = flat(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    table.check(list(arrays))
    ours = table.to_ours(arrays)

    back = table.to_theirs(ours)
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[path], array) for path, array in arrays.items())

    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, VOCABULARY)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
    mask = jnp.broadcast_to(causal_mask(12), (2, 12, 12))
    expected, _ = model(tokens, positions, None, mask)
    target = DecoderTarget(table.config)
    logits = target.unembed(ours, target(ours, tokens, positions, causal_mask(12)).final)
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("name", PROVEN)
def test_greedy_rollouts_are_those_of_the_vanilla_engine(name: str) -> None:
    """Token by token, and with its log-probabilities; it cuts the end token off."""
    model = policy(name)
    expected = vanilla(model).generate(PROMPTS, GREEDY)
    engine = engine_of(model, drafter="ngram" if name != "Qwen 3" else head, keep_end=False)
    output = engine.generate(PROMPTS, GREEDY)

    assert not any(PAD in tokens for tokens in expected.tokens)
    assert [tokens.tolist() for tokens in output.tokens] == [
        tokens.tolist() for tokens in expected.tokens
    ]
    assert output.text == expected.text
    np.testing.assert_array_equal(
        output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
    )
    assert engine.stats.num_draft_tokens > 0

    # The vanilla engine reports those of the model for greedy rows too.
    for answer, tokens, scores in zip(
        engine.last, output.tokens, expected.logprobs or [], strict=True
    ):
        recorded = [token.logprob for token in answer.logprobs or []][: len(tokens)]
        assert recorded == pytest.approx(scores, abs=1e-5)


def test_log_probabilities_are_those_of_the_trainer() -> None:
    model = policy("Qwen 3")
    engine = engine_of(model)
    prompts, completions = padded(engine.generate(PROMPTS, SAMPLED))
    scores = np.asarray(engine.get_per_token_logps(prompts, completions))

    graphdef, state = nnx.split(model)
    trainers = common.compute_per_token_logps(
        graphdef, state, prompts, completions, pad_id=PAD, eos_id=END
    )
    np.testing.assert_allclose(scores, trainers, atol=1e-6)
    for row, answer in zip(scores, engine.last, strict=True):
        recorded = [token.logprob for token in answer.logprobs or []]
        assert recorded == pytest.approx(row[: len(recorded)].tolist(), abs=1e-5)


def test_an_answer_keeps_the_token_that_ended_it() -> None:
    """A policy learns to end only from answers that have it."""
    engine = engine_of(policy("Llama 3"))
    config = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=3.0)
    output = engine.generate(["x"] * 32, config)
    ended = [tokens for tokens in output.tokens if END in tokens]
    assert ended
    assert all(tokens.tolist().index(END) == len(tokens) - 1 for tokens in ended)
    assert not any(str(END) in text.split() for text in output.text)


def test_calls_have_other_samples_and_a_seed_repeats_them() -> None:
    engine = engine_of(policy("Llama 3"))
    seeded = RolloutConfig(
        max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0, seed=jax.random.key(3)
    )
    config = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0)

    def texts(config: RolloutConfig) -> list[str]:
        return engine.generate(["x"] * 4, config).text

    assert len({tuple(texts(config)) for _ in range(3)}) == 3
    first = texts(seeded)
    assert texts(seeded) == first
    assert len(set(first)) == 4


# A policy that changes

DRAFTERS = {"n-grams": "ngram", "a head": head, "no draft": "none"}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("way", ["update_params", "in place"])
def test_nothing_of_the_old_policy_is_left(name: str, way: str) -> None:
    """Texts, and with a head also what is accepted, are those of an engine of the new policy."""
    model = policy("Llama 3")
    engine = engine_of(model, drafter=DRAFTERS[name])
    engine.generate(PROMPTS, GREEDY)
    state = random_state(model, seed=7)
    if way == "update_params":
        engine.update_params(state, (nnx.Param,))
    else:
        nnx.update(model, state)
    output = engine.generate(PROMPTS, GREEDY)

    fresh = engine_of(policy("Llama 3", seed=7), drafter=DRAFTERS[name])
    expected = fresh.generate(PROMPTS, GREEDY)
    assert output.text == expected.text
    assert engine.stats == fresh.stats
    assert engine.num_updates == 1
    engine.generate(PROMPTS, GREEDY)
    assert engine.num_updates == 1


def test_a_head_is_refreshed_between_steps_of_the_policy() -> None:
    model = policy("Llama 3")
    refresh = RefreshConfig(every=2, rows=4, length=32, depth=1)
    engine = engine_of(model, drafter=head, refresh=refresh)
    engine.generate(PROMPTS, SAMPLED)
    first = engine.decoder.params.drafter["head"]
    heads = []
    # Its learning rate begins with zero, so the first step of the head shows nothing.
    for seed in range(4):
        engine.update_params(random_state(model, seed=seed))
        engine.generate(PROMPTS, SAMPLED)
        heads.append(engine.decoder.params.drafter["head"])

    def are_equal(a: Any, b: Any) -> bool:
        return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))

    assert all(are_equal(new, first) for new in heads[:3])
    assert not are_equal(heads[3], first)


def with_lora(model: Any) -> Any:
    provider = qwix.LoraProvider(
        module_path=".*q_proj|.*o_proj|.*kv_einsum|.*q_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj",
        rank=2,
        alpha=8.0,
    )
    tokens = jnp.ones((1, 4), jnp.int32)
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    mask = causal_mask(4)
    adapted = qwix.apply_lora_to_model(
        model, provider, tokens, positions, None, mask, rngs=nnx.Rngs(0)
    )
    updates = nnx.state(adapted, nnx.LoRAParam)
    noise = [
        0.3 * jax.random.normal(jax.random.key(index), leaf.shape)
        for index, leaf in enumerate(jax.tree.leaves(updates))
    ]
    nnx.update(adapted, jax.tree.unflatten(jax.tree.structure(updates), noise))
    return adapted


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 3"])
def test_low_rank_updates_are_merged(name: str) -> None:
    """The engine compares its forward with the policy's, so another scale is refused."""
    plain = engine_of(policy(name)).generate(PROMPTS, GREEDY)
    model = with_lora(policy(name))
    expected = vanilla(model).generate(PROMPTS, GREEDY)
    engine = engine_of(model, lora_alpha=8.0, keep_end=False)
    assert engine.generate(PROMPTS, GREEDY).text == expected.text != plain.text

    updates = jax.tree.map(lambda leaf: leaf * 0.5, nnx.state(model, nnx.LoRAParam))
    engine.update_params(updates, (nnx.LoRAParam,))
    expected = vanilla(model).generate(PROMPTS, GREEDY)
    assert engine.generate(PROMPTS, GREEDY).text == expected.text

    with pytest.raises(ValueError, match=r"differ by .* is lora_alpha theirs"):
        engine_of(model, lora_alpha=4.0)
    with pytest.raises(ValueError, match="has low-rank updates; give SpeculativeRollout their"):
        engine_of(model)


def test_tunixs_learner_trains_with_it() -> None:
    """Its GRPO runs on one device, and the engine decodes with every new policy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    engines: list[SpeculativeRollout] = []

    class Noted(SpeculativeRollout):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            engines.append(self)

    config = rl_cluster.ClusterConfig(
        role_to_mesh={
            role: mesh
            for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
        },
        rollout_engine=functools.partial(Noted, drafter=NGram(3)),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.sgd(1e-2), eval_every_n_steps=100, max_steps=3
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=8, temperature=1.0
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=policy("Qwen 3"),
        reference=policy("Qwen 3"),
        tokenizer=Letters(),
        cluster_config=config,
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=2, beta=0.04),
        reward_fns=lambda prompts, completions, **_: [
            float(len(set(c.split()))) for c in completions
        ],
    )
    before = nnx.state(policy("Qwen 3"), nnx.Param)
    learner.train([{"prompts": np.array(["hello", "x"])} for _ in range(3)])

    (engine,) = engines
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    moved = [
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(before), strict=True)
    ]
    assert max(moved) > 0
    assert engine.num_updates >= 1
    # What it would decode with now is the trained policy.
    output = engine.generate(PROMPTS, GREEDY)
    fresh = SpeculativeRollout(cluster.actor_trainer.model, Letters(), drafter="none")
    assert output.text == fresh.generate(PROMPTS, GREEDY).text


# Bad input


def test_a_parameter_that_is_not_finite_is_named() -> None:
    model = policy("Llama 3")
    engine = engine_of(model)
    state = random_state(model, seed=1)
    weight = state["layers"][1]["attn"]["k_proj"]["w"]
    weight[...] = weight[...].at[0, 0, 0].set(jnp.nan)
    engine.update_params(state)
    with pytest.raises(ValueError, match=r"parameter layers\.1\.attn\.k_proj\.w .*not finite"):
        engine.generate(PROMPTS, GREEDY)


def test_a_prompt_longer_than_the_row_is_refused() -> None:
    engine = engine_of(policy("Llama 3"))
    with pytest.raises(ValueError, match="prompt 1 has 21 tokens; max_prompt_length is 16, so"):
        engine.generate(["x", "y" * 20], GREEDY)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}, "the policy is a flax.* expected a model"),
        (
            lambda: MODELS["Qwen 3"](num_experts=4, num_experts_per_tok=2),
            {},
            "the policy has 4 experts",
        ),
        (
            lambda: policy("Llama 3"),
            {"rollout_config": RolloutConfig(data_type=jnp.float16)},
            "the rollouts are to be in float16; expected float32 or bfloat16",
        ),
        (
            lambda: policy("Llama 3"),
            {"drafter": "none", "refresh": RefreshConfig()},
            "no parameters",
        ),
    ],
)
def test_what_the_engine_cannot_run_is_refused(model: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeRollout(model(), Letters(), **options)


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_tokenizer_without_a_needed_token_is_refused(name: str) -> None:
    tokenizer = Letters()
    setattr(tokenizer, f"{name}_id", lambda: None)
    with pytest.raises(ValueError, match=f"the tokenizer has no {name} token; expected one"):
        SpeculativeRollout(policy("Llama 3"), tokenizer)


# A mesh

ON_A_MESH = """
import jax, numpy as np
import sys
sys.path[:0] = ["tests/helpers", "."]
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_models import Letters, policy
from eagle3_jax.tunix import SpeculativeRollout

devices = np.array(jax.devices()).reshape(2, 2)
mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
config = RolloutConfig(max_tokens_to_generate=12, max_prompt_length=16, temperature=0.0)
texts = []
for where in (None, mesh):
    engine = SpeculativeRollout(policy("Llama 3"), Letters(), where)
    texts.append(engine.generate(["hello", "hello", "x"], config).text)
kernel = engine.decoder.params.target["blocks"][0]["mlp"]["gate_up"]["kernel"]
assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model"), kernel.sharding
assert texts[0] == texts[1], texts
for shape, axes, message in (
    ((1, 4), ("fsdp", "tp"), "key/value heads"),
    ((1, 2, 2), ("a", "b", "c"), "the mesh has the axes a, b, c of (1, 2, 2); expected at most two"),
):
    try:
        SpeculativeRollout(policy("Llama 3"), Letters(), jax.sharding.Mesh(devices.reshape(shape), axes))
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{shape} was not refused")
"""


def test_it_runs_on_tunixs_mesh() -> None:
    """Rows over its first axis, the model over its second; an odd number of prompts fits too."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run(
        [sys.executable, "-c", ON_A_MESH], check=True, env={**os.environ, **flags}, timeout=300
    )
