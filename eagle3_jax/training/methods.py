"""The recipe of every method that can be trained; :mod:`eagle3_jax.training.loop` runs them."""

from __future__ import annotations

import dataclasses
import fractions
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, Markov
from eagle3_jax.drafters.dflash2 import DFlash2Config, DFlash2Drafter
from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.drafters.medusa import MedusaConfig, MedusaDrafter
from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter
from eagle3_jax.drafters.p_eagle import PEagleConfig, PEagleDrafter
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    LayerConfig,
    RopeConfig,
    gated,
    grouped,
    uniform,
    usual_head,
    usual_layers,
)
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import FLOAT32, Precision
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch
from eagle3_jax.training.dflash import BlockObjective, block_loss
from eagle3_jax.training.draft_model import distillation_loss
from eagle3_jax.training.eagle1 import eagle1_loss
from eagle3_jax.training.medusa import medusa_loss
from eagle3_jax.training.p_eagle import p_eagle_loss
from eagle3_jax.training.ttt import TTTConfig, ttt_loss

DraftVocabulary = Int[np.ndarray, " W"] | None
_LAYERS_MLP_VOCABULARY = ("num_layers", "mlp_width", "draft_vocab_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """The options of a recipe; ``None`` uses the method's default."""

    depth: int  #: Number of draft positions that the head learns.
    num_layers: int | None = None  #: Number of layers of the head.
    width: int | None = None  #: Width of its residual stream.
    mlp_width: int | None = None  #: Inner width of its MLPs.
    draft_vocab_size: int | None = None  #: ``W``, number of the target's tokens that it can draft.
    #: Size of the noise on its features; see :class:`~eagle3_jax.training.ttt.TTTConfig`.
    noise: float | None = None


# First parameters


def initial_head(
    drafter: Any, target: LoadedTarget, draft_to_target: DraftVocabulary, key: jax.Array
) -> Params:
    """Returns random parameters, with the target's final norm and output projection if any."""
    params = drafter.init_params(key)
    if "norm" in params:
        scale = jnp.asarray(target.params["norm"]["scale"], jnp.float32)
        config: DecoderConfig = target.model.config  # type: ignore[attr-defined]
        kind = config.final_norm_kind or config.norm_kind
        params["norm"]["scale"] = 1.0 + scale if kind == "zero-centred" else scale
    if "head" in params:
        params["head"]["kernel"] = _unembedding(target, draft_to_target)
    return params


def _from_last_layer(
    drafter: Eagle3Drafter, target: LoadedTarget, draft_to_target: DraftVocabulary, key: jax.Array
) -> Params:
    """Returns an EAGLE-3 head whose layer starts as the target's last one.

    The layer reads the highest feature.
    The half of its attention that reads the embedding is random, and so is every parameter of
    another shape. A random layer needs more steps: after 45 steps on 15,000 answer tokens of
    SmolLM2 0.15 of the first drafts were accepted on held-out texts, and 0.18 with this start
    (``examples/text_curve.py``).
    """
    params = initial_head(drafter, target, draft_to_target, key)
    config: DecoderConfig = target.model.config  # type: ignore[attr-defined]
    last_config = config.layers[-1]
    if last_config.norms != "before" or config.norm_kind not in ("plain", "float32"):
        return params

    last = target.params["blocks"][config.num_layers - 1]

    def start(path: tuple[Any, ...], fresh: jax.Array) -> jax.Array:
        source: Any = last
        for entry in path:
            name = "attention_norm" if entry.key == "feature_norm" else entry.key
            source = source.get(name, {})
        shape = getattr(source, "shape", ())
        if shape == fresh.shape:
            return jnp.asarray(source, jnp.float32)
        # Queries, keys and values read the embedding first.
        if shape and (2 * shape[0], *shape[1:]) == fresh.shape:
            return fresh.at[shape[0] :].set(source)
        return fresh

    params["first"] = jax.tree_util.tree_map_with_path(start, params["first"])
    fused = params["fc"]["kernel"]
    if config.width == fused.shape[1]:
        params["fc"]["kernel"] = fused.at[-config.width :].add(jnp.eye(config.width))
    return params


def _unembedding(target: LoadedTarget, draft_to_target: DraftVocabulary) -> jax.Array:
    """Returns the columns of the target's output matrix for the draft vocabulary, ``[D W]``."""
    ids = slice(None) if draft_to_target is None else draft_to_target
    return jnp.asarray(target.model.tables(target.params).unembedding[:, ids], jnp.float32)  # type: ignore[attr-defined]


def _copied_heads(
    drafter: MedusaDrafter, target: LoadedTarget, draft_to_target: DraftVocabulary, key: jax.Array
) -> Params:
    """Returns Medusa heads with the target's logits: zero blocks, copies of its output matrix."""
    del key
    kernel = _unembedding(target, draft_to_target)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), drafter.param_shapes())
    return {
        "blocks": zero["blocks"],
        "outputs": {head: {"kernel": kernel} for head in zero["outputs"]},
    }


