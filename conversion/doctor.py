"""Checks a target, alone or together with a drafter: finds reasons for a low acceptance."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.acceptance import Agreement, forced_agreement
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.heads import HEADS, HeadCheckpoint
from eagle3_jax.conversion.heads.head import Check, Suspects
from eagle3_jax.conversion.reading import (
    Opened,
    head_of,
    modules_of,
    note_of_modules,
    open_checkpoint,
    read_target,
    target_of,
)
from eagle3_jax.conversion.sidecars import (
    described_tokens,
    read_sidecar,
    tokenizer_config_of,
    tokenizer_of,
)
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.drafters.draft_model import first_vocab_difference
from eagle3_jax.files.sources import OWN_MODULES
from eagle3_jax.models.config import MOST
from eagle3_jax.text.template import ChatTemplate

# Below this share of right first drafts a drafter is no better than a guess.
_NO_BETTER_THAN_GUESSING = 0.02
# Cost of the first draft token of a round in plain steps: v + c - 1 with the defaults of `eagle3
# plan speedup`.
_HARDLY_PAYS = 0.32

_DRAFT_MODEL = Suspects(
    first="another tokenizer, or a model that has nothing to do with this target",
    later=(
        "its rope or its positions; let it generate without a target, because its text would show"
        " that as well"
    ),
)

Drafter = HeadCheckpoint | TargetCheckpoint


def diagnose(
    target_dir: str | Path,
    drafter_dir: str | Path | None = None,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    layer_ids: str | None = None,
) -> list[Check]:
    """Examines a target, alone or together with a draft head or a draft model.

    Args:
        target_dir: Directory of the target.
        drafter_dir: Directory of the head or of the smaller language model; ``mtp``, or the
            target's directory, for MTP modules in it; ``None`` to examine the target alone.
        prompts: Token ids of the prompts that agreement is measured on. Default: random ones, which
            are less informative.
        seed: Seed of the random prompts.
        layer_ids: Whether the numbers of the head's auxiliary layers count layers that the residual
            stream enters (``entering``) or leaves (``leaving``).

    Returns:
        All checks, in the order in which problems should be solved. A checkpoint that cannot be
        read is a ``failure``, not an exception.
    """
    checks: list[Check] = []
    target = _attempt(checks, "target", lambda: read_target(target_dir), _describe_target)
    if drafter_dir is None:
        if target is not None:
            checks += [*_of_target(target), _weights("weights", target.params)]
        return checks

    is_named = str(drafter_dir) == OWN_MODULES
    source = target_dir if is_named else drafter_dir
    opened = _attempt(checks, "method", lambda: open_checkpoint(source), _describe_method)
    drafter = None
    config = None if target is None else target.config
    is_own = Path(source).resolve() == Path(target_dir).resolve()
    if opened is not None and is_own and (is_named or note_of_modules(opened)):
        checks[-1] = Check("method", "ok", "MTP modules in the target's files")
        drafter = _attempt(checks, "head", lambda: modules_of(opened, config), _describe_head)
    elif opened is not None and opened.kind in HEADS:
        drafter = _attempt(
            checks, "head", lambda: head_of(opened, config, layer_ids=layer_ids), _describe_head
        )
    elif opened is not None:
        drafter = _attempt(checks, "draft model", lambda: target_of(opened), _describe_target)
    if target is None or drafter is None:
        reason = "needs a target and a drafter that can be read"
        return [*checks, *(Check(name, "skipped", reason) for name in _NEED_BOTH)]

    if isinstance(drafter, HeadCheckpoint):
        name = "head"
        params = drafter.head
        checks += [_widths(target, drafter), _vocabulary(target, drafter)]
        checks += HEADS[drafter.method].examine(target, drafter)
    else:
        name = "draft model"
        params = drafter.params
        checks += [_size(target, drafter), *_tokens(target, drafter)]
    checks += [_positions(target, drafter, name), _dtypes(target, drafter, name)]

    # The tokens of a draft model have been compared one by one.
    if name == "head":
        absent = "the target has no tokenizer.json; prompts must be token ids"
        read = functools.partial(read_sidecar, name="tokenizer.json")
        checks.append(_same_file("tokenizer", read, target, drafter, absent))
    absent = "the target has none; a head trained on chats accepts less on bare text"
    checks += [
        _same_file("chat template", _template, target, drafter, absent),
        _stop_tokens(target),
        _weights("weights of the target", target.params),
        _weights(f"weights of the {name}", params),
    ]

    failure = next((check.name for check in checks if check.status == "failure"), None)
    if failure is not None:
        return [*checks, Check("agreement", "skipped", f"{failure}: see above")]
    return [*checks, _agreement(target, drafter, prompts, seed)]


# Checks of every drafter for which the target is needed as well.
_NEED_BOTH = (
    "vocabulary", "positions", "dtype", "tokenizer", "chat template", "stop tokens",
    "weights of the target", "agreement",
)  # fmt: skip


def _attempt(
    checks: list[Check], name: str, read: Callable[[], Any], describe: Callable[[Any], str]
) -> Any:
    """Returns the result of ``read``, or ``None`` after an error, and appends a check of it."""
    try:
        result = read()
    except CheckpointError as error:
        checks.append(Check(name, "failure", str(error)))
        return None
    checks.append(Check(name, "ok", describe(result)))
    return result


def _describe_method(opened: Opened) -> str:
    return f"{HEADS[opened.kind].label} head" if opened.kind in HEADS else "draft model"


def _of_target(target: TargetCheckpoint) -> list[Check]:
    """Checks the files of a target that turn texts into token ids, and end them."""
    try:
        tokenizer = tokenizer_of(target.source)
        template = ChatTemplate.from_config(tokenizer_config_of(target.source))
        question = template and template.render([{"role": "user", "content": "Why?"}])
    except ValueError as error:
        return [Check("tokenizer and chat template", "failure", str(error)), _stop_tokens(target)]

    if tokenizer is None:
        tokens = Check("tokenizer", "warning", "no tokenizer.json; prompts must be token ids")
    else:
        size = tokenizer.get_vocab_size()
        width = target.config.vocab_size
        excess = "; text with the tokens beyond these is refused" if size > width else ""
        tokens = Check.report(
            "tokenizer", f"{size} tokens, vocabulary of the target {width}", excess
        )

    if question is None:
        chat = Check(
            "chat template",
            "warning",
            "none; texts are continued, and `chat` and `--chat` are refused",
        )
    else:
        chat = Check("chat template", "ok", f"the question 'Why?' becomes {short(question)}")
    return [tokens, chat, _stop_tokens(target)]


def _stop_tokens(target: TargetCheckpoint) -> Check:
    if not target.stop_tokens:
        return Check("stop tokens", "warning", "none; only the limit of new tokens ends a text")
    return Check("stop tokens", "ok", described_tokens(target.stop_tokens, target.source))


def _describe_target(target: TargetCheckpoint) -> str:
    config = target.config
    label = target.family.label
    described = (
        f"{label} decoder, {config.num_layers} layers, width {config.width}, vocabulary"
        f" {config.vocab_size}"
    )
    return (
        described
        if target.quantisation is None
        else f"{described}, quantised: {target.quantisation.words}"
    )


def _describe_head(head: HeadCheckpoint) -> str:
    title = HEADS[head.method].title(head.config)
    described = f"{title}, {head.dialect} layout, {head.config.num_layers} layer(s), complete"
    return f"{described}; {head.note}" if head.note else described


def _widths(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    # Reading refuses a head that does not fit, so this only reports.
    config = head.config
    warning = ""
    source = (
        "shares the target's embedding" if head.embedding is None else "brings its own embedding"
    )
    if head.embedding is not None and config.width == target.config.width:
        used = np.asarray(target.params["embedding"], np.float32)
        if not np.array_equal(used, np.asarray(head.embedding, np.float32)):
            warning = (
                ", which differs from the target's; it is used as it is. If it was never trained,"
                " remove embed_tokens.weight from the head"
            )
    detail = f"head width {config.width}, reads features of width {config.target_width}, {source}"
    return Check.report("widths", detail, warning)


def _vocabulary(target: TargetCheckpoint, head: HeadCheckpoint) -> Check:
    config = head.config
    ids = (
        np.arange(config.draft_vocab_size) if head.draft_to_target is None else head.draft_to_target
    )
    if ids.size < config.vocab_size and np.array_equal(ids, np.arange(ids.size)):
        return Check(
            "vocabulary",
            "warning",
            f"d2t is all zero: the draft vocabulary is the first {ids.size} tokens. Unless the head"
            " was trained so, its map was lost in an export; fetch the original head",
        )

    absent = sorted(set(target.stop_tokens) - set(ids.tolist()))
    effect = (
        f"; stop tokens {absent} can never be drafted, so the last token of an answer is always the"
        " target's"
    )
    return Check.report(
        "vocabulary",
        f"{ids.size} of {config.vocab_size} tokens can be drafted; d2t is one to one and in range"
        + (effect if absent else ""),
    )


def _positions(target: TargetCheckpoint, drafter: Drafter, name: str) -> Check:
    ours = drafter.config.max_positions
    theirs = target.config.max_positions
    if ours == MOST:
        return Check.report("positions", f"the {name} has none")
    beyond = f"; drafts beyond {ours} are extrapolation (outputs stay exact)"
    if isinstance(drafter, TargetCheckpoint):
        beyond = f"; sequences of more than {ours} tokens are refused"
    return Check.report(
        "positions", f"{name} {ours}, target {theirs}", beyond if ours < theirs else ""
    )


def _dtypes(target: TargetCheckpoint, drafter: Drafter, name: str) -> Check:
    cast = f"; the {name} is cast to the target's precision when it is loaded"
    detail = f"{name} {drafter.dtype}, target {target.dtype}"
    return Check.report("dtype", detail, cast if drafter.dtype != target.dtype else "")


def _size(target: TargetCheckpoint, draft: TargetCheckpoint) -> Check:
    ours = draft.config
    theirs = target.config
    detail = (
        f"{ours.num_layers} layers of width {ours.width}, target {theirs.num_layers} layers of"
        f" width {theirs.width}"
    )
    is_large = ours.num_layers * ours.width >= theirs.num_layers * theirs.width
    return Check.report(
        "size", detail, ": a draft token costs as much as one of the target's" if is_large else ""
    )


def _tokens(target: TargetCheckpoint, draft: TargetCheckpoint) -> list[Check]:
    """Checks that a draft model has the target's tokens under the same ids."""
    ours = draft.config.vocab_size
    theirs = target.config.vocab_size
    advice = "a draft model needs the target's own"
    vocabulary = Check("vocabulary", "ok", f"{ours} tokens, as the target's")
    if ours != theirs:
        vocabulary = Check("vocabulary", "failure", f"{ours} tokens, target {theirs}; {advice}")

    try:
        tokenizers = {
            "draft model": tokenizer_of(draft.source),
            "target": tokenizer_of(target.source),
        }
    except CheckpointError as error:
        return [vocabulary, Check("tokenizer", "failure", str(error))]
    missing = [name for name, tokenizer in tokenizers.items() if tokenizer is None]
    if missing:
        detail = (
            f"no tokenizer.json of the {' and '.join(missing)}, so token ids could not be compared"
        )
        return [vocabulary, Check("tokenizer", "warning", detail)]

    first, second = (
        tokenizer.get_vocab(with_added_tokens=True)
        for tokenizer in tokenizers.values()
        if tokenizer
    )
    if (difference := first_vocab_difference(first, second)) is not None:
        return [vocabulary, Check("tokenizer", "failure", f"{difference}; {advice}")]
    return [
        vocabulary,
        Check("tokenizer", "ok", f"the same {len(first)} tokens under the same ids"),
    ]


