"""Writes docs/published.md: ``python docs/recorded/published_models.py``.

The library reads the configuration of every published model in ``tests/published``. Where the names
and shapes of its tensors are known, they are read too, as arrays of zeros without memory. The page
repeats the library's answers; a test compares it with what this writes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from page_tables import ROOT, table

from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import Family, described
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.heads import HEADS, HeadCheckpoint
from eagle3_jax.conversion.heads.head import HeadKind, check_fit
from eagle3_jax.conversion.heads.mtp import modules_config
from eagle3_jax.conversion.hf_config import stack_fields
from eagle3_jax.conversion.native import TARGET
from eagle3_jax.conversion.quantised import read_quantised
from eagle3_jax.conversion.reading import Opened, head_of, modules_of, recognise
from eagle3_jax.conversion.targets import EVEN_WIDTHS, read_target
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.draft_model import draft_model
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget

PAGE = ROOT / "docs" / "published.md"
MODELS = ROOT / "tests" / "published"

_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I64": np.int64,
    "BOOL": np.bool_,
}
# A longer answer is cut at the end of a clause.
_NOTE = 150
# The names of methods, where a file alone does not tell them.
_METHODS = {
    "eagle1": "EAGLE-1, EAGLE-2",
    "eagle3": "EAGLE-3",
    "p-eagle": "P-EAGLE",
    "medusa": "Medusa",
    "mtp": "MTP",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "domino": "Domino",
    "draft-model": "draft model",
    "gemma4-assistant": "Gemma 4 assistant",
}
# Methods whose files the reader of another method reads.
_READERS = {"dspark": "dflash", "domino": "dflash"}

READ = "**read**"
CONFIGURATION = "configuration read"
REFUSED = "refused"


class Answer(NamedTuple):
    """What the library says of a model."""

    status: str  #: ``READ``, ``CONFIGURATION`` or ``REFUSED``.
    label: str  #: Its family or method.
    written_as: str = ""  #: The layouts that it can be written in.
    note: str = ""  #: The reason of a refusal, or what a user should know.


def models(name: str) -> list[dict[str, Any]]:
    """Returns the models of a file in ``tests/published``."""
    lines = (MODELS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def expanded(pattern: str) -> Iterator[str]:
    """Yields the names of a pattern, whose braces hold numbers and ranges: ``{0-2,5}``."""
    texts = re.split(r"\{([^}]*)\}", pattern)
    for numbers in itertools.product(*map(_numbers, texts[1::2])):
        pairs = itertools.zip_longest(texts[::2], map(str, numbers), fillvalue="")
        yield "".join(itertools.chain.from_iterable(pairs))


def _numbers(ranges: str) -> list[int]:
    bounds = (part.split("-") for part in ranges.split(","))
    return [number for pair in bounds for number in range(int(pair[0]), int(pair[-1]) + 1)]


# The tokens of Gemma 4's assistants by centroid.
_ORDERING = "masked_embedding.token_ordering"


def tensors_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a model, all zero; lists of tokens are in order."""
    tensors: dict[str, Any] = {
        name: np.broadcast_to(np.zeros((), _DTYPES[dtype]), shape)
        for pattern, (dtype, shape) in model.get("tensors", {}).items()
        for name in expanded(pattern)
    }
    if "t2d" in tensors:
        tensors["t2d"] = np.arange(tensors["t2d"].size) < tensors["d2t"].size
    if _ORDERING in tensors:
        tensors[_ORDERING] = np.arange(tensors[_ORDERING].size)
    return tensors


@functools.cache
def targets() -> dict[str, tuple[dict[str, Any], Answer, DecoderConfig | None]]:
    """Returns every target, the answer to it, and its description if its configuration is read."""
    answers = {}
    for model in models("targets"):
        fields = Fields(model["config"], "config.json")
        config = None
        label = _family(fields)
        try:
            family, language_fields, wrapper = described(fields)
            config = family.read_config(language_fields)
            label = family.label
            note = "" if wrapper is None else "language model only"
            answer = _read_target(model, family, config, note)
        except CheckpointError as error:
            # The description remains: drafters are checked against it.
            answer = Answer(REFUSED, label, note=shortened(error, model["name"]))
        answers[model["name"]] = (model, answer, config)
    return answers


def _read_target(
    model: Mapping[str, Any], family: Family, config: DecoderConfig, note: str
) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if "hf_quant_config" in model:
            text = json.dumps(model["hf_quant_config"])
            (directory / "hf_quant_config.json").write_text(text, encoding="utf-8")

        stored = Stored(directory, model["config"], tensors_of(model))
        written_as = _target_layouts(family, config)
        if stored.tensors:
            checkpoint = read_target(stored)
            words = "" if checkpoint.quantisation is None else checkpoint.quantisation.words
            return Answer(READ, family.label, written_as, "; ".join(filter(None, (note, words))))
        words = _quantisation(stored)
        note = "; ".join(filter(None, (note, words)))
        return Answer(CONFIGURATION, family.label, written_as, note)


