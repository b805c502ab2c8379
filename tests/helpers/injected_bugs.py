"""The injected bugs, and the check of this suite that must catch each.

Each bug is a function: it gets the original function of the library and its arguments. Bugs that
change the output are caught by the exact output distribution and by greedy equality. Bugs that only
lower acceptance leave the output lossless; recorded rounds of the official code and of vLLM, and
numpy, catch those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import greedy_texts
import jax
import jax.numpy as jnp
import tables
import test_block_distribution
import test_draw_distribution
import test_exact_distribution
import test_golden
import test_keys
import test_long_distribution
import test_sampling_distribution
import test_scripted_trees
import test_thresholds
import test_training
import test_verify
from mutants import Mutant, during, swapped

from eagle3_jax import acceptance, decode, sampling
from eagle3_jax.acceptance import Exact, verify, verify_points
from eagle3_jax.cache import Cache
from eagle3_jax.checks import sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters import Eagle3Drafter, MTPDrafter
from eagle3_jax.drafters.eagle1 import Eagle1Config
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.models import context
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.recurrent import Recurrent
from eagle3_jax.sampling import draw, keys_at, probabilities, residual, row_keys, uniforms
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.training import ttt
from eagle3_jax.tree import ancestor_mask
from eagle3_jax.verifiers import block
from eagle3_jax.verifiers.block import verify_block

Eagle3Head = Eagle3Drafter.network
propose_from_table = tables.TableDrafter.propose


# ------------------------------------------------------------------------------------------- checks


def caught_by(check: Callable, *default: Any, **options: Any) -> Callable[..., Mutant]:
    """Returns what makes a mutant for this check from a function, a bug and its arguments."""
    return lambda function, bug, *args: Mutant(
        function, bug, check, args or default, tuple(options.items())
    )


exact_distribution = caught_by(
    test_exact_distribution.test_speculation_has_exactly_the_autoregressive_distribution_with,
    "a sampled chain",
)
block_distribution = caught_by(
    test_block_distribution.test_blocks_have_exactly_the_autoregressive_distribution_with,
    "a sampled chain",
)
at_once = caught_by(test_verify.test_point_masses_are_decided_at_once_as_one_by_one, 0)
# Bugs that only the small probabilities of a real vocabulary show.
thresholds = caught_by(test_thresholds.check_thresholds, "the token rule", 28)
sampling_distribution = caught_by(test_sampling_distribution.check_sampling_distribution, runs=3)
long_distribution = caught_by(test_long_distribution.check_long_distribution, rows=2048, runs=1)
# Bugs of half a percent or less, which three million tokens show.
subtle = caught_by(
    test_long_distribution.check_long_distribution, "plain decoding", rows=8192, runs=16
)
ledger = caught_by(test_keys.test_every_key_is_used_once_and_as_documented_with)
greedy = caught_by(greedy_texts.check_greedy_output, "a random dynamic tree")
deep_accepts = caught_by(
    test_scripted_trees.test_the_targets_own_branch_is_accepted_to_its_end_and_the_text_is_plain_with,
    "one wrong sibling in front, N = G + 2",
)
vllm_trace = caught_by(test_golden.check_vllm_counters)
official_draft = caught_by(test_golden.test_the_first_drafted_tree_equals_the_official_code)
eagle2_trace = caught_by(test_golden.check_official_trace, "eagle1", "trace_eagle1_greedy_fp32", 3)
official_losses = caught_by(test_training.check_official_losses, 3)


def mtp_rounds(function: Callable, bug: Callable) -> Mutant:
    def check() -> None:
        import test_feedback_heads  # needs torch

        test_feedback_heads.test_a_head_drafts_as_its_torch_twin_round_after_round("MTP")

    return Mutant(function, bug, check)


# ------------------------------------------------------------------------------ the acceptance rule


def of_token(probs: jax.Array, draft: Any) -> jax.Array:
    """Returns ``[B N]``, the probability of each node's token in the row of that node."""
    return jnp.take_along_axis(probs, draft.tokens[:, :, None], axis=2)[:, :, 0]


def at_parent(probs: jax.Array, draft: Any) -> jax.Array:
    return jnp.take_along_axis(probs, jnp.maximum(draft.parents, 0)[:, :, None], axis=1)


def draw_bonus_from_draft(verify, draft, probs, **dice):
    return verify(draft, probs.at[:, -1].set(draft.probs[:, -1]), **dice)


def keep_target(residual, p, q):
    return p, residual(p, q)[1]


def accept_without_ratio(verify, draft, probs, *, accept, **options):
    return verify(draft, probs, accept=accept / of_token(draft.probs, draft), **options)