def _same_file(
    name: str,
    read: Callable[[Path], bytes | None],
    target: TargetCheckpoint,
    drafter: Drafter,
    absent: str,
) -> Check:
    """Compares a file of the target with the drafter's, if it has one; ``read`` opens both."""
    contents = [read(checkpoint.source) for checkpoint in (target, drafter)]
    ours, theirs = (hashlib.sha256(content or b"").hexdigest()[:12] for content in contents)

    if contents[0] is None:
        return Check(name, "warning", absent)
    if contents[1] is None:
        return Check.report(name, f"sha256 {ours}")
    if ours == theirs:
        return Check.report(name, f"sha256 {ours}, the same at the head")
    warning = f" but {theirs} at the head; use what it was trained with"
    return Check.report(name, f"sha256 {ours} at the target", warning)


def _template(directory: Path) -> bytes | None:
    """Reads the chat template: a separate file, or a field of the tokenizer's configuration."""
    template = tokenizer_config_of(directory).get("chat_template")
    if template is None:
        return None
    return (template if isinstance(template, str) else json.dumps(template)).encode()


def _weights(name: str, params: rules.Params) -> Check:
    """Looks for NaN, infinity, and tensors that training never changed."""
    constant = []
    for path, lazy_leaf in rules.flatten(params):
        # Assembled here, so that memory holds one leaf at a time.
        leaf = np.asarray(lazy_leaf)
        if not np.isfinite(leaf).all():
            return Check(
                name,
                "failure",
                f"{path} holds NaN or infinity; fetch or export the checkpoint again",
            )

        # A bias may be zero throughout after training too.
        if leaf.size <= 1 or path.endswith(".bias"):
            continue
        first = leaf.flat[0]
        if not bool((leaf == first).all()):
            continue
        if leaf.ndim > 1:
            detail = f"{path} is {float(first):g} throughout; it was never trained or never saved"
            return Check(name, "failure", detail)
        constant.append(path)

    if constant:
        return Check(
            name,
            "warning",
            f"{', '.join(constant[:3])}: the same value throughout, as before training",
        )
    return Check(name, "ok", "finite, none constant")


