"""The planted bugs, and the check of this suite that must catch each.

A mutant is one piece of a function's source replaced by another. Bugs that change the output are caught by the law
and by greedy equality; bugs that only cost acceptance leave the output lossless and are caught by recorded traces and
by numpy. ``python tests/planted_bugs.py`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import planted_rules
import test_draw_law
import test_drawn_chain
import test_exact_law
import test_golden
import test_greedy
import test_long_law
import test_sampling_law
import test_schedule
import test_scripted_trees
import test_training
import test_tree
import test_verify
import tiny
from mutants import ENTRY, Mutant

from eagle3_jax.acceptance import Exact, _follow, verification_dice, verify, verify_points
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters import Eagle1Config, Eagle3Drafter, MTPDrafter, _grow
from eagle3_jax.drafters.eagle1 import Eagle1Head
from eagle3_jax.drafters.mtp import MTPModule
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3Head, FirstLayer
from eagle3_jax.sampling import _invert, _row_keys, _truncate, draw, keys_at, probabilities, warping_of
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.stages import StagedLoop
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.training import ttt
from eagle3_jax.tree import ancestor_mask


def exact_law(function: Callable, old: str, new: str, case: str = "a sampled chain") -> Mutant:
    return Mutant(function, old, new, test_exact_law.check_exact_law, (case,))


def at_once(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_verify.check_point_masses, (0,))


def sampling_law(function: Callable, old: str, new: str, drafter: str, runs: int = 3) -> Mutant:
    return Mutant(function, old, new, test_sampling_law.check_sampling_law, (drafter,), (("runs", runs),))


def vllm_trace(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_golden.check_vllm_counters)


def official_trace(function: Callable, old: str, new: str) -> Mutant:
    args = ("eagle3", "trace_eagle3_greedy_fp32", 12)
    return Mutant(function, old, new, test_golden.check_official_trace, args)


def official_draft(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_golden.check_first_official_draft)


def greedy(function: Callable, old: str, new: str, drafter: str = "a random dynamic tree", stops: tuple = ()) -> Mutant:
    return Mutant(function, old, new, test_greedy.check_greedy_output, (drafter, stops))


def long_law(function: Callable, old: str, new: str, drafter: str, rows: int = 2048, runs: int = 1) -> Mutant:
    return Mutant(function, old, new, test_long_law.check_long_law, (drafter,), (("rows", rows), ("runs", runs)))


def subtle(function: Callable, old: str, new: str) -> Mutant:
    """Half a percent and less: three million tokens, which plain decoding writes in seconds."""
    return long_law(function, old, new, "plain decoding", rows=8192, runs=16)


def drawn_chain(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_drawn_chain.check_drawn_chain)


def official_losses(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_training.check_official_losses, (3,))


def mtp_rounds(function: Callable, old: str, new: str) -> Mutant:
    def check() -> None:
        import test_feedback_heads  # needs torch

        test_feedback_heads.check_rounds("MTP")

    return Mutant(function, old, new, check)


def zero_mass(uniform: float) -> None:
    test_verify.test_a_token_without_target_mass_is_never_accepted_nor_drawn(uniform)


DRAW = "next_token=draw(walk.p, choose)"
LEFT = "1.0 - jnp.sum(jnp.where(elder, p[:, None, :], 0.0), axis=-1)"
RESIDUAL = "jnp.where(child, rest, walk.p)"
FITS = "(accept[node] * q[token] < walk.p[token])"
DECLARED = "probs.append(q)"
DRAWN_FROM = "over_target(draft_to_target, q, vocab_size)"
WARPED = "scaled = _truncate(scaled, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))"
PROPOSED = "positions = jnp.broadcast_to(length[:, None] + depth, tokens.shape)"
SHIFTED = "shifted = jnp.where(last, seen.next_token[:, None], shifted)"
COMMITTED = "cache = state.cache.commit(output.written, count, None if self.is_chain else nodes)"
EXPANDED = "jnp.concatenate([_take(mask, slots), itself], axis=-1)"

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
    "the path goes on below a refusal": at_once(_follow, "jnp.all(first[:, None, :] | (node == 0) | ~above, axis=-1)", "(first | (node == 0))"),
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
        StagedLoop.step, "running <= stage.max_running", "running < stage.max_running",
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
        "self._emit(state, emitted, verdict.num_accepted + 1)",
        "self._emit(state, emitted, jnp.full_like(verdict.num_accepted, 1) + jnp.min(verdict.num_accepted))",
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
    # The head: none of these changes the output.
    "an EAGLE-1 head reads the state before the final norm": Mutant(
        Eagle1Config.aux_layers.fget, "num_target_layers + 1", "num_target_layers", test_golden.check_official_eagle2, (3,)
    ),
    "an EAGLE-1 head reads the state before the embedding": Mutant(
        Eagle1Head.__call__, "[embedded, stream]", "[stream, embedded]", test_golden.check_official_eagle2, (3,)
    ),
    "an MTP module reads the embedding at position 0": mtp_rounds(MTPDrafter.embed, "if self.config.zero_first", "if False"),
    "an MTP module is fed the state before its norm": mtp_rounds(MTPModule.__call__, "return self.norm(x), (kv,)", "return x, (kv,)"),
    "draft positions are off by one": official_draft(Eagle3Drafter.propose, PROPOSED, PROPOSED.replace("+ depth", "+ depth + 1")),
    "auxiliary layers are off by one": vllm_trace(Decoder.__call__, "streams[layer] for", "streams[layer + 1] for"),
    "auxiliary layers are in reverse order": vllm_trace(
        Decoder.__call__, "for layer in aux_layers]", "for layer in reversed(aux_layers)]"
    ),
    "the head's layer forgets its residual": vllm_trace(
        FirstLayer.__call__, "return x + self.mlp(self.mlp_norm(x)), kv", "return self.mlp(self.mlp_norm(x)), kv"
    ),
    "the residual starts from the normed features": official_draft(
        FirstLayer.__call__, "(normed if self.norm_before_residual else fused)", "normed"
    ),
    "the embedding and the features change places": vllm_trace(
        FirstLayer.__call__, "[self.embedding_norm(embedded), normed]", "[normed, self.embedding_norm(embedded)]"
    ),
    "the embedding and the features change norms": vllm_trace(
        FirstLayer.__call__, "self.embedding_norm(embedded)", "self.feature_norm(embedded)"
    ),
    "input tokens are not shifted": vllm_trace(Eagle3Drafter.observe, SHIFTED, "shifted = seen.tokens"),
    "accepted drafts stay in the draft cache": vllm_trace(
        Eagle3Drafter.observe,
        "head.fuse(seen.features)",
        "head.fuse(seen.features) if fed > 8 else jnp.where(jnp.arange(fed)[None, :, None] > 0, state.output[:, None],"
        " head.fuse(seen.features))",
    ),
    "the normed output is fed back": official_draft(
        Eagle3Head.__call__, "(self.norm(x) if self.config.norm_output else x)", "self.norm(x)"
    ),
    "draft logits come from the un-normed output": official_draft(
        Eagle3Head.logits, "output if self.config.norm_output else self.norm(output)", "output"
    ),
    "offsets of the draft vocabulary are taken for ids": vllm_trace(
        _grow._grow_chain,
        "to_target(draft_to_target, argmax(level.logits[:, 0]))",
        "(draft_to_target - jnp.arange(draft_to_target.size))[argmax(level.logits[:, 0])]",
    ),
    "draft nodes see their siblings": official_draft(
        _grow._grow_dynamic, EXPANDED, "jnp.ones((batch, width, mask.shape[-1] + width), jnp.bool_)"
    ),
    "the head observes the wrong nodes of a tree": official_trace(
        SpeculativeLoop.step,
        "features = jnp.take_along_axis(output.features, nodes[:, :, None, None], axis=1)",
        "features = output.features[:, : nodes.shape[1]]",
    ),
    "ties in a tree go to the higher index": Mutant(
        _grow._grow_dynamic,
        "_, chosen = lax.top_k(jnp.concatenate(pool_scores, axis=1), topology.num_nodes - 1)",
        "chosen = topology.num_candidates - 1 - lax.top_k(jnp.concatenate(pool_scores, axis=1)[:, ::-1], topology.num_nodes - 1)[1]",
        test_tree.check_ties, ("all tokens tie",),
    ),
    "the norm of the first chunk serves all chunks": Mutant(
        Eagle3Head.fuse, "norm(features[:, :, i])", "self.fc_norm[0](features[:, :, i])",
        test_drawn_chain.check_fused_features, ("one of each chunk",),
    ),
    "positions of a drawn chain are off by one": drawn_chain(Eagle3Drafter.propose, PROPOSED, PROPOSED.replace("+ depth", "+ depth + 1")),
    "a drawn chain is fed its draft ids": drawn_chain(
        _grow.draw_chain, "run(tokens[-1][:, None]", "run(ids[:, None]"
    ),
    "a drawn chain declares its q in bfloat16": drawn_chain(
        _grow.draw_chain, DRAWN_FROM, DRAWN_FROM.replace(" q,", " q.astype(jnp.bfloat16).astype(jnp.float32),")
    ),
    "a drawn chain stands still": drawn_chain(
        _grow.draw_chain, "probabilities(level.logits", "probabilities(first.logits"
    ),
    # Training: what the official code recorded.
    "the steps of a loss are weighed one too late": official_losses(
        ttt.against, "config.decay**step", "config.decay ** (step + 1)"
    ),
    "labels are not shifted with the step": official_losses(
        ttt.against, "_from(leaf, step + 1, size)", "_from(leaf, 1, size)"
    ),
    "the loss mask is not shifted with the step": official_losses(
        ttt.against, "_from(learn, step, size)", "_from(learn, 0, size)"
    ),
    "rows outside the draft vocabulary are learnt": official_losses(
        ttt.against, "counted & (label.best >= 0)", "counted"
    ),
    "a row sees what other rows guessed": official_losses(
        ttt._memory, "BlockMemory(past=(Segment(first, seen),), own=later)",
        "BlockMemory(past=(Segment(first, seen), *(Segment(guess, seen) for guess in later)))",
    ),
    "a row does not see its own earlier guesses": Mutant(  # small in a random head until the fourth step
        ttt._memory, "own=later)", "own=())", test_training.check_official_losses, (7,)
    ),
    "positions do not move with the step": official_losses(ttt.outputs, "stream, positions + step", "stream, positions"),
    "tokens do not move with the step": official_losses(ttt.outputs, "_from(tokens, step + 1, size)", "_from(tokens, 1, size)"),
    "every step reads the target's features": official_losses(
        ttt.outputs, "head(embedded, stream, ", "head(embedded, head.fuse(features), "
    ),
} | planted_rules.MUTANTS  # fmt: skip


if __name__ == "__main__":
    print(f"{len(MUTANTS)} planted bugs")
    for name, mutant in MUTANTS.items():
        print(f"{name}\n    in {mutant.place}, caught by {mutant.catcher}")
    sys.exit()