def ignore_elder_siblings(verify_points, draft, probs, *, accept, **options):
    p = of_token(at_parent(probs, draft), draft)
    node = jnp.arange(accept.shape[1])
    is_sibling = draft.parents[:, :, None] == draft.parents[:, None, :]
    elder = is_sibling & (node[None, None, :] < node[None, :, None])
    remaining = 1.0 - jnp.sum(jnp.where(elder, p[:, None, :], 0.0), axis=-1)
    return verify_points(draft, probs, accept=accept / remaining, **options)


def accept_padding(function, draft, *arguments, **named):
    return function(draft.replace(valid=jnp.ones_like(draft.valid)), *arguments, **named)


def accept_equality(verify, draft, probs, *, accept, **options):
    return verify(draft, probs, accept=accept - 1e-9, **options)


RULE = {
    "the bonus is sampled from the draft": exact_distribution(verify, draw_bonus_from_draft),
    "a refusal draws again from the target": exact_distribution(residual, keep_target),
    "a sampled draft is accepted like a point mass": exact_distribution(
        verify, accept_without_ratio
    ),
    "the second sibling sees the whole target again": exact_distribution(
        verify_points, ignore_elder_siblings, "a tree of deterministic siblings"
    ),
    "the path goes through every sibling that is taken": at_once(
        acceptance._elder_siblings, lambda elder, draft: jnp.zeros_like(elder(draft))
    ),
    "padding can be accepted": exact_distribution(
        acceptance.follow_accepted, accept_padding, "nothing drafted"
    ),
    "acceptance is not strict": Mutant(
        verify,
        accept_equality,
        test_verify.test_a_token_without_target_mass_is_never_accepted_nor_sampled,
        (0.0,),
    ),
    "a draw takes one uniform for all digits": Mutant(
        draw,
        lambda draw, p, uniforms: draw(p, first_only(uniforms)),
        test_draw_distribution.check_distribution_of_draw,
        ("uniform", 65),
    ),
    # At the vocabulary of Llama 3.
    "a refusal takes 1e-4 of every token away": thresholds(
        residual, lambda residual, p, q: residual(p, jnp.maximum(q, 1e-4))
    ),
}


# ------------------------------------------------------------------------------- block verification


def end_at_first_failure(verify_block, draft, probs, *, accept, choose, max_depth):
    """Cuts the path where the token rule would refuse."""
    verdict = verify_block(draft, probs, accept=accept, choose=choose, max_depth=max_depth)
    token_verdict = verify(draft, probs, accept=accept, choose=choose, max_depth=max_depth)
    fewer = token_verdict.num_accepted < verdict.num_accepted
    return jax.tree.map(
        lambda a, b: jnp.where(fewer.reshape(-1, *[1] * (a.ndim - 1)), b, a), verdict, token_verdict
    )


def draw_padding(verify_block, draft, probs, **dice):
    """Tokens after the end of a block count as sampled in the residual."""
    after = jnp.where(draft.valid[:, 1:, None], 0.0, draft.probs[:, 1:])
    return verify_block(
        draft, probs.at[:, :-1].set(jnp.maximum(probs[:, :-1] - after, 0.0)), **dice
    )


BLOCK = {
    "a block ends at its first failure": block_distribution(verify_block, end_at_first_failure),
    "the residual of a block forgets what has survived": block_distribution(
        block._survivals,
        lambda survivals, *arguments: jnp.minimum(jnp.ceil(survivals(*arguments)), 1.0),
    ),
    "the padding of a block counts as sampled": block_distribution(
        verify_block, draw_padding, "a chain cut short"
    ),
}


# ----------------------------------------------------------------------------------- draws and keys


def first_only(values: jax.Array) -> jax.Array:
    """Replaces all values of a row by the first."""
    return jnp.broadcast_to(values[..., :1], values.shape)


def share_uniform(uniforms, keys, count):
    return first_only(uniforms(keys, count))


def declare_at_draft_ids(propose, self, params, *arguments):
    draft = propose(self, params, *arguments)
    ids = params[1]
    return draft.replace(
        probs=jnp.zeros_like(draft.probs).at[..., : ids.size].set(draft.probs[..., ids])
    )


def declare_eldest(propose, *arguments):
    draft = propose(*arguments)
    eldest = jnp.argmax(draft.parents[:, :, None] == draft.parents[:, None, :], axis=-1)
    return draft.replace(probs=jnp.take_along_axis(draft.probs, eldest[:, :, None], axis=1))


def truncate_first(probabilities, logits, sampling_, *sampling_mode):
    """Applies top-k and top-p to the logits at temperature one, then the temperature."""
    columns = [
        jnp.broadcast_to(jnp.asarray(x), logits.shape[:1])
        for x in (sampling_.top_k, sampling_.top_p)
    ]
    truncated = sampling._truncate(logits.astype(jnp.float32), *columns)
    plain = sampling_.replace(top_k=jnp.zeros_like(columns[0]), top_p=jnp.ones_like(columns[1]))
    return probabilities(truncated, plain, *sampling_mode)


