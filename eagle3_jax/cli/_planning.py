"""What `eagle3 plan` reads: shapes from a ``config.json``, all that it ever downloads; accelerators; acceptance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import check_writable
from eagle3_jax.models.config import MOST
from eagle3_jax.theory.accelerators import Accelerator, accelerator_named, custom_accelerator
from eagle3_jax.theory.memory import CACHE_BYTES, WEIGHT_BITS, Deployment
from eagle3_jax.theory.shapes import KNOWN_MODELS, HeadShape, ModelShape, usual_head
from eagle3_jax.theory.speedup import Rates, rates, tau_from_conditional_rate, tau_from_draft_rate

if TYPE_CHECKING:
    from conversion.hf_config import Fields

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Directory with a config.json, hub id, or one of "
        f"{', '.join(shape.name for shape in KNOWN_MODELS.values())}; the bundled one when left out.",
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Directory with the config.json of an EAGLE-3 head, hub id, or 'none'. Left out: the bundled head for the "
        "bundled target, for others the usual one (one layer like the target's, draft vocabulary 32000).",
    ),
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="Accelerator, such as H100, H200, L40S, MI300X or TPU-v6e.")
]
BandwidthOption = Annotated[
    float | None,
    typer.Option("--bandwidth-gb-per-s", help="Any other accelerator, or the measured bandwidth of the one named."),
]
TflopsOption = Annotated[float | None, typer.Option("--peak-tflops", help="Its dense bfloat16 peak.")]
MemoryOption = Annotated[float | None, typer.Option("--memory-gb", help="Its memory.")]
NumGpusOption = Annotated[int, typer.Option("--num-gpus", help="Tensor-parallel size.", min=1)]
WeightsOption = Annotated[
    str, typer.Option("--weights", help=f"Of the target's layers: {', '.join(WEIGHT_BITS)}, or bf16, fp16, fp32.")
]
CacheOption = Annotated[str, typer.Option("--cache", help=f"Of both caches: {', '.join(CACHE_BYTES)}.")]
LengthOption = Annotated[
    int, typer.Option("--num-speculative-tokens", "-K", help="Tokens of the draft chain.", min=1, max=4096)
]
TauOption = Annotated[
    float | None, typer.Option("--mean-acceptance-length", help="τ, tokens per round, the target's own included.")
]
DraftRateOption = Annotated[
    float | None, typer.Option("--draft-acceptance-rate", help="Accepted over drafted tokens, as vLLM logs it.")
]
ConditionalRateOption = Annotated[
    float | None,
    typer.Option(
        "--conditional-acceptance-rate",
        "--alpha",
        help="Probability of a token given that all before it were accepted; 0.7 when nothing is given.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", help="Tokens that each sequence has behind it; 1024 if the target has them.", min=0),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: a .png or .svg file.")]

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DENSE = ("llama", "mistral", "qwen2", "qwen3")


def read_deployment(
    *,
    target: str | None,
    drafter: str | None,
    gpu: str | None,
    bandwidth: float | None,
    tflops: float | None,
    memory: float | None,
    num_gpus: int,
    weights: str,
    cache: str,
) -> Deployment:
    """What the options of a command describe."""
    shape = read_target_shape(target)
    return Deployment(
        target=shape,
        head=read_head_shape(drafter, target=shape, bundled=target is None),
        accelerator=read_accelerator(gpu, bandwidth=bandwidth, tflops=tflops, memory=memory),
        num_accelerators=num_gpus,
        weights=_SHORT.get(weights, weights),
        cache=_SHORT.get(cache, cache),
    )


def read_accelerator(
    gpu: str | None, *, bandwidth: float | None, tflops: float | None, memory: float | None
) -> Accelerator:
    """The one named, the one described, or an H100."""
    if bandwidth is None:
        if tflops is not None or memory is not None:
            raise Misuse("--peak-tflops and --memory-gb describe an accelerator by hand; add --bandwidth-gb-per-s")
        return accelerator_named("H100" if gpu is None else gpu)
    base = None if gpu is None else accelerator_named(gpu)
    return custom_accelerator(gb_per_s=bandwidth, tflops=tflops, memory_gb=memory, base=base)


def read_acceptance(
    num_draft_tokens: int, *, tau: float | None, draft_rate: float | None, conditional_rate: float | None
) -> Rates:
    """The acceptance that one of three options gives; conditional 0.7 when none does."""
    given = [value for value in (tau, draft_rate, conditional_rate) if value is not None]
    if len(given) > 1:
        raise Misuse(
            "--mean-acceptance-length, --draft-acceptance-rate and --conditional-acceptance-rate say the same in three "
            "ways; give one"
        )
    if draft_rate is not None:
        tau = tau_from_draft_rate(draft_rate, num_draft_tokens)
    elif tau is None:
        tau = tau_from_conditional_rate(0.7 if conditional_rate is None else conditional_rate, num_draft_tokens)
    return rates(tau, num_draft_tokens)


class DraftPlan(NamedTuple):
    """What is drafted in a round.

    Attributes:
        num_draft_tokens: ``K``; 0 without a head.
        mean_acceptance_length: ``τ``; 1 without a head.
    """

    num_draft_tokens: int
    mean_acceptance_length: float


def read_draft(
    deployment: Deployment,
    num_draft_tokens: int,
    *,
    tau: float | None,
    draft_rate: float | None,
    conditional_rate: float | None,
) -> DraftPlan:
    """The draft of a deployment, plain decoding where it has no head."""
    found = read_acceptance(num_draft_tokens, tau=tau, draft_rate=draft_rate, conditional_rate=conditional_rate)
    if deployment.head is None:
        return DraftPlan(0, 1.0)
    return DraftPlan(num_draft_tokens, found.mean_acceptance_length)


def check_draft_length(num_draft_tokens: int, deployment: Deployment) -> None:
    """Refuse a chain that the head has no positions for."""
    head = deployment.head
    if head is not None and num_draft_tokens > head.max_draft_tokens:
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above the limit of the head: {head.name} has "
            f"{head.max_positions} positions, so K is at most {head.max_draft_tokens}"
        )


def read_context(context: int | None, usual: int, deployment: Deployment) -> int:
    """The length that was asked for, or the usual one as far as the target reaches."""
    target = deployment.target
    if context is None:
        return min(usual, target.max_positions)
    if context > target.max_positions:
        raise Misuse(f"--context {context} is beyond the {target.max_positions} positions of {target.name}")
    return context


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


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be written, before any work is done."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise Misuse(f"--plot {path}: give the name of a .png or .svg file")
    check_writable(path)


def finite(value: Any) -> Any:
    """The same with ``null`` for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
