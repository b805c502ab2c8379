"""Why is my acceptance low? Checks of a target and a head together, each with a verdict and a reason."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conversion import kinds, rules
from conversion.acceptance import Agreement, forced_agreement
from conversion.errors import CheckpointError
from conversion.fields import Fields
from conversion.files import read_json
from conversion.heads import HEADS, HeadCheckpoint
from conversion.heads.eagle3 import named_aux_layers
from conversion.heads.eagle3_export import is_default_aux
from conversion.native import is_native
from conversion.reading import read_head, read_target
from conversion.targets import TargetCheckpoint
from eagle3_jax.models.config import MOST, RopeConfig, default_aux_layers

Status = Literal["ok", "warning", "failure", "skipped"]

# Below this share of right first drafts a head is no better than a guess.
_NO_BETTER_THAN_GUESSING = 0.02


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warning`` (works, but probably not as meant), ``failure``, or ``skipped``.
        detail: What was found and, if something is wrong, what to do.
    """

    name: str
    status: Status
    detail: str


def diagnose(
    target_dir: str | Path,
    drafter_dir: str | Path,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> list[Check]:
    """Examine a target and a draft head.

    Args:
        target_dir: The target's directory.
        drafter_dir: The head's directory.
        prompts: Token ids to measure agreement on; random ones when left out, which says less.
        seed: Of the random prompts.

    Returns:
        All checks, in the order in which problems should be solved. A checkpoint that cannot be read is a
        ``failure``, not an exception.
    """
    checks: list[Check] = []
    target = _attempt(checks, "target", lambda: read_target(target_dir), _describe_target)
    _attempt(checks, "generation of the head", lambda: _generation(drafter_dir), str)
    head = None
    if checks[-1].status == "ok":
        config = None if target is None else target.config
        head = _attempt(checks, "head", lambda: read_head(drafter_dir, config), _describe_head)
    if target is None or head is None:
        reason = "needs a target and a head that can be read"
        return [*checks, *(Check(name, "skipped", reason) for name in _NEED_BOTH)]
    broken = [_weights("weights of the target", target.params), _weights("weights of the head", head.head)]
    checks += [
        _widths(target, head),
        _vocabulary(target, head),
        *_of_eagle3(target, head),
        _positions(target, head),
        _dtypes(target, head),
        _tokenizer(target, head),
        _chat_template(target, head),
        *broken,
    ]
    if any(check.status == "failure" for check in broken):
        return [*checks, Check("agreement", "skipped", "the weights are broken")]
    return [*checks, _agreement(target, head, prompts, seed)]


_NEED_BOTH = (
    "widths",
    "vocabulary",
    "auxiliary layers",
    "norm flags",
    "rope",
    "positions",
    "dtype",
    "tokenizer",
    "chat template",
    "weights of the target",
    "weights of the head",
    "agreement",
)


def _attempt(checks: list[Check], name: str, read: Callable[[], Any], describe: Callable[[Any], str]) -> Any:
    """The result, or ``None`` with a failed check."""
    try:
        result = read()
    except CheckpointError as error:
        checks.append(Check(name, "failure", str(error)))
        return None
    checks.append(Check(name, "ok", describe(result)))
    return result


def _generation(directory: str | Path) -> str:
    kind = kinds.identify(directory)
    kinds.refuse_all_but_heads(kind, directory, "give a draft head")
    return HEADS[kind].label


def _describe_target(target: TargetCheckpoint) -> str:
    config, label = target.config, target.family.label
    return f"{label} decoder, {config.num_layers} layers, width {config.width}, vocabulary {config.vocab_size}"


def _describe_head(head: HeadCheckpoint) -> str:
    return f"{head.dialect} layout, {head.config.num_layers} layer(s), complete"


def _widths(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    # Reading refuses a head that does not fit, so what is left is to say what was found.
    config = head.config
    own = "shares the target's embedding" if head.embedding is None else "brings its own embedding"
    detail = f"head width {config.width}, reads features of width {config.target_width}, {own}"
    if head.embedding is not None and config.width == target.config.width:
        used = np.asarray(target.params["embedding"], np.float32)
        if not np.array_equal(used, np.asarray(head.embedding, np.float32)):
            return Check(
                "widths",
                "warning",
                f"{detail}, which differs from the target's; it is used as it is. If it was never trained, "
                "remove embed_tokens.weight from the head",
            )
    return Check("widths", "ok", detail)


def _vocabulary(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    config = head.config
    ids = np.arange(config.draft_vocab_size) if head.draft_to_target is None else head.draft_to_target
    detail = f"{ids.size} of {config.vocab_size} tokens can be drafted; d2t is one to one and in range"
    if ids.size < config.vocab_size and np.array_equal(ids, np.arange(ids.size)):
        return Check(
            "vocabulary",
            "warning",
            f"d2t is all zero: the draft vocabulary is the first {ids.size} tokens. Unless the head was trained so, "
            "its map was lost in an export; fetch the original head",
        )
    absent = sorted(set(target.stop_tokens) - set(ids.tolist()))
    if absent:
        detail += f"; stop tokens {absent} can never be drafted, so the last token of an answer is always the target's"
    return Check("vocabulary", "ok", detail)


def _head_fields(head: HeadCheckpoint) -> Fields:
    """The head's configuration file as it is; empty for a native head, whose fields are all explicit."""
    if is_native(head.source):
        return Fields({}, str(head.source))
    path = head.source / "config.json"
    return Fields(read_json(path), str(path))


def _aux_layers(head: HeadCheckpoint) -> Check:
    layers, name = head.config.aux_layers, "auxiliary layers"
    if hasattr(head.config, "num_target_layers"):
        return Check(name, "ok", "none: this method reads the target's state after its final norm")
    if not is_native(head.source) and named_aux_layers(_head_fields(head)) is None:
        detail = f"{layers}, the default 2, L//2, L-3: config.json names none"
        if head.dialect == "eagle":
            return Check(name, "ok", f"{detail}, as official heads do")
        return Check(
            name,
            "warning",
            f"{detail}. If the head was trained on other layers its drafts are useless; "
            "add eagle_aux_hidden_state_layer_ids",
        )
    if layers[0] == 1:
        one_more = tuple(layer + 1 for layer in layers)
        outputs = f"{layers} starts with 1, as lists of layer outputs do; an id here means the input of that layer"
        if one_more == _default_of(head):
            return Check(
                name,
                "warning",
                f"{outputs}, and {one_more} is the default of this target: the head was most likely trained on those, "
                "so write them into its config.json",
            )
        return Check(name, "warning", f"{outputs}. If agreement is poor, try {list(one_more)}")
    return Check(name, "ok", f"{layers}, {'the default' if is_default_aux(head) else 'named in config.json'}")


def _of_eagle3(target: TargetCheckpoint, head: HeadCheckpoint) -> list[Check]:
    """What heads of that line may get wrong and others do not have."""
    if head.method == "eagle3":
        return [_aux_layers(head), _norm_flags(head), _rope(target, head)]
    reason = f"asked of EAGLE-3 heads; this is {HEADS[head.method].label}"
    return [Check(name, "skipped", reason) for name in ("auxiliary layers", "norm flags", "rope")]


def _default_of(head: HeadCheckpoint) -> tuple[int, ...] | None:
    try:
        return default_aux_layers(head.num_target_layers or 0)
    except ValueError:
        return None


def _norm_flags(head: HeadCheckpoint) -> Check:
    names = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    if not hasattr(head.config, names[0]):
        return Check("norm flags", "ok", "none, of this method")
    detail = ", ".join(f"{name} {getattr(head.config, name)}" for name in names)
    fields = _head_fields(head)
    if head.dialect == "speculators" and fields.get("norm_before_residual") is None:
        return Check(
            "norm flags",
            "warning",
            f"{detail}; norm_before_residual is not in config.json, and this layout's default is True",
        )
    if head.dialect == "sglang" and head.config.norm_output and not head.config.fc_norm:
        return Check(
            "norm flags",
            "warning",
            f"{detail}; old SpecForge files meant the norm before lm_head by norm_output, not the EAGLE-3.1 feedback. "
            "If the second draft token collapses, set it to false",
        )
    return Check("norm flags", "ok", detail)


def _rope(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    ours, theirs = (config.layers[0].mixer.rope or RopeConfig() for config in (head.config, target.config))
    detail = f"head: {ours.type}, theta {ours.theta:g}; target: {theirs.type}, theta {theirs.theta:g}"
    if ours == theirs:
        return Check("rope", "ok", detail)
    if head.dialect == "eagle" and ours.type == "default" and ours.theta == 10_000.0:
        return Check(
            "rope", "ok", f"{detail}. Heads trained by the official code have theta 10000 whatever the target has"
        )
    return Check(
        "rope",
        "warning",
        f"{detail}. If acceptance falls with the length of the text, set the head's rope to what it was trained with "
        "(the target's, or theta 10000)",
    )


def _positions(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    ours, theirs = head.config.max_positions, target.config.max_positions
    if ours == MOST:
        return Check("positions", "ok", "the head knows none")
    detail = f"head {ours}, target {theirs}"
    if ours < theirs:
        return Check("positions", "warning", f"{detail}; drafts beyond {ours} are extrapolation (outputs stay exact)")
    return Check("positions", "ok", detail)


def _dtypes(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    detail = f"head {head.dtype}, target {target.dtype}"
    if head.dtype != target.dtype:
        return Check("dtype", "warning", f"{detail}; the head is cast to the target's precision when it is loaded")
    return Check("dtype", "ok", detail)


def _tokenizer(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    return _same_file(
        "tokenizer",
        *(_read_bytes(directory / "tokenizer.json") for directory in (target.source, head.source)),
        absent="the target has no tokenizer.json; prompts must be token ids",
    )


def _chat_template(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    return _same_file(
        "chat template",
        *(_template(directory) for directory in (target.source, head.source)),
        absent="the target has none; a head trained on chats accepts less on bare text",
    )


def _same_file(name: str, ours: bytes | None, theirs: bytes | None, *, absent: str) -> Check:
    """Compare what the target has with what the head has, if it has any."""
    if ours is None:
        return Check(name, "warning", absent)
    digest = hashlib.sha256(ours).hexdigest()[:12]
    if theirs is not None and theirs != ours:
        other = hashlib.sha256(theirs).hexdigest()[:12]
        return Check(
            name, "warning", f"sha256 {digest} at the target but {other} at the head; use what it was trained with"
        )
    return Check(name, "ok", f"sha256 {digest}{'' if theirs is None else ', the same at the head'}")


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _template(directory: Path) -> bytes | None:
    """The chat template: a file of its own, or a field of the tokenizer's configuration."""
    own = _read_bytes(directory / "chat_template.jinja")
    if own is not None or not (directory / "tokenizer_config.json").is_file():
        return own
    value = read_json(directory / "tokenizer_config.json").get("chat_template")
    return None if value is None else (value if isinstance(value, str) else json.dumps(value)).encode()


def _weights(name: str, params: rules.Params) -> Check:
    """NaN, infinity, and tensors that training never touched."""
    constant = []
    for path, read in rules.flatten(params):
        leaf = np.asarray(read)  # joined here, one at a time
        if not _all_finite(leaf):
            return Check(name, "failure", f"{path} holds NaN or infinity; fetch or export the checkpoint again")
        if leaf.size > 1 and not path.endswith(".bias") and bool((leaf == leaf.flat[0]).all()):
            if leaf.ndim > 1:
                return Check(
                    name,
                    "failure",
                    f"{path} is {float(leaf.flat[0]):g} throughout; it was never trained or never saved",
                )
            constant.append(path)
    if constant:
        return Check(name, "warning", f"{', '.join(constant[:3])}: the same value throughout, as before training")
    return Check(name, "ok", "finite, none constant")


def _all_finite(leaf: np.ndarray) -> bool:
    if leaf.dtype.itemsize != 2:
        return bool(np.isfinite(leaf).all())
    # Half precisions have no fast isfinite in numpy: an exponent of all ones is infinity or NaN.
    exponent = np.uint16(0x7C00 if leaf.dtype == np.float16 else 0x7F80)
    return not bool(((leaf.view(np.uint16) & exponent) == exponent).any())


def _agreement(
    target: TargetCheckpoint, head: HeadCheckpoint, prompts: Sequence[Sequence[int]] | None, seed: int
) -> Check:
    given = prompts is not None
    random = np.random.default_rng(seed).integers(0, target.config.vocab_size, (5, 8))
    agreement = forced_agreement(target, head, random.tolist() if prompts is None else prompts)
    detail = "conditional acceptance " + " / ".join(f"{rate:.2f}" for rate in agreement.rates)
    detail += f" at draft positions 0 to {len(agreement.rates) - 1}"
    detail += "" if given else " on random prompts, which say little; give prompts of your own"
    cause = suspected_cause(agreement)
    if cause is None:
        return Check("agreement", "ok", detail)
    return Check("agreement", "failure" if given else "warning", f"{detail}. {cause}")


def suspected_cause(agreement: Agreement) -> str | None:
    """What a signature of rates usually comes from; ``None`` when there is nothing odd about it."""
    first, second = agreement.rates[:2]
    if first < _NO_BETTER_THAN_GUESSING:
        return (
            "Even the first draft token is wrong: suspect a lost d2t, other auxiliary layers, a shifted token, "
            "or a head of another target"
        )
    # Needs drafts enough to tell a collapse from bad luck.
    if agreement.counts[1] >= 10 and second < 0.25 * first:
        return "The first draft token is fine and the second is not: suspect the feedback norm (norm_output)"
    return None