def tilt(draw, p, uniforms):
    factors = jnp.where(jnp.arange(p.shape[-1]) % 2 == 0, 1.005, 0.995)
    return draw(p * jnp.broadcast_to(factors, p.shape), uniforms)


def next_key(keys_at, keys, position, purpose):
    return keys_at(keys, position + 1, purpose)


LIKELIEST = "a chain of the likeliest tokens"
CHAIN = "a chain of sampled tokens"
STATIC = "a static tree of sampled tokens"
DRAWS = {
    "a draft is declared at its draft ids": long_distribution(
        propose_from_table, declare_at_draft_ids, CHAIN
    ),
    "all depths of a draft share one uniform": long_distribution(
        propose_from_table, during(uniforms, share_uniform), CHAIN
    ),
    "siblings are sampled without replacement and declared with it": long_distribution(
        propose_from_table, declare_eldest, STATIC
    ),
    "drafting and verifying share their randomness": long_distribution(
        keys_at, lambda keys_at, keys, position, purpose: keys_at(keys, position, 1), CHAIN
    ),
    "top-p comes before temperature": sampling_distribution(
        probabilities, truncate_first, "an EAGLE-3 chain of 1"
    ),
    "keys repeat every eight positions": long_distribution(
        keys_at,
        lambda keys_at, keys, position, purpose: keys_at(keys, position % 8, purpose),
        LIKELIEST,
    ),
    "two rows share a key": long_distribution(
        row_keys,
        lambda row_keys, seed, batch: row_keys(seed, batch)[jnp.arange(batch) // 2],
        LIKELIEST,
    ),
    "the first token is sampled with the key of the first verification": ledger(
        SpeculativeLoop._prefill, during(keys_at, next_key), "plain decoding"
    ),
    "a draw is tilted by half a percent": subtle(draw, tilt),
    # Which rows need which work.
    "a batch with top-p alone is not truncated": Mutant(
        sampling_mode_of,
        lambda sampling_mode_of, rows: sampling_mode_of(
            rows.replace(top_p=jnp.ones_like(rows.top_p))
        ),
        test_sampling_distribution.test_a_batch_that_truncates_in_one_way_only_follows_the_target_distribution,
        ("top-p alone", "plain decoding"),
    ),
}


# ---------------------------------------------------------------------------- loop, cache, schedule


def see_siblings(
    call, self, params, tokens, positions, mask, cache=None, aux_layers=(), length=None
):
    if cache is not None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones(mask.shape[-2:], jnp.bool_)), mask.shape)
    return call(self, params, tokens, positions, mask, cache, aux_layers, length)


def number_nodes(
    call, self, params, tokens, positions, mask, cache=None, aux_layers=(), length=None
):
    if cache is not None:
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return call(self, params, tokens, positions, mask, cache, aux_layers, length)


def shift_layers(call, self, *arguments, aux_layers=(), **named):
    return call(self, *arguments, aux_layers=tuple(layer + 1 for layer in aux_layers), **named)


def commit_in_block_order(commit, self, written, count, nodes=None):
    return commit(self, written, count, None)


def commit_one_more(commit, self, written, count, nodes=None):
    return commit(self, written, count + 1, nodes)


def ignore_stops(emit, self, state, *arguments):
    after = emit(self, state.replace(stop_tokens=jnp.full_like(state.stop_tokens, -1)), *arguments)
    return after.replace(stop_tokens=state.stop_tokens)


def advance_by_shortest_row(call, self, draft, *arguments, **named):
    verdict = call(self, draft, *arguments, **named)
    least = jnp.min(verdict.num_accepted)
    after = jnp.take_along_axis(draft.tokens, jnp.maximum(verdict.path, 0), axis=1)
    cut = jnp.pad(after, ((0, 0), (0, 1)))[:, least]
    return verdict.replace(
        path=jnp.where(jnp.arange(verdict.path.shape[1]) < least, verdict.path, -1),
        num_accepted=jnp.full_like(verdict.num_accepted, least),
        next_token=jnp.where(verdict.num_accepted > least, cut, verdict.next_token),
    )


def count_one_place_more(count, self, draft, verdict, active):
    more = count(self, draft, verdict.replace(num_accepted=verdict.num_accepted + 1), active)
    return count(self, draft, verdict, active).replace(
        num_accepted_tokens_per_pos=more.num_accepted_tokens_per_pos
    )


