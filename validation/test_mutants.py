"""MU: every planted bug turns at least one level red.

The bugs are those of the test suite's own gate and a few that only somebody else's numbers can show. Each is switched
on by a patch of one function's code, and the check of a level must then fail. Bugs of the draft head are shown to live
vLLM where there is one, and to a recorded run of it where there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import test_drawn_chain
import test_exact_law
import test_golden
import test_greedy
import test_keys
import test_long_law
import test_sampling_law
import test_schedule
import test_scripted_trees
import test_training
import test_tree
from mutants import Mutant, planted
from planted_bugs import MUTANTS

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.models import rope
from eagle3_jax.models.decoder import Block, Decoder
from eagle3_jax.models.layers import normalised
from eagle3_jax.rivals.vllm.bridge import EngineOptions, Generated, Tokens, eagle3
from eagle3_jax.stats import SpeculationStats
from validation.checks import Check
from validation.fixtures import MaybeVLLM
from validation.parity import first_difference, play
from validation.subject import Subject

pytestmark = pytest.mark.level("MU")

K, BATCH, CONTEXT, MAX_NEW_TOKENS = 4, 4, 100, 24
RECORDED, LIVE, WITNESS = "L8, recorded vLLM", "L8, live vLLM", "HF"
LEVEL_OF: dict[Callable, str] = {
    test_exact_law.check_exact_law: "L0",
    test_sampling_law.check_sampling_law: "L2",
    test_sampling_law.check_truncation_through_the_decoder: "L2",
    test_long_law.check_long_law: "L2",
    test_greedy.check_greedy_output: "L3",
    test_scripted_trees.check_deep_accepts: "L3",
    test_scripted_trees.check_the_edge_of_a_capacity: "L3",
    test_keys.check_keys: "tests alone",
    test_schedule.check_the_last_size: "tests alone",
    test_schedule.test_a_gap_carries_the_length_before_it_and_nothing_is_drafted_above_the_last_entry: "tests alone",
    test_tree.check_ties: "tests alone",
    test_drawn_chain.check_drawn_chain: "tests alone",
    test_drawn_chain.check_fused_features: "tests alone",
    test_training.check_official_losses: "official EAGLE trace",
    test_golden.check_vllm_counters: RECORDED,
    test_golden.check_first_official_draft: "official EAGLE trace",
    test_golden.check_official_trace: "official EAGLE trace",
}

# Bugs of the target that its own text cannot show: it is the only model that has them.
TARGET_BUGS = {
    "rotary frequencies are those of another base": (
        rope.inverse_frequencies,
        "np.float32(config.theta)",
        "np.float32(config.theta * 1.5)",
    ),
    "the MLP reads the stream before attention": (
        Block.__call__,
        "x = x + attended\n    return x + self.mlp(self.mlp_norm(x)), kept",
        "return x + attended + self.mlp(self.mlp_norm(x)), kept",
    ),
    "the norm subtracts the mean": (
        normalised,
        "y = x.astype(jnp.float32)",
        "y = x.astype(jnp.float32) - jnp.mean(x, axis=-1, keepdims=True)",
    ),
    "features are taken behind the final norm": (
        Decoder.__call__,
        "jnp.stack([streams[layer] for layer in aux_layers], axis=2)",
        "jnp.stack([self.norm(streams[layer]) for layer in aux_layers], axis=2)",
    ),
}

_caught: dict[str, tuple[str, str]] = {}  # bug to level and check


@dataclasses.dataclass(frozen=True)
class Live:
    """What vLLM did with the pair, once, for all bugs."""

    decoder: SpeculativeDecoder
    prompts: list[Tokens]
    theirs: Generated

    def check(self) -> None:
        """Our rounds must be vLLM's."""
        ours = play(self.decoder, self.prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH)
        difference = first_difference(ours, self.theirs)
        assert difference is None, difference


@pytest.fixture(scope="module")
def live(maybe_vllm: MaybeVLLM, subject: Subject) -> Live | None:
    if maybe_vllm.vllm is None:
        return None
    options = EngineOptions(
        model=str(subject.target_directory), speculative=eagle3(subject.drafter_directory, K), max_num_seqs=BATCH
    )
    prompts = [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[:BATCH]]
    theirs = maybe_vllm.vllm.engine(options).generate(prompts, max_new_tokens=MAX_NEW_TOKENS)
    decoder = SpeculativeDecoder(*subject.pair("float32"), num_speculative_tokens=K, stop_tokens=())
    found = Live(decoder, prompts, theirs)
    found.check()  # without a bug it must be green, or red would prove nothing
    return found


def is_of_the_chain(mutant: Mutant) -> bool:
    """Whether a bug of the head shows in a greedy chain, which is all that vLLM drafts."""
    # Live rounds are compared one by one; the loop's own counters are held to the recorded ones.
    return mutant.check is test_golden.check_vllm_counters and mutant.function is not SpeculationStats.count


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_turns_a_level_red(live: Live | None, bug: str) -> None:
    mutant = MUTANTS[bug]
    if live is not None and is_of_the_chain(mutant):
        level, run, by = LIVE, live.check, "the rounds of live vLLM"
    else:
        level, run, by = LEVEL_OF.get(mutant.check, "L1"), mutant.run, mutant.catcher
        mutant.seen_green()
    with mutant.bug(), pytest.raises(AssertionError):
        run()
    _caught[bug] = level, by


@pytest.mark.parametrize("bug", TARGET_BUGS)
def test_a_bug_of_the_target_turns_a_level_red(subject: Subject, bug: str) -> None:
    witness = pytest.importorskip("validation.test_transformers", reason="transformers is not installed")
    model = witness.load_witness(subject.target_directory)
    target, prompts = subject.pair("float32")[0], [subject.prompt_tokens[0][:24]]
    witness.check_forward(Check(level="HF", name=bug), model, target, prompts)
    with planted(*TARGET_BUGS[bug]), pytest.raises(AssertionError):
        witness.check_forward(Check(level="HF", name=bug), model, target, prompts)
    _caught[bug] = WITNESS, "validation.test_transformers.check_forward"


def test_no_bug_survives(check: Check) -> None:
    planted_bugs = [*MUTANTS, *TARGET_BUGS]
    check.number(planted=len(planted_bugs), caught=len(_caught))
    check.table(
        "Which level caught which bug",
        ["planted bug", "red", "caught by"],
        [[bug, *_caught.get(bug, ("none", ""))] for bug in planted_bugs],
    )
    assert set(_caught) == set(planted_bugs)
