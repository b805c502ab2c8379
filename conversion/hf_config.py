"""Fields of Hugging Face ``config.json`` files that targets and heads share, both ways.

A field whose absence would change the mathematics is required. The exceptions are those that the published format
itself defines as optional, because checkpoints in use omit them: the number of key heads (as many as query heads), the
head dimension (width over heads), biases (none), the rotary base (10000) and the activation (SiLU).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from conversion.errors import CheckpointError, short
from eagle3_jax.models.config import (
    MOST,
    MOST_LAYERS,
    DecoderConfig,
    Eagle3Config,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    QueryScaling,
    RopeConfig,
    uniform,
)

_LAYER_TYPES = _FULL, _SLIDING = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
}


class Fields(NamedTuple):
    """A JSON object that says where it came from when a field is not as it should be.

    Attributes:
        values: The object.
        where: The file, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, name: str) -> Any:
        """The raw value; ``None`` when absent or null."""
        return self.values.get(name)

    def require(self, *names: str) -> None:
        """Refuse a file in which a field is absent whose default changes the mathematics and differs by family."""
        for name in names:
            if name not in self.values:
                raise self._missing(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; required when there is no default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of things, at least one and no more than the device can count; required without a default."""
        value = self.integer(name, default)
        if not 1 <= value <= MOST:
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a whole number from 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required when there is no default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a finite number")
        return float(value)

    def words(self, name: str) -> list[str]:
        """A list of texts, empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a list of texts")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or several; none when absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"{self.where}: {name} is {short(value)}; expected token ids from 0 to {vocab_size - 1}"
                )
        return tuple(ids)

    def optional_number(self, name: str) -> float | None:
        """A number, or ``None`` when absent."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected true or false")
        return value

    def section(self, name: str) -> Fields:
        """A nested object, empty when absent."""
        value = self._present(name, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected an object")
        return Fields(value, f"{self.where}, {name}")

    def _present(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name)
        return value

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no {name}; it changes the mathematics, so add it to the file")


@contextlib.contextmanager
def read_from(where: str) -> Iterator[None]:
    """A configuration that is built of what a file says; what it refuses is refused with the name of the file."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what no family of ours computes.

    Raises:
        CheckpointError: Another activation, or scaled logits.
    """
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise CheckpointError(f"{fields.where}: hidden_act is {short(activation)}; only 'silu' is supported")
    scale = fields.number("logit_scale", 1.0)
    if scale != 1.0:
        raise CheckpointError(f"{fields.where}: logit_scale is {scale}; only unscaled logits are supported")


def refuse_windows(fields: Fields) -> None:
    """Refuse sliding windows, where the architecture has none.

    Raises:
        CheckpointError: There is one.
    """
    layer_types = fields.words("layer_types")
    windowed = sorted(set(layer_types) - {"full_attention"})
    if windowed:
        raise CheckpointError(f"{fields.where}: layer_types has {windowed[0]!r}; only full attention is supported")
    window = fields.get("sliding_window")
    if fields.flag("use_sliding_window", default=window is not None and not layer_types):
        raise CheckpointError(f"{fields.where}: sliding_window is {short(window)}; only full attention is supported")


def refuse_quantised(fields: Fields) -> None:
    """Refuse weights that are not read.

    Raises:
        CheckpointError: They are quantised.
    """
    if fields.get("quantization_config") is not None:
        raise CheckpointError(f"{fields.where}: quantization_config is set; give the checkpoint before quantisation")


def read_mixer(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    rope: RopeConfig | None = None,
    query_scaling: QueryScaling | None = None,
) -> GroupedQuery:
    """Attention that sees everything before it.

    Args:
        fields: The geometry.
        qkv_bias: Of the family.
        o_bias: Of the family.
        qk_norm: Of the family.
        rope: Rotary embedding, if it has been read already.
        query_scaling: Of the family.

    Raises:
        CheckpointError: A field is missing or malformed.
    """
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{fields.where}: hidden_size {width} is not a multiple of num_attention_heads {heads}; add head_dim"
        )
    with read_from(fields.where):
        return GroupedQuery(
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", width // heads),
            rope=rope or read_rope(fields),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            query_scaling=query_scaling,
        )


def read_mlp(fields: Fields, *, bias: bool = False) -> GatedMLP:
    """The SwiGLU.

    Raises:
        CheckpointError: Its width is missing or malformed.
    """
    with read_from(fields.where):
        return GatedMLP(width=fields.size("intermediate_size"), bias=bias)


def read_window(fields: Fields) -> int | None:
    """``sliding_window``, which the file must name: null is none, and absent means a default of the family."""
    fields.require("sliding_window")
    return None if fields.get("sliding_window") is None else fields.size("sliding_window")


def read_windows(fields: Fields, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """The window of every layer.

    Args:
        fields: The geometry; ``layer_types`` decides where it is there.
        window: Of the layers that slide.
        slides: Which do, where there are no ``layer_types``.

    Raises:
        CheckpointError: The types are not one for each layer, name a kind that is none, or slide without a window.
    """
    count, types = _num_layers(fields), fields.words("layer_types")
    if not types:
        return [window if slides(layer) else None for layer in range(count)]
    if len(types) != count:
        raise CheckpointError(
            f"{fields.where}: layer_types names {len(types)} layers but num_hidden_layers is {count}; they must agree"
        )
    unknown = [kind for kind in types if kind not in _LAYER_TYPES]
    if unknown:
        raise CheckpointError(
            f"{fields.where}: layer_types has {short(unknown[0])}; expected {' or '.join(_LAYER_TYPES)}"
        )
    if window is None and _SLIDING in types:
        raise CheckpointError(f"{fields.where}: layer_types has {_SLIDING!r}, but no sliding_window is switched on")
    return [window if kind == _SLIDING else None for kind in types]


def read_decoder(
    fields: Fields, mixer: GroupedQuery, mlp: GatedMLP, *, windows: Sequence[int | None] | None = None
) -> DecoderConfig:
    """A target of layers that differ at most in their windows.

    Args:
        fields: The geometry.
        mixer: Of every layer.
        mlp: Of every layer.
        windows: Of each layer; none when left out.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    refuse_unsupported(fields)
    with read_from(fields.where):
        if windows is None:
            layers = uniform(_num_layers(fields), mixer, mlp)
        else:
            layers = tuple(LayerConfig(mixer=dataclasses.replace(mixer, window=one), mlp=mlp) for one in windows)
        return DecoderConfig(layers=layers, tie_embeddings=fields.flag("tie_word_embeddings"), **read_stack(fields))