def _first_layers(
    drafter: DraftModel, target: LoadedTarget, draft_to_target: DraftVocabulary, key: jax.Array
) -> Params:
    """Returns the target's first layers if the shapes agree, else random parameters."""
    fresh = drafter.model.init(key)
    blocks = {index: target.params["blocks"].get(index) for index in fresh["blocks"]}
    first = {**target.params, "blocks": blocks}
    if jax.tree.map(jnp.shape, first) != jax.tree.map(jnp.shape, fresh):
        return fresh
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first)


# Configurations


def official_head(
    target: DecoderConfig, draft_vocab_size: int, mlp_width: int | None = None
) -> Eagle3Config:
    """Returns the usual EAGLE-3 head with ``W`` draft tokens.

    The default inner width of its SwiGLU is the target's.

    Raises:
        ValueError: The official layout cannot hold it (explicit head size), or the target has fewer
            than 8 layers.
    """
    head = usual_head(target, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width)
    mixer = grouped(head.layers[0])
    if mixer.head_dim * mixer.num_heads != head.width:
        raise ValueError(
            f"a head of {mixer.num_heads} heads of {mixer.head_dim} is not {head.width} wide; the"
            " official layout derives the head size from the width"
        )
    return head


def _on_final_state(kind: Callable[..., Any], target: DecoderConfig, options: HeadOptions) -> Any:
    """Returns a head that reads the target's final state and borrows its output matrix."""
    return kind(
        vocab_size=target.vocab_size,
        width=target.width,
        layers=usual_layers(target, options.mlp_width, options.num_layers or 1),
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        num_target_layers=target.num_layers,
    )


def _p_eagle(target: DecoderConfig, options: HeadOptions) -> PEagleConfig:
    """Returns the usual head with four layers, as in the paper."""
    size = options.draft_vocab_size or target.vocab_size
    head = usual_head(target, draft_vocab_size=size, mlp_width=options.mlp_width)
    fields: dict[str, Any] = {**vars(head), "layers": head.layers * (options.num_layers or 4)}
    # The last token of a vocabulary is the rarest.
    return PEagleConfig(**fields, mask_token_id=target.vocab_size - 1)


def _medusa(target: DecoderConfig, options: HeadOptions) -> MedusaConfig:
    """Returns one head per learned position, with biases, as the authors' heads have.

    With a reduced vocabulary they share one output projection, which makes them small; vLLM
    requires it.
    """
    return MedusaConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=options.draft_vocab_size or target.vocab_size,
        target_width=target.width,
        num_target_layers=target.num_layers,
        num_heads=options.depth,
        num_layers=options.num_layers or 1,
        bias=True,
        shared_output=options.draft_vocab_size is not None,
    )


def _block(target: DecoderConfig, options: HeadOptions, **kind: Any) -> DFlashConfig:
    """Returns five layers of the target's geometry in Qwen3's style, as published.

    They read five of its layers.

    Args:
        target: Configuration of the target.
        options: ``depth`` is the number of tokens that a block predicts.
        kind: The kind of block drafter, as arguments of :class:`DFlashConfig`.
    """
    layer = usual_layers(target, options.mlp_width)[0]
    size = options.draft_vocab_size or target.vocab_size
    mixer = dataclasses.replace(grouped(layer), rope=RopeConfig(theta=1e6), qk_norm=True)

    return DFlashConfig(
        vocab_size=target.vocab_size,
        width=target.width,
        layers=uniform(options.num_layers or 5, mixer, layer.mlp),
        draft_vocab_size=size,
        target_width=target.width,
        aux_layers=spread_layers(target.num_layers),
        block_size=options.depth + (0 if kind.get("from_anchor") else 1),
        # The last token of a vocabulary is the rarest.
        mask_token=target.vocab_size - 1,
        own_output=size < target.vocab_size,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        **kind,
    )


