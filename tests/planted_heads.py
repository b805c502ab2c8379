"""Planted bugs of heads and of their training, none of which changes the output; part of the table in ``planted_bugs``.

They are caught by what the official code and vLLM recorded, and by PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import test_drawn_chain
import test_golden
import test_training
import test_tree
from mutants import Mutant

from eagle3_jax.drafters import Eagle1Config, Eagle3Drafter, MTPDrafter, _grow
from eagle3_jax.drafters.eagle1 import Eagle1Head
from eagle3_jax.drafters.mtp import MTPModule
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3Head, FirstLayer
from eagle3_jax.training import ttt


def vllm_trace(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_golden.check_vllm_counters)


def official_trace(function: Callable, old: str, new: str) -> Mutant:
    args = ("eagle3", "trace_eagle3_greedy_fp32", 12)
    return Mutant(function, old, new, test_golden.check_official_trace, args)


def official_draft(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_golden.check_first_official_draft)


def drawn_chain(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_drawn_chain.check_drawn_chain)


def official_losses(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_training.check_official_losses, (3,))


def mtp_rounds(function: Callable, old: str, new: str) -> Mutant:
    def check() -> None:
        import test_feedback_heads  # needs torch

        test_feedback_heads.check_rounds("MTP")

    return Mutant(function, old, new, check)


DRAWN_FROM = "over_target(draft_to_target, q, vocab_size)"
PROPOSED = "positions = jnp.broadcast_to(length[:, None] + depth, tokens.shape)"
SHIFTED = "shifted = jnp.where(last, seen.next_token[:, None], shifted)"
EXPANDED = "jnp.concatenate([_take(mask, slots), itself], axis=-1)"

MUTANTS = {
    # Drafting.
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
    # Training.
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
}  # fmt: skip
