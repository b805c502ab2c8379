"""The shapes that `eagle3 plan` reads, from a ``config.json``, all that it ever downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.models.config import MOST
from eagle3_jax.theory.shapes import KNOWN_MODELS, HeadShape, ModelShape, usual_head

if TYPE_CHECKING:
    from conversion.hf_config import Fields

_DENSE = ("llama", "mistral", "qwen2", "qwen3")


def read_target_shape(source: str | None) -> ModelShape:
    """A named shape, or that of a ``config.json``."""
    if source is not None and source.lower() in KNOWN_MODELS:
        return KNOWN_MODELS[source.lower()]
    return target_shape(_fields(source, "target"), "the bundled target" if source is None else source)


def read_head_shape(source: str | None, *, target: ModelShape, bundled: bool) -> HeadShape | None:
    """The head that ``--drafter`` names; ``None`` for plain decoding."""
    if source == "none":
        return None
    if source is None and not bundled:
        return usual_head(target)
    return head_shape(_fields(source, "eagle3"), target, "the bundled head" if source is None else source)


def target_shape(fields: Fields, name: str) -> ModelShape:
    """The shape of a target.

    Raises:
        ValueError: A field is missing, or it is not a dense decoder of the Llama family.
    """
    from conversion.errors import short

    kind = fields.get("model_type")
    if kind not in _DENSE:
        raise Misuse(
            f"{fields.where}: model_type is {short(kind)}; plans are made for dense decoders: {', '.join(_DENSE)}"
        )
    if fields.get("sliding_window") is not None and fields.flag("use_sliding_window", True):
        raise Misuse(
            f"{fields.where}: sliding_window is {short(fields.get('sliding_window'))}; only full attention is planned"
        )
    width, mlp, heads = (_positive(fields, n) for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_heads, size = _kv_heads(fields, heads), _head_dim(fields, width, heads)
    biases = (heads + 2 * kv_heads) * size if kind == "qwen2" or fields.flag("attention_bias") else 0
    if fields.flag("attention_bias"):
        biases += width
    if fields.flag("mlp_bias"):
        biases += 2 * mlp + width
    return ModelShape(
        name=name,
        vocab_size=_positive(fields, "vocab_size"),
        width=width,
        mlp_width=mlp,
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qk_norm=kind == "qwen3",
        biases_per_layer=biases,
        max_positions=_or(fields, "max_position_embeddings", 2048),
    )


def head_shape(fields: Fields, target: ModelShape, name: str) -> HeadShape:
    """The shape of an EAGLE-3 head, in any of the published dialects.

    Raises:
        ValueError: A field is missing, or it is a head of another kind.
    """
    if fields.get("medusa_num_heads") is not None:
        raise Misuse(f"{fields.where} describes a Medusa head; give an EAGLE-3 head")
    geometry = fields.section("transformer_layer_config")
    geometry = geometry if geometry.values else fields
    if fields.get("draft_vocab_size") is None and geometry is fields:
        raise Misuse(f"{fields.where} has no draft_vocab_size, so it is not the config.json of an EAGLE-3 head")
    width, heads = _positive(geometry, "hidden_size"), _positive(geometry, "num_attention_heads")
    layers = fields.get("eagle_aux_hidden_state_layer_ids")
    return HeadShape(
        name=name,
        width=width,
        mlp_width=_positive(geometry, "intermediate_size"),
        num_layers=_head_layers(fields, geometry, target),
        num_heads=heads,
        num_kv_heads=_kv_heads(geometry, heads),
        head_dim=_head_dim(geometry, width, heads),
        draft_vocab_size=_or(fields, "draft_vocab_size", target.vocab_size),
        target_width=_or(fields, "target_hidden_size", width),
        num_aux_layers=len(layers) if isinstance(layers, list) and layers else 3,
        max_positions=_or(geometry, "max_position_embeddings", 2048),
    )


def _head_layers(fields: Fields, geometry: Fields, target: ModelShape) -> int:
    """How many layers the head has: the official layout and a copy of the target's count are no witnesses.

    The official Vicuna-13B head says 40, which its target has, and has one.
    """
    from conversion.hf_config import dialect_of

    said = 1 if geometry.get("num_hidden_layers") is None else _positive(geometry, "num_hidden_layers")
    if dialect_of(fields.values, {}) == "eagle" or said >= target.num_layers:
        return 1
    return said


def _positive(fields: Fields, name: str) -> int:
    value = fields.integer(name)
    if not 1 <= value <= MOST:
        raise Misuse(f"{fields.where}: {name} is {str(value)[:40]}; expected a whole number from 1 to {MOST}")
    return value


def _kv_heads(fields: Fields, heads: int) -> int:
    value = _or(fields, "num_key_value_heads", heads)
    if heads % value:
        raise Misuse(f"{fields.where}: num_key_value_heads is {value}; expected a divisor of the {heads} query heads")
    return value


def _head_dim(fields: Fields, width: int, heads: int) -> int:
    if fields.get("head_dim") is None and width % heads:
        raise Misuse(f"{fields.where}: hidden_size {width} is not a multiple of {heads} heads; add head_dim")
    size = _or(fields, "head_dim", width // heads)
    if size % 2:
        raise Misuse(f"{fields.where}: head_dim is {size}; rotary embedding needs an even number")
    return size


def _or(fields: Fields, name: str, default: int) -> int:
    return default if fields.get(name) is None else _positive(fields, name)


def _fields(source: str | None, part: str) -> Fields:
    from conversion.files import NATIVE_FILE, read_json
    from conversion.hf_config import Fields
    from eagle3_jax.sources import bundled

    directory = bundled(part) if source is None else Path(source)
    if source is not None and not directory.exists() and source.count("/") == 1 and not source.startswith((".", "~")):
        path = _download_config(source)
    elif source is not None and not directory.is_dir():
        raise Misuse(f"{source} is neither a directory, a hub id such as org/name, nor a known model; see --help")
    elif (directory / NATIVE_FILE).is_file():
        raise Misuse(f"{directory} is in the native layout; give the checkpoint that it was converted from")
    else:
        path = directory / "config.json"
    return Fields(read_json(path), str(path))


def _download_config(source: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise Misuse(
            f"{source} is no local directory, and hub ids need huggingface_hub: pip install 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(hf_hub_download(source, "config.json"))
    except Exception as error:  # the hub's errors have no common type that is public
        reason = str(error).strip().splitlines()[0]
        raise Misuse(f"{source} is no local directory and its config.json cannot be fetched: {reason}") from None