def leave_no_room(call, self, *arguments):
    nodes = self.loop.drafter.num_nodes
    with swapped(decode._round_up, lambda round_up, size, *more: round_up(size - nodes, *more)):
        return call(self, *arguments)


LOOP = {
    "tree nodes see their siblings": greedy(DecoderTarget.__call__, see_siblings),
    "tree nodes are positioned at their index": greedy(DecoderTarget.__call__, number_nodes),
    "tree nodes do not see their oldest ancestor": deep_accepts(
        ancestor_mask, lambda mask, parents, max_depth: mask(parents, max_depth - 1)
    ),
    "an accepted path is committed in block order": greedy(Cache.commit, commit_in_block_order),
    "a rejected token stays in the cache": greedy(Cache.commit, commit_one_more, "a random chain"),
    "a stop token inside a block does not end the row": greedy(
        SpeculativeLoop._emit, ignore_stops, "a perfect drafter", (3, 9)
    ),
    "a batch advances by its shortest row": vllm_trace(Exact.__call__, advance_by_shortest_row),
    "counters count one place too many": vllm_trace(SpeculationStats.count, count_one_place_more),
    "a cache has no room for a draft": Mutant(
        SpeculativeDecoder._call,
        leave_no_room,
        test_scripted_trees.test_a_tree_loses_no_node_where_the_text_ends_with_its_bucket,
    ),
    "a recurrent layer commits a path in block order": long_distribution(
        Recurrent.commit,
        lambda commit, self, written, length, count, nodes=None: commit(
            self, written, length, count, None
        ),
        "a static tree of sampled tokens for a recurrent target",
    ),
}


# -------------------------------------------------------------------------------------- draft heads


def leave_tokens_in_place(observe, self, params, state, seen):
    tokens = jnp.concatenate([seen.tokens[:, :1], seen.tokens[:, :-1]], axis=1)
    return observe(self, params, state, seen.replace(tokens=tokens))


def keep_accepted_drafts(observe, self, params, state, seen):
    """Commits states of the head's own guesses; only the prompt is read from the target."""

    def stale(fuse, head, features):
        fused = fuse(head, features)
        fed = features.shape[1]
        return (
            fused
            if fed > 8
            else jnp.where(jnp.arange(fed)[None, :, None] > 0, state.output[:, None], fused)
        )

    with swapped(Eagle3Head.fuse, stale):
        return observe(self, params, state, seen)


def draft_nodes_see_siblings(contexts, layers, mask, *arguments, **options):
    return contexts(layers, jnp.ones_like(mask), *arguments, **options)


HEADS = {
    "an EAGLE-1 head reads the state before the final norm": eagle2_trace(
        Eagle1Config.aux_layers.fget, lambda aux_layers, self: (self.num_target_layers,)
    ),
    "an MTP module reads the embedding at position 0": mtp_rounds(
        MTPDrafter.embed,
        lambda embed, self, params, tokens, positions: embed(self, params, tokens, positions + 1),
    ),
    "auxiliary layers are off by one": vllm_trace(DecoderTarget.__call__, shift_layers),
    "input tokens are not shifted": vllm_trace(Eagle3Drafter.observe, leave_tokens_in_place),
    "accepted drafts stay in the draft cache": vllm_trace(
        Eagle3Drafter.observe, keep_accepted_drafts
    ),
    "draft nodes see their siblings": official_draft(
        Eagle3Drafter.propose, during(context.attention_contexts, draft_nodes_see_siblings)
    ),
    "the head observes the wrong nodes of a tree": Mutant(
        SpeculativeLoop.step,
        (
            "features=on_path(output.features)",
            "features=output.features[:, : nodes.shape[1]]",
        ),
        test_golden.check_official_trace,
        ("eagle3", "trace_eagle3_greedy_fp32", 12),
    ),
}


# ----------------------------------------------------------------------------------------- training


def labels_of_first_step(shifted, values, start, size):
    return shifted(values, start if values.dtype == jnp.bool_ or values.ndim == 2 else 1, size)


def see_guesses_of_others(create_context, *arguments):
    context = create_context(*arguments)
    if not context.past:
        return context
    (first,) = context.past
    guesses = (first._replace(kv=guess) for guess in context.at_index)
    return context._replace(past=(first, *guesses), at_index=())


TRAINING = {
    "rows outside the draft vocabulary are learnt": official_losses(
        ttt.loss_and_metrics, ("trained = counted & (label.best >= 0)", "trained = counted")
    ),
    "labels are not shifted with the step": official_losses(ttt._from, labels_of_first_step),
    "a row sees what other rows guessed": official_losses(ttt._context, see_guesses_of_others),
}

BUGS = RULE | BLOCK | DRAWS | LOOP | HEADS | TRAINING