def _num_layers(fields: Fields) -> int:
    count = fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(f"{fields.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS:,}")
    return count


def read_stack(fields: Fields) -> dict[str, Any]:
    """What a target and a head have beside their layers, as arguments of their configurations.

    Raises:
        CheckpointError: A field is missing or malformed.
    """
    return {
        "vocab_size": fields.size("vocab_size"),
        "width": fields.size("hidden_size"),
        # The bound on the context does not enter the mathematics; 2048 is what LlamaConfig says.
        "max_positions": fields.size("max_position_embeddings", 2048),
        "norm_eps": fields.number("rms_norm_eps"),
    }


def read_rope(fields: Fields, *, known: tuple[str, ...] = ()) -> RopeConfig:
    """The rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        fields: The geometry.
        known: Names among the parameters that the family reads itself.

    Raises:
        CheckpointError: The type is unknown, a parameter is missing, or the two notations disagree.
    """
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new.values and old.values:
        first, second = _rope_from(fields, new, known), _rope_from(fields, old, known)
        if first != second:
            raise CheckpointError(
                f"{fields.where}: rope_parameters and rope_scaling disagree ({first} and {second}); remove one"
            )
        return first
    return _rope_from(fields, new if new.values else old, known)


def _rope_from(fields: Fields, rope: Fields, known: tuple[str, ...]) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{rope.where}: rope type {short(kind)} is not supported; expected one of {', '.join(_ROPE_TYPES)}"
        )
    unknown = sorted(
        key for key, value in rope.values.items() if key not in _ROPE_KEYS and key not in known and value is not None
    )
    if unknown:
        raise CheckpointError(f"{rope.where}: {unknown[0]!r} is not supported for rope type {kind!r}")
    for source in (fields, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{source.where}: partial_rotary_factor is not supported; all channels must rotate")
    inner, outer = rope.optional_number("rope_theta"), fields.optional_number("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(f"{fields.where}: rope_theta is {outer} but {inner} in the rope parameters; remove one")
    theta = inner if inner is not None else outer
    if theta is None:
        theta = 10_000.0  # the base of the original Llama, whose files do not name it; nor do official heads
    if theta <= 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {theta}; expected a positive number")
    with read_from(rope.where):
        return _rope_of(kind, theta, fields, rope)


def _rope_of(kind: str, theta: float, fields: Fields, rope: Fields) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor)
    # Phi-style files keep the original context at the top level, where transformers gives it priority.
    owner = fields if fields.get("original_max_position_embeddings") is not None else rope
    original = owner.integer("original_max_position_embeddings")
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=factor,
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_positions=original,
        # Optional in the format: 32 and 1 are the constants of the paper, the rest is derived from the factor.
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def rope_fields(rope: RopeConfig | None) -> dict[str, Any]:
    """The rotary embedding in both notations: transformers 5 reads the one, 4.x, vLLM and SGLang the other.

    Raises:
        CheckpointError: There is none, which no configuration of this layout says.
    """
    if rope is None:
        raise CheckpointError("a layer without rotary embedding cannot be expressed in this layout; use --to jax")
    if rope.type == "default":
        scaling = None
    elif rope.type == "linear":
        scaling = {"rope_type": "linear", "factor": rope.factor}
    else:
        scaling = {
            "rope_type": rope.type,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
        if rope.type == "llama3":
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        else:
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
            if not rope.truncate:  # transformers 4 warns about the key
                scaling["truncate"] = False
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(rope, name) is not None:
                    scaling[name] = getattr(rope, name)
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def stack_fields(config: DecoderConfig | Eagle3Config, dtype: str) -> dict[str, Any]:
    """The geometry as a Hugging Face configuration, which describes one layer for all of them.

    Raises:
        CheckpointError: transformers would not read it.
    """
    layer = config.layers[0]
    mixer = layer.mixer
    if config.width % mixer.num_heads:
        raise CheckpointError(
            f"width {config.width} is not a multiple of num_heads {mixer.num_heads}; the Hugging Face layout "
            "cannot express that (transformers refuses such a config.json), use --to jax"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        **rope_fields(mixer.rope),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def layer_types(config: DecoderConfig) -> list[str]:
    """``layer_types`` of a target."""
    return [_FULL if layer.mixer.window is None else _SLIDING for layer in config.layers]


def bias_fields(layer: LayerConfig) -> dict[str, bool]:
    """Biases as Llama's configuration says them: one flag for all four projections of attention."""
    return {"attention_bias": layer.mixer.qkv_bias, "mlp_bias": layer.mlp.bias}


def dialect_of(values: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    """Which project's conventions a head follows."""
    if "speculators_model_type" in values or "transformer_layer_config" in values:
        return "speculators"
    if any("layers.0." in name for name in names) and isinstance(values.get("eagle_config"), dict):
        return "modelopt"
    architecture = " ".join(map(str, values.get("architectures") or ()))
    if "Eagle3" not in architecture:
        return "eagle"
    # Only vLLM reads all of them; files for SGLang name those that are set.
    flags = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    return "vllm" if all(flag in values for flag in flags) else "sglang"