def _spark(target: DecoderConfig, options: HeadOptions) -> DFlashConfig:
    markov = Markov(rank=min(256, target.width))
    return _block(target, options, from_anchor=True, markov=markov, confidence="markov")


def _convolved(target: DecoderConfig, options: HeadOptions) -> DFlash2Config:
    return DFlash2Config(
        **vars(_block(target, options)),
        conv_group_size=math.gcd(16, target.width),
        selector_rank=min(256, target.width),
        selector_top_k=min(16, target.vocab_size),
    )


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Returns five layers from the second to the fourth last, as in published heads.

    A shallow target has fewer. These are z-lab's ``round(1 + i (L - 4) / 4)`` plus 1, because a
    layer's output enters the next one.
    """
    outputs = [round(1 + i * (num_layers - 4) / 4) for i in range(5)]
    return tuple(sorted({min(max(output, 0), num_layers - 1) + 1 for output in outputs}))


def small_model(target: DecoderConfig, options: HeadOptions) -> DecoderConfig:
    """Returns a draft model of the target's family.

    By default it has a quarter of the target's layers and half its width.

    Raises:
        ValueError: It is larger than the target.
    """
    count = options.num_layers or max(1, target.num_layers // 4)
    width = options.width or target.width // 2
    if count > target.num_layers or width > target.width:
        raise ValueError(
            f"a draft model of {count} layers and width {width} is larger than its target of"
            f" {target.num_layers} and {target.width}; lower them"
        )

    share = fractions.Fraction(width, target.width)
    layers = tuple(
        _smaller_layer(layer, share, options.mlp_width) for layer in target.layers[:count]
    )
    return dataclasses.replace(target, width=width, layers=layers)


def _smaller_layer(
    layer: LayerConfig, share: fractions.Fraction, mlp_width: int | None
) -> LayerConfig:
    """Returns a layer with a share of the heads and of the MLP's width, or with ``mlp_width``."""
    mixer = grouped(layer)
    heads = max(1, int(mixer.num_heads * share))
    kv_heads = math.gcd(heads, mixer.num_kv_heads)
    mixer = dataclasses.replace(mixer, num_heads=heads, num_kv_heads=kv_heads)

    inner = mlp_width or max(1, int(gated(layer).width * share))
    mlp = dataclasses.replace(gated(layer), width=inner)
    return dataclasses.replace(layer, mixer=mixer, mlp=mlp)


def _draft_model(config: DecoderConfig, *, precision: Precision = FLOAT32) -> DraftModel:
    return DraftModel(DecoderTarget(config, precision))


# The table


