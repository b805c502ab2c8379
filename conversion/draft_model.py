"""A language model as the drafter of another one: what the doctor asks of the two."""

from __future__ import annotations

from eagle3_jax.conversion.checks import Check
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.heads.head import Suspects
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.conversion.vocabulary import read_tokenizer

SUSPECTS = Suspects(
    first="another tokenizer, or a model that has nothing to do with this target",
    later="its rope or its positions, which text would show as well: let it generate alone",
)


def examine(target: TargetCheckpoint, draft: TargetCheckpoint) -> list[Check]:
    """Whether both speak of the same tokens, and whether drafting is cheap at all."""
    return [_size(target, draft), _vocabulary(target, draft), _tokenizer(target, draft)]


def _size(target: TargetCheckpoint, draft: TargetCheckpoint) -> Check:
    ours, theirs = draft.config, target.config
    detail = f"{ours.num_layers} layers of width {ours.width} beside {theirs.num_layers} of width {theirs.width}"
    if ours.num_layers * ours.width >= theirs.num_layers * theirs.width:
        return Check("size", "warning", f"{detail}: a draft token costs as much as one of the target's")
    return Check("size", "ok", detail)


def _vocabulary(target: TargetCheckpoint, draft: TargetCheckpoint) -> Check:
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        return Check("vocabulary", "failure", f"{ours} tokens, target {theirs}; a draft model needs the target's own")
    return Check("vocabulary", "ok", f"{ours} tokens, as the target's")


def _tokenizer(target: TargetCheckpoint, draft: TargetCheckpoint) -> Check:
    from eagle3_jax.drafters.draft_model import told_apart

    try:
        tokenizers = [read_tokenizer(one.source / "tokenizer.json") for one in (draft, target)]
    except CheckpointError as error:
        return Check("tokenizer", "failure", str(error))
    own, wanted = (None if one is None else one.get_vocab(with_added_tokens=True) for one in tokenizers)
    if own is None or wanted is None:
        who = " and ".join(name for name, one in (("draft model", own), ("target", wanted)) if one is None)
        return Check("tokenizer", "warning", f"no tokenizer.json of the {who}: nobody can tell whether ids agree")
    if (difference := told_apart(own, wanted)) is not None:
        return Check("tokenizer", "failure", f"{difference}; a draft model needs the target's own")
    return Check("tokenizer", "ok", f"the same {len(own)} tokens under the same ids")