def _quantisation(stored: Stored) -> str:
    """Returns the format of quantised weights, which is recognised without them."""
    try:
        read_quantised({}, stored.fields, stored.directory)
    except CheckpointError as error:
        if format := re.search(r"quantised \((.*)\) and holds no scale", str(error)):
            return format[1]
        raise
    return ""


def _family(fields: Fields) -> str:
    text = fields.section("text_config")
    return f"`{text.get('model_type') or fields.get('model_type')}`"


def _target_layouts(family: Family, config: DecoderConfig) -> str:
    """Returns the layouts of a target: its family's, if that can express it, and the native one."""
    try:
        any_heads = family.model_type not in EVEN_WIDTHS
        fields = stack_fields(config, "bfloat16", any_heads=any_heads)
        fields |= family.write_fields(config)
        fields["tie_word_embeddings"] = config.tie_embeddings
        is_expressed = family.read_config(Fields(fields, "written")) == config
    except ValueError:
        is_expressed = False
    return "huggingface, jax" if is_expressed else "jax"


def drafter(model: Mapping[str, Any]) -> Answer:
    """Returns the answer to a drafter."""
    method = model["method"]
    label = _METHODS[method]
    target_model, target_answer, config = targets().get(model["target"], ({}, None, None))
    try:
        if method == "draft-model":
            return _draft_model(model, label)
        if model.get("inside"):
            return _inside(target_model, config)
        return _head(model, config, target_answer)
    except TargetNeededError as error:
        return Answer(CONFIGURATION, label, note=shortened(error, model["name"]))
    except CheckpointError as error:
        name = target_model["name"] if model.get("inside") else model["name"]
        return Answer(REFUSED, label, note=shortened(error, name))


def _draft_model(row: Mapping[str, Any], label: str) -> Answer:
    names = (row["model"], row["target"])
    parts = []
    for name in names:
        _, answer, config = targets()[name]
        if config is None:
            return Answer(REFUSED, label, note=f"{name}: {answer.note}")
        model = DecoderTarget(config)
        parts.append(LoadedTarget(model, {}, config.vocab_size, config.max_positions, name=name))

    try:
        draft_model(*parts)
    except ValueError as error:
        return Answer(REFUSED, label, note=shortened(error, ""))
    _, answer, _ = targets()[names[0]]
    return Answer(CONFIGURATION, label, answer.written_as, "as a target; the vocabularies agree")


def _inside(target_model: Mapping[str, Any], target: DecoderConfig | None) -> Answer:
    """Reads the modules for multi-token prediction in the files of a target."""
    stored = Stored(Path(target_model["name"]), target_model["config"], tensors_of(target_model))
    kind = HEADS["mtp"]
    depth = str(stored.fields.get("num_hidden_layers"))
    module = re.compile(rf"(model\.)?(mtp|layers\.{depth}\.)|model\.mtp_layers\.")
    if any(map(module.match, stored.tensors)):
        head = modules_of(Opened(stored.directory, TARGET, stored), target)
        return Answer(READ, kind.title(head.config), _head_layouts(head), head.note)

    family, fields, _ = described(stored.fields)
    config = modules_config(fields, family)
    if config is None:
        raise CheckpointError(f"{target_model['name']}: no MTP module is read for {family.label}")
    return Answer(CONFIGURATION, kind.title(config), "jax")


def _head(
    model: Mapping[str, Any], target: DecoderConfig | None, target_answer: Answer | None
) -> Answer:
    """Reads a head; a target that is refused, or not in the table, is unknown."""
    stored = Stored(Path(model["name"]), model["config"], tensors_of(model))
    if stored.tensors:
        kind = recognise(stored.signs, model["name"])
        answer = _read_head(stored, kind, target)
    else:
        signs = stored.signs
        kinds = [kind for kind in HEADS.values() if kind.recognise(signs)]
        method = str(model["method"])
        kind = kinds[0] if kinds else HEADS.get(_READERS.get(method, method))
        if kind is None:
            raise CheckpointError(f"{model['name']}: no reader for {_METHODS[method]}")
        if target is None:
            raise CheckpointError(f"{model['name']}: its target {model['target']} is not read")
        answer = _planned_head(stored.fields, kind, target)

    if target is None and target_answer is not None:
        note = f"its target is refused{'; ' if answer.note else ''}{answer.note}"
        return answer._replace(note=note)
    return answer


