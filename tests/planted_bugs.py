"""The planted bugs, and the check of this suite that must catch each.

A mutant is one piece of a function's source replaced by another. Bugs that change the output are caught by the law
and by greedy equality; bugs that only cost acceptance leave the output lossless and are caught by recorded traces and
by numpy. ``python tests/planted_bugs.py`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import planted_heads
import planted_rules
import test_draw_law
import test_exact_law
import test_greedy
import test_keys
import test_long_law
import test_sampling_law
import test_schedule
import test_scripted_trees
import test_thresholds
import test_verify
import tiny
from mutants import ENTRY, Mutant
from planted_heads import DRAWN_FROM, vllm_trace

from eagle3_jax.acceptance import Exact, _follow, verification_dice, verify, verify_points
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters import _grow
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.recurrent import Recurrent
from eagle3_jax.sampling import _invert, _row_keys, _truncate, draw, keys_at, probabilities, residual, warping_of
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.simulated import SimulatedAcceptance
from eagle3_jax.stages import StagedLoop
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.tree import ancestor_mask


def exact_law(function: Callable, old: str, new: str, case: str = "a sampled chain") -> Mutant:
    return Mutant(function, old, new, test_exact_law.check_exact_law, (case,))


def at_once(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_verify.check_point_masses, (0,))


def sampling_law(function: Callable, old: str, new: str, drafter: str, runs: int = 3) -> Mutant:
    return Mutant(function, old, new, test_sampling_law.check_sampling_law, (drafter,), (("runs", runs),))


def greedy(function: Callable, old: str, new: str, drafter: str = "a random dynamic tree", stops: tuple = ()) -> Mutant:
    return Mutant(function, old, new, test_greedy.check_greedy_output, (drafter, stops))


def long_law(function: Callable, old: str, new: str, drafter: str, rows: int = 2048, runs: int = 1) -> Mutant:
    return Mutant(function, old, new, test_long_law.check_long_law, (drafter,), (("rows", rows), ("runs", runs)))


def thresholds(function: Callable, old: str, new: str, rule: str = "the token rule") -> Mutant:
    """What only the small probabilities of a real vocabulary show."""
    return Mutant(function, old, new, test_thresholds.check_thresholds, (rule, 28))


def subtle(function: Callable, old: str, new: str) -> Mutant:
    """Half a percent and less: three million tokens, which plain decoding writes in seconds."""
    return long_law(function, old, new, "plain decoding", rows=8192, runs=16)


def ledger(function: Callable, old: str, new: str, case: str) -> Mutant:
    return Mutant(function, old, new, test_keys.check_keys, (case,))


def zero_mass(uniform: float) -> None:
    test_verify.test_a_token_without_target_mass_is_never_accepted_nor_drawn(uniform)


DRAW = "next_token=draw(walk.p, choose)"
LEFT = "1.0 - jnp.sum(jnp.where(elder, p[:, None, :], 0.0), axis=-1)"
RESIDUAL = "jnp.where(child, rest, walk.p)"
FITS = "(accept[node] * q[token] < walk.p[token])"
DECLARED = "probs.append(q)"
FIRST = "prompts.keys, prompts.length, _VERIFY"
WARPED = "scaled = _truncate(scaled, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))"
COMMITTED = "cache = state.cache.commit(output.written, count, None if self.is_chain else nodes)"

MUTANTS = {
    # The rule.
    "the bonus is drawn from the draft": exact_law(
        verify, DRAW, "next_token=draw(jnp.where(walk.count == max_depth, draft.probs[walk.current], walk.p), choose)"
    ),
    "a refusal draws again from the target": exact_law(verify, RESIDUAL, "walk.p"),
    "the residual is uniform": exact_law(
        verify, RESIDUAL, "jnp.where(child, (rest > 0).astype(jnp.float32) / jnp.sum((rest > 0).astype(jnp.float32)), walk.p)"
    ),
    "the residual is a softmax": exact_law(verify, RESIDUAL, "jnp.where(child, jax.nn.softmax(rest), walk.p)"),
    "a sampled draft is refused like a point mass": exact_law(
        verify, "residual(walk.p, q)", "residual(walk.p, jax.nn.one_hot(token, probs.shape[1]))"
    ),
    "a sampled draft is accepted like a point mass": exact_law(verify, FITS, "(accept[node] < walk.p[token])"),
    "a point mass is accepted like a sampled draft": exact_law(
        verify_points, "accept * left < p", "accept * 0.5 * left < p", "a deterministic chain"
    ),
    "the ratio is reversed": exact_law(verify, FITS, "(accept[node] * walk.p[token] < q[token])"),
    "the second sibling sees the whole target again": exact_law(
        verify_points, LEFT, "jnp.ones_like(p)", "a tree of deterministic siblings"
    ),
    "the second sibling that is drawn sees the whole target again": exact_law(
        verify, RESIDUAL, "jnp.where(child, probs[walk.current], walk.p)", "a tree of sampled siblings"
    ),
    "a refused point mass can be drawn all the same": exact_law(
        verify_points, "jnp.where(refused, draft.tokens, vocab_size)", "jnp.full_like(draft.tokens, vocab_size)", "a deterministic chain"
    ),
    "a token that is proposed twice has mass twice": at_once(verify_points, "jnp.where(again, 0.0, ", "jnp.where(False, 0.0, "),
    "padding takes its token from its siblings": at_once(verify_points, "& draft.valid[:, None, :]", ""),
    "the path goes through every sibling that is taken": at_once(_follow, "first = taken & ~", "first = taken & True | ~"),
    "the path goes on below a refusal": at_once(_follow, "jnp.all(first[:, None, :] | (node == 0)[None, None] | ~above, axis=-1)", "(first | (node == 0)[None])"),
    "the path ends one node early": at_once(_follow, "jnp.max(jnp.where(on_path, node, 0), axis=-1)", "jnp.take_along_axis(jnp.maximum(draft.parents, 0), jnp.max(jnp.where(on_path, node, 0), axis=-1)[:, None], 1)[:, 0]"),
    "every node counts as a child of the current one": exact_law(
        verify, "(draft.parents[node] == walk.current)", "(draft.parents[node] <= walk.current)", "a tree of sampled siblings"
    ),
    "padding can be accepted": exact_law(_follow, "taken & draft.valid & ", "taken & ", "nothing drafted"),
    "padding that is drawn can be accepted": at_once(
        verify, "draft.valid[node] & (draft.parents[node] == walk.current)", "draft.parents[node] == walk.current"
    ),
    "acceptance is not strict": Mutant(verify, FITS, FITS.replace("<", "<="), zero_mass, (0.0,)),
    "an empty residual refuses": Mutant(
        verify, "| ((mass <= 0) & (walk.p[token] > 0))", "",
        test_verify.test_an_empty_residual_accepts_instead_of_dividing_by_zero,
    ),
    "a draw can land before the first token with mass": Mutant(
        _invert, "cumulative > uniform", "cumulative >= uniform",
        test_verify.test_a_draw_never_lands_on_a_token_without_mass, ((0.0, 0.3, 0.0, 0.7),),
    ),
    "a draw ends below the last part of the mass": Mutant(
        _invert, "uniform[..., None]", "0.999 * uniform[..., None]", test_draw_law.check_law_of_draw, ("Zipf", 65)
    ),
    "a draw takes one uniform for all digits": Mutant(
        draw, "uniforms[..., digit]", "uniforms[..., 0]", test_draw_law.check_law_of_draw, ("uniform", 65)
    ),
    # At the vocabulary of Llama 3.
    "a refusal takes 1e-4 of every token away": thresholds(residual, "jnp.maximum(p - q, 0.0)", "jnp.maximum(p - jnp.maximum(q, 1e-4), 0.0)"),
    "no draft is taken for rarer than 1e-4": thresholds(verify, "accept[node] * q[token]", "accept[node] * jnp.maximum(q[token], 1e-4)"),
    "a thousandth left is nothing, and accepts": thresholds(verify, "mass <= 0", "mass <= 1e-3"),
    "a thousandth left is nothing, and the target is drawn from again": thresholds(residual, "mass[..., None] > 0,", "mass[..., None] > 1e-3,"),
    "a thousandth that point masses leave is nothing": thresholds(
        verify_points, "keepdims=True) > 0", "keepdims=True) > 1e-3", "the token rule on point masses"
    ),
    # Its inputs.
    "another draft distribution is declared than was drawn from": sampling_law(
        tiny.Sampled.propose, DECLARED, "probs.append(jax.nn.softmax(q))", "a sampled chain"
    ),
    "a draft is drawn at the temperature and declared without it": long_law(
        _grow.draw_chain, DRAWN_FROM, DRAWN_FROM.replace(" q,", " jax.nn.softmax(logits),"), "a chain of drawn tokens"
    ),
    "a draft is declared at its draft ids": long_law(
        _grow.draw_chain, DRAWN_FROM, "probs[0].at[:, : q.shape[1]].add(q)", "a chain of drawn tokens"
    ),
    "an argmax draft is declared as if drawn": long_law(
        _grow.draw_chain, "jnp.where(greedy, argmax", "jnp.where(True, argmax", "a chain of drawn tokens"
    ),
    "all depths of a draft share one uniform": long_law(
        _grow.draw_chain, "draw(q, dice[:, index])", "draw(q, dice[:, 0])", "a chain of drawn tokens"
    ),
    "siblings are drawn without replacement and declared with it": long_law(
        _grow.draw_static, DRAWN_FROM,
        DRAWN_FROM.replace(" q,", " probabilities(first.logits, sampling, Warping.TEMPERATURE) if nodes[0] < 3 else q,"),
        "a static tree of drawn tokens",
    ),
    "the likeliest siblings are declared as if drawn": long_law(
        _grow.draw_static, "jnp.where(greedy, ", "jnp.where(True, ", "a static tree of drawn tokens"
    ),
    "siblings share one uniform": long_law(
        _grow.draw_static, "dice[:, nodes - 1]", "dice[:, nodes * 0]", "a static tree of drawn tokens"
    ),
    "all digits of a node share one uniform": long_law(
        _grow.draw_static, "uniforms(keys, (size - 1) * digits).reshape(batch, size - 1, digits)",
        "jnp.repeat(uniforms(keys, size - 1)[:, :, None], digits, axis=2)", "a static tree of drawn tokens, two digits",
    ),
    "all digits of a drafted token share one uniform": long_law(
        _grow.draw_chain, "uniforms(keys, depth * digits).reshape(batch, depth, digits)",
        "jnp.repeat(uniforms(keys, depth)[:, :, None], digits, axis=2)", "a chain of drawn tokens, two digits",
    ),
    "all digits of the token after a draft share one uniform": long_law(
        verification_dice, "dice[:, num_nodes:]",
        "jnp.repeat(dice[:, num_nodes : num_nodes + 1], num_digits(vocab_size), axis=1)", "plain decoding, two digits",
    ),
    "all digits of the first token share one uniform": long_law(
        SpeculativeLoop._prefill, "uniforms(keys, num_digits(probs.shape[-1]))",
        "jnp.repeat(uniforms(keys, 1), num_digits(probs.shape[-1]), axis=1)", "plain decoding, two digits",
    ),
    "drafting and verifying share their randomness": long_law(
        SpeculativeLoop._propose, "keys_at(state.keys, state.length, _DRAFT)", "keys_at(state.keys, state.length, _VERIFY)",
        "a chain of drawn tokens",
    ),
    "one uniform both accepts and draws": long_law(
        verification_dice, "dice[:, num_nodes:]", "dice[:, 1:2]", "a chain of the likeliest tokens"
    ),
    "top-p comes before temperature": sampling_law(
        probabilities,
        WARPED,
        "scaled = _truncate(logits, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))"
        " / jnp.where(temperature > 0, temperature, 1.0)",
        "an EAGLE-3 chain of 1",
    ),
    "greedy rows of a sampled batch are sampled": sampling_law(
        probabilities,
        "jnp.where(temperature > 0, jax.nn.softmax(scaled, axis=-1), greedy)",
        "jax.nn.softmax(scaled, axis=-1)",
        "an EAGLE-3 chain of 1",
    ),
    "verification ignores the temperature": long_law(
        Exact.__call__,
        "probabilities(logits, sampling, warping)",
        "jax.nn.softmax(logits)",
        "a chain of the likeliest tokens",
    ),
    "all rounds share their randomness": long_law(
        SpeculativeLoop._verify, "keys_at(state.keys, state.length, _VERIFY)", "state.keys", "a chain of the likeliest tokens"
    ),
    "the first token is drawn with the key of the first verification": ledger(
        SpeculativeLoop._prefill, FIRST, FIRST.replace("length", "length + 1"), "plain decoding"
    ),
    "the first token is drawn with the key of the first draft": ledger(
        SpeculativeLoop._prefill, FIRST, "prompts.keys, prompts.length + 1, _DRAFT", "a drawn chain"
    ),
    "simulated acceptance shares its key with the verification": ledger(
        SimulatedAcceptance.__call__, "jax.vmap(jax.random.fold_in, (0, None))(keys, 0)", "keys", "simulated acceptance"
    ),
    # Many rounds.
    "keys repeat every eight positions": long_law(
        keys_at, ENTRY, "position = position % 8", "a chain of the likeliest tokens"
    ),
    "keys change with every fourth position only": long_law(
        SpeculativeLoop._verify, "keys_at(state.keys, state.length, _VERIFY)", "keys_at(state.keys, state.length // 4, _VERIFY)",
        "a chain of the likeliest tokens",
    ),
    "two rows share a key": long_law(
        _row_keys, "jnp.arange(batch)", "jnp.arange(batch) // 2", "a chain of the likeliest tokens"
    ),
    "a draw never reaches the last thousandth": subtle(
        draw, ENTRY,
        "p = jnp.diff(jnp.minimum(jnp.cumsum(p, axis=-1), 0.999 * jnp.sum(p, axis=-1, keepdims=True)), axis=-1, prepend=0.0)",
    ),
    "a draw is tilted by half a percent": subtle(
        draw, ENTRY, "p = p * jnp.where(jnp.arange(p.shape[-1]) % 2 == 0, 1.005, 0.995)"
    ),
    "a recurrent layer folds in a refused token": long_law(
        Recurrent.commit, "index < count", "index <= count", "a chain of drawn tokens for a recurrent target"
    ),
    "a recurrent layer commits a path in block order": long_law(
        Recurrent.commit, "written if nodes is None else _chosen(written, nodes)", "written",
        "a static tree of drawn tokens for a recurrent target",
    ),
    # Which rows need which work.
    "a batch with top-p alone is not truncated": Mutant(
        warping_of, " | (np.asarray(sampling.top_p) < 1)", "",
        test_sampling_law.check_truncation_through_the_decoder, ("top-p alone", "plain decoding"),
    ),
    "a batch with top-k alone is not truncated": Mutant(
        warping_of, "(np.asarray(sampling.top_k) > 0) | ", "",
        test_sampling_law.check_truncation_through_the_decoder, ("top-k alone", "plain decoding"),
    ),
    "top-p keeps a token behind a set of that very mass": Mutant(
        _truncate, "(before < top_p[:, None, None])", "(before <= top_p[:, None, None])",
        test_sampling_law.check_the_edge_of_top_p,
    ),
    "a schedule ends one row early": Mutant(
        SpeculationSchedule.length_at, "batch > self.entries", "batch >= self.entries",
        test_schedule.test_a_gap_carries_the_length_before_it_and_nothing_is_drafted_above_the_last_entry, (16, 1),
    ),
    "a stage begins one row late": Mutant(
        StagedLoop.at, "running <= stage.max_running", "running < stage.max_running",
        test_schedule.check_the_last_size,
    ),
    # The loop.
    "tree nodes see their siblings": greedy(
        SpeculativeLoop.step, "positions, mask, state.cache", "positions, causal_mask(num_nodes), state.cache"
    ),
    "tree nodes stand at their index": greedy(
        SpeculativeLoop.step, "depth = depths(mask)", "depth = jnp.cumsum(jnp.ones_like(draft.parents), axis=1) - 1"
    ),
    "an accepted path is committed in block order": greedy(SpeculativeLoop.step, COMMITTED, COMMITTED.replace("None if self.is_chain else nodes", "None")),
    "an accepted path is committed backwards": greedy(
        SpeculativeLoop.step, COMMITTED, COMMITTED.replace("else nodes", "else nodes[:, ::-1]")
    ),
    "rejected tokens stay in the cache": greedy(
        SpeculativeLoop.step, COMMITTED, COMMITTED.replace("count,", "jnp.full_like(count, num_nodes),"), "a random chain"
    ),
    "a stop token inside a block does not end the row": greedy(
        SpeculativeLoop._emit, "jnp.minimum(jnp.minimum(count, until_stop), room)", "jnp.minimum(count, room)",
        "a perfect drafter", (3, 9),
    ),
    "a limit is overshot": greedy(
        SpeculativeLoop._emit, "jnp.minimum(jnp.minimum(count, until_stop), room)", "jnp.minimum(count, until_stop)",
        "a perfect drafter",
    ),
    "a limit counts one token too many": greedy(
        SpeculativeLoop._emit, "room = state.limit - state.length", "room = state.limit - state.length + 1", "a random chain"
    ),
    "finished rows go on": greedy(
        SpeculativeLoop._emit, "jnp.where(state.running, jnp.maximum(kept, 0), 0)", "jnp.maximum(jnp.minimum(count, 2), 0)"
    ),
    "a batch advances by its shortest row": vllm_trace(
        SpeculativeLoop.step,
        "verdict.num_accepted, verdict.num_accepted + 1)",
        "verdict.num_accepted, jnp.full_like(verdict.num_accepted, 1) + jnp.min(verdict.num_accepted))",
    ),
    "a branching draft of one node more is taken for a chain": Mutant(
        SpeculativeLoop.is_chain.fget, ENTRY, "return self.drafter.num_nodes <= self.drafter.max_depth + 2",
        test_scripted_trees.check_deep_accepts, ("one wrong sibling in front, N = G + 2",),
    ),
    "tree nodes do not see their oldest ancestor": Mutant(
        ancestor_mask, "range(max_depth)", "range(max_depth - 1)",
        test_scripted_trees.check_deep_accepts, ("one wrong sibling in front, N = G + 2",),
    ),
    "a cache has no room for a draft": Mutant(
        SpeculativeDecoder._capacity, " + self.loop.drafter.num_nodes", "",
        test_scripted_trees.check_the_edge_of_a_capacity,
    ),
    "counters count one place too many": vllm_trace(
        SpeculationStats.count, "< accepted[:, None]", "<= accepted[:, None]"
    ),
} | planted_heads.MUTANTS | planted_rules.MUTANTS  # fmt: skip


if __name__ == "__main__":
    print(f"{len(MUTANTS)} planted bugs")
    for name, mutant in MUTANTS.items():
        print(f"{name}\n    in {mutant.place}, caught by {mutant.catcher}")
    sys.exit()
