"""The loop is one program without the host, updates caches in place, and keeps rows independent."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import greedy_texts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, SpeculativeDecoder, padded_prompt
from eagle3_jax.drafters import Fallback, NGram, Plain
from eagle3_jax.loop import LoopParams, SpeculativeLoop
from eagle3_jax.sampling import row_keys
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling, FinishReason, SamplingMode, SamplingParams

pytestmark = pytest.mark.core

TARGET = tiny.target(13)
TREE = DynamicTree(num_nodes=12, max_depth=3, top_k=3)
PROMPTS = tiny.random_prompts(4, 13, seed=2, low=2)


def host_calls(jaxpr: Any) -> set[str]:
    """Returns the primitives that call the host, in a jaxpr and everything inside it."""
    primitives = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if "callback" in name or name in ("infeed", "outfeed", "debug_print"):
            primitives.add(name)

        values = list(equation.params.values())
        for inner in jax.tree.leaves(values, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                primitives |= host_calls(inner)

    return primitives


@dataclasses.dataclass(frozen=True)
class Chatty(NGram):
    """A drafter that calls the host in every round."""

    def propose(self, params: Any, state: Any, keys: Any, sampling: Any) -> Any:
        jax.debug.callback(lambda _: None, state.length)
        return NGram.propose(self, params, state, keys, sampling)


def program_of(drafter: LoadedDrafter) -> Any:
    loop, params = tiny.bind(TARGET, drafter)
    batch = tiny.prompts(PROMPTS, limit=8)
    return jax.make_jaxpr(lambda params, batch: loops.generate(loop, params, batch, capacity=40))(
        params, batch
    ).jaxpr


def test_a_generation_is_one_program_without_the_host() -> None:
    program = program_of(tiny.eagle3(TARGET, TREE))
    assert host_calls(program) == set()
    assert len(program.eqns) == 1, "the whole generation is one compiled call"
    assert "while" in str(program), "the rounds are inside it"


def test_a_call_to_the_host_would_be_seen() -> None:
    assert host_calls(program_of(LoadedDrafter(Chatty(3)))) != set()


def test_no_array_travels_to_the_host_while_a_generation_runs() -> None:
    loop, params = tiny.bind(TARGET, tiny.eagle3(TARGET, TREE))
    batch = tiny.prompts(PROMPTS, limit=8)
    loops.generate(loop, params, batch, capacity=40)  # compiled
    with jax.transfer_guard("disallow"):
        outcome = loops.generate(loop, params, batch, capacity=40)
    assert int(outcome.length.sum()) > 0


def test_prompts_of_one_bucket_share_one_program() -> None:
    decoder = SpeculativeDecoder(TARGET, tiny.eagle3(TARGET, Chain(2)))
    decoder.generate([1, 2, 3], max_new_tokens=5)
    programs = loops.generate._cache_size()
    decoder.generate([4, 5, 6, 7, 8, 9, 10], max_new_tokens=9)
    decoder.generate([4] * 16, max_new_tokens=3, seed=5)
    assert loops.generate._cache_size() == programs
    decoder.generate([4] * 17, max_new_tokens=3)
    assert loops.generate._cache_size() == programs + 1, (
        "the bucket after it is a new program: the count can tell"
    )


def test_short_prompts_are_padded_to_a_power_of_two_and_long_ones_to_whole_buckets() -> None:
    sizes = {1: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 256, 300: 384}
    assert {size: padded_prompt(size) for size in sizes} == sizes


@pytest.mark.parametrize("length", [16, 17, 64, 65, 127, 128, 129])
def test_prompts_at_the_edge_of_a_bucket_are_decoded_alike(length: int) -> None:
    prompt = [(7 * i + 3) % 13 for i in range(length)]
    tokens = SpeculativeDecoder(TARGET, NGram(3)).generate(prompt, max_new_tokens=6).tokens[0]
    assert tokens == greedy_texts.continuation(tuple(prompt), 6, 160)


def lowered(function: Any, *args: Any, **static: Any) -> Any:
    """Lowers a function without shape checks: structures then hold descriptions of arrays."""
    with tiny.unchecked():
        return function.lower(*args, **static)


def memory(function: Any, state: Any, loop: SpeculativeLoop, params: LoopParams) -> tuple[int, int]:
    analysis = lowered(function, loop, params, state).compile().memory_analysis()
    return analysis.alias_size_in_bytes, analysis.temp_size_in_bytes


@pytest.mark.parametrize("function", [loops.step, loops.run], ids=["step", "run"])
def test_caches_are_updated_in_place(function: Any) -> None:
    loop, params = tiny.bind(TARGET, tiny.eagle3(TARGET, TREE))
    state = loops.prefill(loop, params, tiny.prompts(PROMPTS, limit=8), capacity=4096)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.drafter)))

    aliased, temporary = memory(function, state, loop, params)
    assert aliased >= caches
    # Attention scores span the capacity (heads x nodes floats a slot, as much for weights); the
    # caches are not copied.
    scores = 4 * len(PROMPTS) * 4096 * 4 * TREE.num_nodes
    assert temporary < 4 * scores

    method = getattr(SpeculativeLoop, function.__name__)
    undonated = jax.jit(lambda loop, params, state: method(loop, params, state), static_argnums=0)
    assert memory(undonated, state, loop, params)[0] < caches, "the check can fail"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["plain", "chain", "tree", "fallback"])
def test_no_cache_is_copied_inside_the_loop(name: str, batch: int) -> None:
    """The program has no copy of a cache.

    Memory analysis sees arguments and results, not copies in every round of a loop.
    """
    drafter = {
        "plain": LoadedDrafter(Plain()),
        "chain": tiny.eagle3(TARGET, Chain(3)),
        "tree": tiny.eagle3(TARGET, TREE),
        "fallback": Fallback.of(NGram(3), tiny.eagle3(TARGET, Chain(3))),
    }[name]

    loop, params = tiny.bind(TARGET, drafter)
    state = loops.prefill(loop, params, tiny.prompts(PROMPTS[:1] * batch, limit=8), capacity=1024)

    program = lowered(loops.run, loop, params, state).compile().as_text()
    buffer = ",".join(map(str, state.cache.layers[0].keys.shape))
    assert re.search(rf"f32\[{buffer}\]\S* parameter\(", program), (
        "the buffers are called something else"
    )
    assert re.findall(rf"f32\[{buffer}\]\S* copy\(", program) == []


def finish_reasons(outcome: loops.Outcome) -> list[FinishReason]:
    return [FinishReason(int(reason)) for reason in outcome.finish]


def test_every_row_has_stop_tokens_of_its_own() -> None:
    """-1 fills up the stop tokens of rows with fewer, and is not a token."""
    loop, params = tiny.bind(TARGET, greedy_texts.DRAFTERS["a perfect drafter"]())
    batch = tiny.prompts(greedy_texts.PROMPTS, limit=greedy_texts.LIMITS)
    stop_lists = [(3, 9), (3,), (9,), ()]
    stops = [stop_lists[row % len(stop_lists)] for row in range(len(greedy_texts.PROMPTS))]
    padded = jnp.asarray([(*row, -1, -1)[:2] for row in stops], jnp.int32)
    outcome = loops.generate(
        loop, params, batch.replace(stop_tokens=padded), capacity=48 + loop.drafter.num_nodes
    )
    expected = [greedy_texts.expected(row)[index] for index, row in enumerate(stops)]
    assert tiny.outputs(outcome, batch) == expected
    assert expected not in [greedy_texts.expected(row) for row in stop_lists]


@pytest.mark.parametrize("name", ["a perfect drafter", "a random static tree"])
def test_rows_end_for_their_own_reason(name: str) -> None:
    stopped = greedy_texts.check_greedy_output(name, stops=(3, 9))
    rows = greedy_texts.expected((3, 9))
    expected = [FinishReason.STOP if row[-1] in (3, 9) else FinishReason.LENGTH for row in rows]
    assert finish_reasons(stopped) == expected
    assert set(expected) == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_single_token_needs_no_round() -> None:
    result = SpeculativeDecoder(TARGET, tiny.eagle3(TARGET)).generate(PROMPTS, max_new_tokens=1)
    assert [len(row.tokens) for row in result.rows] == [1] * len(PROMPTS)
    assert {row.finish_reason for row in result.rows} == {FinishReason.LENGTH}
    assert result.stats.num_drafts == 0


@pytest.mark.parametrize("limit", [50, 2**31 - 1, np.int64(10**12)])
def test_a_row_ends_where_the_target_has_no_more_positions(limit: int) -> None:
    target = tiny.target(13, max_positions=20)
    prompt = [5, 6] * 8
    decoder = SpeculativeDecoder(target, tiny.eagle3(target, TREE))
    with tiny.unchecked():
        row = decoder.generate(prompt, max_new_tokens=limit).rows[0]

    assert row.finish_reason is FinishReason.CAPACITY
    assert len(row.tokens) == 4
    assert row.tokens == SpeculativeDecoder(TARGET).generate(prompt, max_new_tokens=4).tokens[0]


def test_caches_hold_exactly_what_has_been_run_after_every_round() -> None:
    decoder = SpeculativeDecoder(TARGET, tiny.eagle3(TARGET, TREE), stop_tokens=[3])
    finished_at: dict[int, int] = {}
    for played in decoder.rounds(PROMPTS, max_new_tokens=[3, 9, 14, 20]):
        state = played.state
        length = np.asarray(state.length)
        assert np.array_equal(state.cache.length, length - 1)
        assert np.array_equal(state.drafter.cache.length, length - 1)

        for row in np.flatnonzero(~np.asarray(state.running)):
            assert finished_at.setdefault(int(row), int(length[row])) == length[row], (
                "a finished row moved"
            )

    assert len(finished_at) == len(PROMPTS)


SAMPLING = SamplingParams(temperature=0.9, top_k=6, top_p=0.95)


SAMPLED_CHAIN = tiny.eagle3(TARGET, Chain(3), draft_sampling=DraftSampling.PROBABILISTIC)


@pytest.mark.parametrize(
    "drafter", [tiny.eagle3(TARGET, TREE), SAMPLED_CHAIN], ids=["tree", "sampled chain"]
)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLING], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_the_batch_size(
    sampling: SamplingParams, drafter: LoadedDrafter
) -> None:
    decoder = SpeculativeDecoder(TARGET, drafter)
    together = decoder.generate(PROMPTS, max_new_tokens=12, sampling=sampling, seed=3).tokens
    single = decoder.generate(PROMPTS[0], max_new_tokens=12, sampling=sampling, seed=3).tokens[0]
    others = decoder.generate(
        [PROMPTS[0], [1], [2] * 9, [3]], max_new_tokens=12, sampling=sampling, seed=3
    ).tokens
    assert together[0] == single == others[0]


def test_a_greedy_batch_pays_nothing_for_a_drafter_that_can_sample() -> None:
    batch = tiny.prompts(PROMPTS, limit=8)

    def program(draft_sampling: DraftSampling, sampling_mode: SamplingMode) -> tuple[bool, float]:
        """Returns whether a program makes random numbers, and the number of its operations."""
        drafter = tiny.eagle3(TARGET, Chain(3), draft_sampling=draft_sampling)
        loop, params = tiny.bind(TARGET, drafter, sampling_mode=sampling_mode)
        compiled = lowered(loops.generate, loop, params, batch, capacity=64).compile()
        costs = compiled.cost_analysis()
        return "threefry" in compiled.as_text(), costs["flops"] + costs["transcendentals"]

    random, work = program(DraftSampling.PROBABILISTIC, SamplingMode.GREEDY)
    assert not random
    assert work <= program(DraftSampling.GREEDY, SamplingMode.GREEDY)[1]
    random, more = program(DraftSampling.PROBABILISTIC, SamplingMode.TEMPERATURE)
    assert random and more > work, "the test cannot see the cost of sampling"


def test_rounds_between_two_checks_change_nothing() -> None:
    head = tiny.eagle3(TARGET, TREE)
    often = SpeculativeDecoder(TARGET, head).generate(PROMPTS, max_new_tokens=9)
    seldom = SpeculativeDecoder(TARGET, head, rounds_per_check=4).generate(
        PROMPTS, max_new_tokens=9
    )
    assert often.tokens == seldom.tokens
    assert often.stats.to_json() == seldom.stats.to_json()


def test_a_row_put_into_a_live_batch_goes_on_as_if_alone() -> None:
    loop, params = tiny.bind(
        TARGET, tiny.eagle3(TARGET, TREE), sampling_mode=SamplingMode.TRUNCATED
    )
    batch = tiny.prompts(PROMPTS, limit=10, sampling=SAMPLING, width=12)
    undisturbed = loops.generate(loop, params, batch, capacity=48)
    newcomer = tiny.prompts([[7, 7, 1]], limit=10, sampling=SAMPLING, seed=8, width=12)
    newcomer_alone = loops.generate(loop, params, newcomer, capacity=48)

    state = loops.prefill(loop, params, batch, capacity=48)
    for _ in range(2):
        state = loops.step(loop, params, state).state
    fresh = loops.prefill(loop, params, newcomer, capacity=48)
    state = jax.tree.map(lambda live, new: live.at[1].set(new[0]), state, fresh)
    programs = loops.step._cache_size()
    while bool(state.running.any()):
        state = loops.step(loop, params, state).state
    assert loops.step._cache_size() == programs
    for row in (0, 2, 3):
        assert np.array_equal(state.tokens[row, :24], undisturbed.tokens[row, :24])
    assert np.array_equal(state.tokens[1], newcomer_alone.tokens[0])


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLING], ids=["greedy", "sampled"])
def test_a_stream_writes_what_generate_writes(sampling: SamplingParams) -> None:
    decoder = SpeculativeDecoder(TARGET, tiny.eagle3(TARGET, TREE))
    options = {"max_new_tokens": 12, "sampling": sampling, "seed": 4}
    result = decoder.generate(PROMPTS[0], **options)
    chunks = list(decoder.stream(PROMPTS[0], **options))
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens[0]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [FinishReason.RUNNING] * (
        len(chunks) - 1
    )
    assert chunks[-1].finish_reason is result.rows[0].finish_reason
    assert chunks[-1].stats.to_json() == result.stats.to_json()


def test_counters_count_what_was_accepted_before_a_limit_cut_it() -> None:
    loop, params = tiny.bind(TARGET, greedy_texts.scripted(0))
    batch = tiny.prompts(greedy_texts.PROMPTS, limit=[3] * len(greedy_texts.PROMPTS))
    outcome = loops.generate(loop, params, batch, capacity=64)
    assert len(tiny.outputs(outcome, batch)[0]) == 3
    # One token from the prefill, then one round that accepts all four drafts, of which the limit
    # leaves two.
    assert outcome.stats.num_accepted_tokens.tolist() == [4] * len(greedy_texts.PROMPTS)
    assert outcome.stats.num_accepted_tokens_per_pos.tolist() == [[1, 1, 1, 1]] * len(
        greedy_texts.PROMPTS
    )


def test_merged_statistics_sum_counters_and_never_average_rates() -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    counters = (10, 20, 15, [9, 6]), (1, 2, 0, [0, 0])

    merged = SpeculationStats.merge(
        [
            SpeculationStats(**dict(zip(names, map(np.array, values), strict=True)))
            for values in counters
        ]
    )

    assert merged.to_json()["num_drafts"] == 11
    assert merged.mean_acceptance_length == pytest.approx(1 + 15 / 11)
    assert merged.draft_acceptance_rate == pytest.approx(15 / 22)
    assert merged.acceptance_per_position == pytest.approx([9 / 11, 6 / 11])
    assert merged.conditional_acceptance_rate == pytest.approx([9 / 11, 6 / 9])


def test_seeds_decide_and_decide_alone() -> None:
    decoder = SpeculativeDecoder(TARGET, Plain())
    outputs = [
        decoder.generate(PROMPTS, max_new_tokens=12, sampling=SAMPLING, seed=seed).tokens
        for seed in (0, 0, 1)
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    keys = jax.random.key_data(row_keys(0, 4))
    assert np.array_equal(keys[:2], jax.random.key_data(row_keys(0, 2)))
    assert len({tuple(key) for key in np.asarray(keys).tolist()}) == 4


def test_drafting_by_sampling_is_chosen_where_there_is_something_to_draw_from() -> None:
    head = tiny.eagle3(TARGET, TREE)
    sampled = DraftSampling.PROBABILISTIC

    chosen = SpeculativeDecoder(
        TARGET, head, num_speculative_tokens=2, draft_sampling=sampled
    ).loop.drafter
    assert chosen.topology == Chain(2)
    assert chosen.draft_sampling == sampled

    assert SpeculativeDecoder(TARGET, LoadedDrafter(chosen, head.params)).loop.drafter is chosen

    back = SpeculativeDecoder(
        TARGET, LoadedDrafter(chosen), tree=TREE, draft_sampling=DraftSampling.GREEDY
    )
    assert back.loop.drafter.topology == TREE
    assert back.loop.drafter.draft_sampling == DraftSampling.GREEDY


class TellingTarget(type(tiny.target(13).model)):  # type: ignore[misc]
    """Records what its forwards after a prefill are told of their block."""

    received: ClassVar[list[bool]] = []

    def __call__(
        self,
        params,
        tokens,
        positions,
        mask,
        cache=None,
        aux_layers=(),
        length=None,
        is_chain=False,
    ):
        if cache is not None:
            self.received.append(is_chain)
        return super().__call__(
            params, tokens, positions, mask, cache, aux_layers, length, is_chain
        )


@pytest.mark.parametrize("topology", [Chain(2), DynamicTree(num_nodes=4, max_depth=2, top_k=2)])
def test_a_target_is_told_whether_its_block_is_a_chain(topology: Chain | DynamicTree) -> None:
    loaded = tiny.target(13)
    model = TellingTarget(loaded.model.config, loaded.model.precision)
    TellingTarget.received.clear()
    loop, params = tiny.bind(
        dataclasses.replace(loaded, model=model), tiny.eagle3(loaded, topology)
    )
    state = loops.prefill(loop, params, tiny.prompts([[1, 2, 3]], limit=8), capacity=24)
    loops.step(loop, params, state)
    assert TellingTarget.received == [isinstance(topology, Chain)]