def _read_head(stored: Stored, kind: str, target: DecoderConfig | None) -> Answer:
    opened = Opened(stored.directory, kind, stored)
    note = ""
    try:
        head = head_of(opened, target)
    except CheckpointError as error:
        if "--layer-ids" not in str(error):
            raise
        # The file does not say what its numbers count, so the user does.
        head = head_of(opened, target, layer_ids="leaving")
        note = shortened(error, str(stored.directory))
    note = note or shortened(head.note, str(stored.directory))
    reader = HEADS[head.method]
    return Answer(READ, reader.title(head.config), _head_layouts(head), note)


def _planned_head(fields: Fields, kind: HeadKind, target: DecoderConfig | None) -> Answer:
    """Reads the configuration of a head."""
    config = kind.read_config(fields, target)  # type: ignore[arg-type]
    if target is not None:
        check_fit(config, target, fields.where)
    head = HeadCheckpoint(
        method=kind.name,
        config=config,
        head={},
        draft_to_target=None,
        embedding=None,
        dialect=kind.dialect(Signs.read(fields)),
        source=Path("head"),
        dtype="bfloat16",
        num_target_layers=None if target is None else target.num_layers,
    )
    return Answer(CONFIGURATION, kind.title(config), _head_layouts(head))


def _head_layouts(head: HeadCheckpoint) -> str:
    """Returns the layouts that can express a head."""
    kind = HEADS[head.method]
    # Without parameters nothing is copied, and a layout refuses the settings first. Medusa's looks
    # at the tensors, and copies none.
    if kind.name != "medusa":
        head = dataclasses.replace(head, head={})
    layouts = []
    for layout in kind.layouts:
        try:
            kind.write(head, layout)
        except CheckpointError as error:
            if " misses " not in str(error):
                continue
        layouts.append(layout)
    return ", ".join((*layouts, "jax"))


def shortened(error: object, name: str) -> str:
    """Returns an answer of the library without paths, as the cell of a table."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/?", "", str(error))
    for prefix in (f"{name}/config.json", "config.json", name):
        text = text.removeprefix(prefix).removeprefix(": ").removeprefix(", ").strip()
    text = text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")
    if len(text) <= _NOTE:
        return text
    clause = max(text.rfind(mark, 0, _NOTE) for mark in ("; ", ", ", ". "))
    return f"{text[: clause if clause > 40 else text.rfind(' ', 0, _NOTE)]} …"


def row(model: Mapping[str, Any], answer: Answer) -> list[str]:
    """Returns the cells of a model."""
    configuration = f"[{model['origin']}]({model['source']})"
    return [
        model["name"],
        answer.label,
        answer.status,
        answer.written_as or "–",
        configuration,
        answer.note or "–",
    ]


def counted(answers: list[Answer]) -> str:
    """Counts the answers of each kind."""
    numbers = {
        status: sum(answer.status == status for answer in answers)
        for status in (READ, CONFIGURATION, REFUSED)
    }
    return (
        f"{len(answers)}: {numbers[READ]} are read with their tensors, of"
        f" {numbers[CONFIGURATION]} the configuration is read, {numbers[REFUSED]} are refused."
    )


_ORDER = {READ: 0, CONFIGURATION: 1, REFUSED: 2}


def _sorted_rows(pairs: list[tuple[dict[str, Any], Answer]]) -> str:
    columns = ["model", "family or method", "today", "written as", "configuration", "note"]

    def order(pair: tuple[dict[str, Any], Answer]) -> tuple[int, str, str]:
        model, answer = pair
        return _ORDER[answer.status], answer.label.lower().strip("`"), model["name"].lower()

    return table(columns, [row(model, answer) for model, answer in sorted(pairs, key=order)])


def page() -> str:
    """Returns the page."""
    pairs = [(model, answer) for model, answer, _ in targets().values()]
    drafters = [(model, drafter(model)) for model in models("drafters")]
    return _TEXT.format(
        num_targets=counted([answer for _, answer in pairs]),
        targets=_sorted_rows(pairs),
        num_drafters=counted([answer for _, answer in drafters]),
        drafters=_sorted_rows(drafters),
    )


_TEXT = """\
# Published models: what each one gets today

Look up whether a published target or drafter is read, what it can be written as, and the library's
own words where it is refused. `python docs/recorded/published_models.py` writes this page from
[configurations](../tests/published/README.md) that were found in public repositories, and
[a test](../tests/docs/test_published_models.py) fails when an answer changes. No weights were
downloaded, so no row says that a model was run.

- **read**: the configuration is read, and the rules of its family or method fit the names and
  shapes of all its tensors.
- *configuration read*: the names of its tensors were not found, or the target of a drafter was
  not. Of quantised weights the format is recognised.
- *refused*: the note is the error of one line, without its end where it is long.
- *written as*: the layouts of `eagle3 convert --to`.
- *configuration*: where it was found. *file* is the published `config.json`; *defaults* are those
  of transformers' class for this model, and not the file; *recipe* is the configuration from which
  the project's own code trains this drafter.

## Targets

{num_targets}

{targets}

## Drafters

{num_drafters}

{drafters}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