def _agreement(
    target: TargetCheckpoint, drafter: Drafter, prompts: Sequence[Sequence[int]] | None, seed: int
) -> Check:
    random = np.random.default_rng(seed).integers(0, target.config.vocab_size, (5, 8))
    agreement = forced_agreement(target, drafter, random.tolist() if prompts is None else prompts)
    rates = " / ".join(f"{rate:.2f}" for rate in agreement.rates)
    detail = f"conditional acceptance {rates} at draft positions 0 to {len(agreement.rates) - 1}"

    if prompts is None:
        detail += " on random prompts, which say little; give your own (--prompts FILE)"

    suspects = (
        HEADS[drafter.method].suspects if isinstance(drafter, HeadCheckpoint) else _DRAFT_MODEL
    )
    cause = suspected_cause(agreement, suspects)
    if cause is not None:
        return Check("agreement", "warning" if prompts is None else "failure", f"{detail}. {cause}")
    advice = (
        ". Nothing looks broken, but a token that is drafted and verified costs about"
        f" {_HARDLY_PAYS} plain steps and gains less than that here: was it trained for this"
        " target, and for such texts?"
    )
    return Check.report("agreement", detail, advice if agreement.rates[0] < _HARDLY_PAYS else "")


def suspected_cause(agreement: Agreement, suspects: Suspects) -> str | None:
    """Returns the usual cause of such rates; ``None`` if they are not suspicious."""
    first, second = (*agreement.rates, 0.0)[:2]
    if first < _NO_BETTER_THAN_GUESSING:
        return f"Even the first draft token is wrong: suspect {suspects.first}"
    # Few drafts cannot distinguish a collapse from bad luck.
    if len(agreement.rates) > 1 and agreement.counts[1] >= 10 and second < 0.25 * first:
        return f"The first draft token is fine and the second is not: suspect {suspects.later}"
    return None
