"""Loading of models: the bundled pair, a local directory, or a hub id."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from eagle3_jax.devices.sharding import as_mesh, param_shardings
from eagle3_jax.drafters.draft_model import draft_model, layer_skip
from eagle3_jax.drafters.ngram import NGram
from eagle3_jax.drafters.suffix import Suffix
from eagle3_jax.files.sources import OWN_MODULES, locate, parts_of, similar_drafters
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, Latent
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import PRECISIONS, Precision, cast
from eagle3_jax.models.quantised import WEIGHTS, check_weights, quantised
from eagle3_jax.text.template import ChatTemplate
from eagle3_jax.theory.known_models import similar_targets
from eagle3_jax.types import Drafter

if TYPE_CHECKING:
    from eagle3_jax.conversion.families import Family

# `conversion` is imported where it is used: a program that brings its own parameters needs none of
# it (docs/design.md, 3).


def precision_named(name: str) -> Precision:
    """Returns the precision with a name.

    Raises:
        ValueError: The name is not ``float32``, ``bfloat16`` or ``mixed``.
    """
    if name not in PRECISIONS:
        raise ValueError(f"dtype {name!r} is not known; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def load_target(
    source: str | Path | None = None,
    *,
    dtype: str = "float32",
    weights: str = "dense",
    family: Family | None = None,
    mesh: Mesh | None = None,
) -> LoadedTarget:
    """Loads a target.

    Args:
        source: A Hugging Face directory, a native one, a GGUF file, a hub id, ``smollm2``
            (downloaded once), or ``None`` for the bundled target.
        dtype: ``float32``, ``bfloat16``, or ``mixed`` (bfloat16 products summed in float32).
        weights: ``dense``; ``fp8``: kernels in FP8; ``fp8-dynamic``: products quantise the
            activations too; ``int8``: both factors of products are int8, which is fastest on CPUs.
            Kernels of an eight-bit file of the same kind stay as stored; others are rounded.
            ``int4``: kernels that the file has in integers of four bits stay as stored, and no
            others are rounded.
            Decoding is lossless relative to this quantised target (``docs/checkpoints.md``).
            :func:`load_drafter` stores its drafter's kernels in the same way.
        family: Your ``eagle3_jax.conversion.Family``, in addition to the known ones
            (``docs/extending.md``).
        mesh: A mesh from ``make_mesh``. It divides the target; every device gets only its part
            (``docs/mesh.md``).

    Raises:
        ValueError: The library cannot run this target, or the mesh does not divide it; the message
            gives the reason.
    """
    check_weights(weights)
    precision = precision_named(dtype)
    directory = locate(source, "target", suggest=similar_targets)
    return _load_model(
        directory,
        precision,
        family,
        mesh,
        str(source or "the bundled target"),
        weights,
        needs_int4=weights == "int4",
    )


def _load_model(
    directory: Path,
    precision: Precision,
    family: Family | None,
    mesh: Mesh | None,
    name: str,
    weights: str = "dense",
    *,
    needs_int4: bool = False,
) -> LoadedTarget:
    """Loads a language model from its directory.

    If ``needs_int4``, its layers must be stored in integers of four bits.
    """
    from eagle3_jax.conversion import prepared, read_target
    from eagle3_jax.conversion.sidecars import tokenizer_config_of, tokenizer_of

    if family is None:
        checkpoint = prepared.read_target(directory, weights)
    else:
        checkpoint = read_target(directory, family)
    model = DecoderTarget(checkpoint.config, precision)
    mesh = None if mesh is None else as_mesh(mesh)
    shardings = None if mesh is None else param_shardings(mesh, model, model.param_shapes())

    # Parameters that the file has in eight bits stay as they are stored, if `weights` asks for that
    # kind. No others are quantised.
    products = model.param_products()
    kept_as = "" if checkpoint.quantisation is None else checkpoint.quantisation.kept_as
    if needs_int4 and kept_as != "int4":
        words = (
            "not quantised" if checkpoint.quantisation is None else checkpoint.quantisation.words
        )
        raise ValueError(
            f"weights 'int4' keep integers of four bits in groups of neighbouring inputs; {name} is"
            f" {words}, so use another of {', '.join(WEIGHTS)}"
        )
    if kept_as and weights.startswith(kept_as):

        def stored(leaf: Any, product: str) -> str:
            return product if getattr(leaf, "kept_as", "") == kept_as else ""

        products = jax.tree.map(stored, checkpoint.params, products)
    params = quantised(checkpoint.params, products, weights)
    params = cast(params, precision, shardings)
    if family is None and mesh is None:
        prepared.write(checkpoint, params, weights)

    max_positions, bound = _bound(checkpoint.config)
    return LoadedTarget(
        model=model,
        params=params,
        vocab_size=checkpoint.config.vocab_size,
        max_positions=max_positions,
        stop_tokens=checkpoint.stop_tokens,
        tokenizer=tokenizer_of(checkpoint.source),
        name=name,
        mesh=mesh,
        weights=weights,
        bound=bound,
        chat_template=ChatTemplate.from_config(tokenizer_config_of(checkpoint.source)),
        source=directory,
    )


def _bound(config: DecoderConfig) -> tuple[int, str]:
    """Returns the number of positions that are computed.

    The second part is the reason, if the published model has more positions.
    """
    most = config.max_positions

    # Sparse attention reads the `index_topk` best tokens. Up to that many it is full attention.
    index_sizes = {
        layer.mixer.index_topk for layer in config.layers if isinstance(layer.mixer, Latent)
    }
    if most in index_sizes:
        return (
            most,
            f"beyond them its attention is sparse, to {most} tokens, which is not computed here",
        )

    ropes = [layer.mixer.rope for layer in config.layers if isinstance(layer.mixer, GroupedQuery)]
    originals = [
        rope.original_max_positions or most for rope in ropes if rope and rope.type == "longrope"
    ]
    original = min(originals, default=most)
    if original < most:
        return (
            original,
            "beyond them its rotary embedding (longrope) has other factors, which are not computed"
            " here",
        )
    return most, ""


def load_drafter(
    source: str | Path | None = None, *, target: LoadedTarget, layer_ids: str | None = None
) -> LoadedDrafter:
    """Loads a draft head or a draft model for a target.

    It has the target's precision and kind of weights, and is divided over its mesh. A head without
    an embedding shares the target's array. A language model becomes a draft model; the target's own
    directory gives the MTP modules in it.

    Args:
        source: A directory with a head in any supported dialect or with a language model of any
            supported family, a GGUF file of a language model, a hub id, ``smollm2`` for the head of
            that model, ``mtp`` for the MTP modules in the target's own files, or ``None`` for the
            head of the bundled target.
        target: The target.
        layer_ids: The meaning of a head's auxiliary layer numbers if its file does not define it:
            layers that the residual stream is ``entering`` (vLLM) or ``leaving`` (SGLang,
            SpecForge).

    Raises:
        ValueError: It is not a drafter of a known method, or it does not fit the target; the
            message gives the reason.
    """
    from eagle3_jax.conversion.heads import HEADS, make_drafter
    from eagle3_jax.conversion.reading import (
        head_of,
        modules_of,
        note_of_modules,
        open_checkpoint,
    )

    if not isinstance(target.model, DecoderTarget):
        raise ValueError(
            f"{type(target.model).__name__} is not a target that draft heads are loaded for"
        )
    precision = target.model.precision
    if source == OWN_MODULES:
        if target.source is None:
            raise ValueError(
                f"drafter {source!r} is in the target's own files, and {target.name} was not read"
                " from files; load it with load_target"
            )
        directory = target.source
    else:
        directory = locate(source, "eagle3", suggest=similar_drafters)
    opened = open_checkpoint(directory)

    is_model = opened.kind not in HEADS
    if is_model and layer_ids is not None:
        raise ValueError(
            f"{directory} holds a language model, which reads no target layers; leave layer_ids out"
        )
    modules = note_of_modules(opened) if is_model and source != OWN_MODULES else ""
    is_own = target.source is not None and directory.resolve() == target.source.resolve()
    if source == OWN_MODULES or (modules and is_own):
        checkpoint = modules_of(opened, target.model.config)
    elif is_model:
        # A language model becomes a draft model.
        model = _load_model(directory, precision, None, target.mesh, str(source), target.weights)
        drafter = draft_model(model, target)
        note = f"{modules}; it drafts as a language model for this target" if modules else ""
        return dataclasses.replace(drafter, note=note)
    else:
        checkpoint = head_of(opened, target.model.config, layer_ids=layer_ids)

    tables = target.model.tables(target.params)
    drafter, params = make_drafter(checkpoint, tables, precision, target.mesh, target.weights)
    method = HEADS[checkpoint.method].title(checkpoint.config)
    if checkpoint.dialect == "target":
        method = f"{method} in the target's files"
    else:
        method = f"{method} head ({checkpoint.dialect} layout)"
    return LoadedDrafter(
        drafter, params, str(source or "the bundled head"), method, checkpoint.note
    )


def named_drafter(source: str, target: LoadedTarget) -> LoadedDrafter | Drafter[Any] | None:
    """Returns the drafter with a name; ``None`` for plain decoding.

    Args:
        source: A name for which :func:`~eagle3_jax.files.sources.is_named` is true.
        target: The target.

    Raises:
        ValueError: The number is missing, malformed or unsuitable for the target, or the name takes
            no number.
    """
    name, number = parts_of(source)
    if name == "layer-skip":
        return layer_skip(target, number)
    if name == OWN_MODULES:
        return load_drafter(name, target=target)
    return {"ngram": NGram, "suffix": Suffix, "none": lambda: None}[name]()