class Recipe(NamedTuple):
    """The training of heads of one method."""

    #: The fields of :class:`HeadOptions` that the method has in addition to ``depth``.
    choices: tuple[str, ...]
    #: Makes the head's configuration for a target; see :meth:`config`.
    shape: Callable[[DecoderConfig, HeadOptions], Any]
    drafter: Callable[..., Any]  #: Makes the drafter from a configuration and ``precision``.
    #: The loss function: drafter, target's model, head's parameters, frozen arrays, batch, and the
    #: result of ``setting``. It is differentiable in the head's parameters only. Its metrics are
    #: those of :func:`eagle3_jax.training.ttt.ttt_loss`: ``accuracy_k`` of each draft position and
    #: ``simulated_tau``.
    objective: Callable[[Any, DecoderTarget, Params, Frozen, TTTBatch, Any], Loss]
    #: The last argument of ``objective``, from the options.
    setting: Callable[[HeadOptions], Any] = operator.attrgetter("depth")
    #: The first parameters, from the drafter, the target, the draft vocabulary (``None`` for all)
    #: and a key.
    start: Callable[[Any, LoadedTarget, DraftVocabulary, jax.Array], Params] = initial_head
    #: Default phases ``UNTIL:DEPTH,...``, in the form of ``eagle3 train head --unroll``.
    depths: str = "5"
    reduced: bool = False  #: Whether the default draft vocabulary is a part of the target's.

    def draft_vocab_size(self, vocab_size: int) -> int | None:
        """Returns the default ``W`` for a target of ``V`` tokens; ``None`` for all of them.

        It is a third of ``V``, at least 2,048 and at most 32,000, as in published heads.
        """
        if not self.reduced:
            return None
        least = min(2048, vocab_size)
        return min(max(vocab_size // 3, least), 32_000)

    def config(self, target: DecoderConfig, options: HeadOptions) -> Any:
        """Returns the head's configuration for a target.

        Raises:
            ValueError: The method does not have an option, or the target cannot have such a head.
        """
        for name, value in dataclasses.asdict(options).items():
            if value is not None and name not in ("depth", *self.choices):
                raise ValueError(
                    f"{name} is {value}, and this method has no choice of it; leave it out"
                )
        return self.shape(target, options)

    def loss(
        self,
        drafter: Any,
        target: DecoderTarget,
        params: Params,
        frozen: Frozen,
        batch: TTTBatch,
        options: HeadOptions,
    ) -> Loss:
        """Returns the loss and its metrics."""
        return self.objective(drafter, target, params, frozen, batch, self.setting(options))


def _supervised(options: HeadOptions) -> TTTConfig:
    return TTTConfig(num_steps=options.depth, denominator="supervised", noise=options.noise or 0.0)


def _block_recipe(
    shape: Callable[[DecoderConfig, HeadOptions], DFlashConfig],
    objective: BlockObjective,
    drafter: type[DFlashDrafter] = DFlashDrafter,
    choices: tuple[str, ...] = _LAYERS_MLP_VOCABULARY,
) -> Recipe:
    # The whole block is learned from the first step on, so the objective does not depend on the
    # depth.
    return Recipe(
        choices,
        shape,
        drafter,
        block_loss,
        lambda options: objective,
        depths="7",
    )


# The recipes by the name of ``eagle3 train head --method``.
#
# EAGLE-1: without a bias, because vLLM loads these heads without one, and the official heads for
# Llama 3 have none.
#
# MTP: DeepSeek-V3 trains its modules together with the model, each on the text's next token (arXiv
# 2412.19437, equation 25). Here the target is frozen. One module learns ``K`` steps, the input of
# each being its output of the step before, on the target's distribution and with the same decay of
# 0.8 per step as EAGLE-3. FastMTP (arXiv 2509.18362) uses the token and a decay of 0.6, and keeps
# the position and the mask of the first step in all steps.
RECIPES: dict[str, Recipe] = {
    "eagle3": Recipe(
        ("mlp_width", "draft_vocab_size", "noise"),
        lambda target, options: official_head(
            target, options.draft_vocab_size or target.vocab_size, options.mlp_width
        ),
        Eagle3Drafter,
        ttt_loss,
        _supervised,
        start=_from_last_layer,
        depths="300:2,5",
        reduced=True,
    ),
    "eagle1": Recipe(
        ("num_layers", "mlp_width"),
        functools.partial(_on_final_state, functools.partial(Eagle1Config, fc_bias=False)),
        Eagle1Drafter,
        eagle1_loss,
        depths="1",
    ),
    "medusa": Recipe(
        ("num_layers", "draft_vocab_size"), _medusa, MedusaDrafter, medusa_loss, start=_copied_heads
    ),
    "mtp": Recipe(
        ("mlp_width", "noise"),
        functools.partial(_on_final_state, MTPConfig),
        MTPDrafter,
        ttt_loss,
        _supervised,
    ),
    "p-eagle": Recipe(
        _LAYERS_MLP_VOCABULARY, _p_eagle, PEagleDrafter, p_eagle_loss, depths="8", reduced=True
    ),
    "dflash": _block_recipe(_block, BlockObjective(text=1.0)),
    "dflash2": _block_recipe(
        _convolved,
        BlockObjective(text=1.0, selector=1.0),
        DFlash2Drafter,
        ("num_layers", "mlp_width"),
    ),
    "dspark": _block_recipe(_spark, BlockObjective(text=0.1, distance=0.9, confidence=1.0)),
    "jetspec": _block_recipe(
        functools.partial(_block, causal=True), BlockObjective(divergence=1.0, decays=False)
    ),
    "draft-model": Recipe(
        ("num_layers", "width", "mlp_width"),
        small_model,
        _draft_model,
        distillation_loss,
        start=_first_layers,
    ),
}
