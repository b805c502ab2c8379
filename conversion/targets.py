"""Reads and writes targets in the Hugging Face layout; ``families/`` has their differences."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families import Family, described
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.files import new_directory, write_json
from eagle3_jax.conversion.hf_config import ABSENT, stack_fields
from eagle3_jax.conversion.quantised import Quantisation, read_quantised
from eagle3_jax.conversion.rules import Params
from eagle3_jax.conversion.sidecars import copy_tokenizer, read_object
from eagle3_jax.conversion.tensors import SAFETENSORS, Stored, write_tensors
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget

# A larger target is written to several files.
SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetCheckpoint:
    """A target with its parameters as numpy arrays."""

    config: DecoderConfig  #: Its description.
    family: Family  #: Its family, which defines the Hugging Face layout that it is written in.
    #: Nested dictionary of numpy arrays in the stored dtype, as ``DecoderTarget`` expects it.
    params: Params
    stop_tokens: tuple[int, ...]  #: Tokens that end an answer of the model.
    #: The directory, or GGUF file, that it was read from. Tokenizer files are copied from there.
    source: Path
    #: The dtype of most parameters; in a quantised checkpoint, the dtype of the weights that are
    #: not quantised.
    dtype: str
    #: The format of quantised weights, which are decoded to float32 whenever they are read;
    #: ``None`` if there are none.
    quantisation: Quantisation | None = None


class LanguageModel(NamedTuple):
    """A language model in the files of a checkpoint, without parts of other media."""

    family: Family  #: Its family.
    fields: Fields  #: Its fields.
    num_layers: int  #: Its number of layers.
    tensors: Mapping[str, Any]  #: Its tensors and those of its MTP modules, as in a file of text.
    quantisation: Quantisation | None  #: See :class:`TargetCheckpoint`.

    @property
    def modules(self) -> list[int]:
        """The numbers of its MTP modules, which begin with 0; empty without any."""
        modules = self.family.modules
        return [] if modules is None else modules.numbers(self.tensors, self.num_layers)

    def dtype_of(self, params: Params) -> str:
        """The dtype of most parameters, or of the weights that are not quantised."""
        return rules.main_dtype(params) if self.quantisation is None else _dense_dtype(self.fields)


def language_model(stored: Stored, extra_family: Family | None = None) -> LanguageModel:
    """Returns the language model of a checkpoint, the tensors of which are not read yet.

    ``extra_family`` is a family in addition to those of the table.
    """
    family, fields, wrapper = described(stored.fields, extra_family)
    tensors, quantisation = read_quantised(stored.tensors, stored.fields, stored.directory)
    if wrapper is not None:
        tensors = wrapper.select(tensors)
    return LanguageModel(
        family=family,
        fields=fields,
        num_layers=fields.size("num_hidden_layers"),
        tensors=_under_model(tensors, str(stored.directory)),
        quantisation=quantisation or stored.quantisation,
    )


def read_target(stored: Stored, extra_family: Family | None = None) -> TargetCheckpoint:
    """Reads a Hugging Face directory or a GGUF file.

    ``extra_family`` is a family in addition to those of the table.
    """
    directory = stored.directory
    model = language_model(stored, extra_family)
    family = model.family
    fields = model.fields
    num_layers = model.num_layers
    tensors = family.select(model.tensors, num_layers)
    rules.check_layers(
        num_layers, tensors, r"model\.layers\.(\d{1,9})\.", f"{stored.where}: num_hidden_layers"
    )

    config = family.read_config(fields)
    head = tensors.get("lm_head.weight")
    known = family.unused(config)
    if model.quantisation and model.quantisation.zero_biases:
        known = (*known, *_zero_biases(tensors))
    if config.tie_embeddings and head is not None:
        # Some writers store the tied projection as well. It may only repeat the embedding.
        known = (*known, r"lm_head\.weight")
        if not np.array_equal(head, tensors.get("model.embed_tokens.weight", head)):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is true but lm_head.weight differs from"
                " model.embed_tokens.weight; set tie_word_embeddings to false, or remove"
                " lm_head.weight"
            )

    shapes = DecoderTarget(config).param_shapes()
    params = rules.read_params(
        family.table(config, tensors.keys()), tensors, shapes, where=str(directory), known=known
    )
    return TargetCheckpoint(
        config=config,
        family=family,
        params=params,
        stop_tokens=_stop_tokens(directory, fields, config.vocab_size),
        source=directory,
        dtype=model.dtype_of(params),
        quantisation=model.quantisation,
    )


def _zero_biases(tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the biases that are zero throughout."""
    biases = (name for name in tensors if name.endswith(".bias"))
    return tuple(re.escape(name) for name in biases if not np.any(tensors[name]))


def dense_params(checkpoint: TargetCheckpoint) -> Params:
    """Returns the parameters; quantised ones are decoded to the ``dtype`` of the checkpoint."""
    if checkpoint.quantisation is None:
        return checkpoint.params
    dtype = np.dtype(getattr(ml_dtypes, checkpoint.dtype, checkpoint.dtype))

    def decoded(leaf: Any) -> Any:
        return rules.Decoded(leaf, dtype) if getattr(leaf, "computed", False) else leaf

    return jax.tree.map(decoded, checkpoint.params)


def _dense_dtype(fields: Fields) -> str:
    """Returns the dtype of the weights that a quantised checkpoint does not quantise."""
    named = fields.get("dtype") or fields.get("torch_dtype")
    return named if named in rules.FLOATS else "bfloat16"


# Families of which transformers refuses a width that is not a multiple of the number of heads.
# GLM-4.5 (5120 and 96) and Qwen3.5-27B (5120 and 24) are published with such widths.
EVEN_WIDTHS = ("llama", "gemma2", "gemma3_text")


def write_target(checkpoint: TargetCheckpoint, directory: str | Path) -> None:
    """Writes a Hugging Face directory of the target's family, readable by transformers and vLLM.

    Raises:
        CheckpointError: The directory exists, or the family's layout cannot express the target.
    """
    config = checkpoint.config
    family = checkpoint.family
    stop_tokens = list(checkpoint.stop_tokens)
    stop = stop_tokens[0] if len(stop_tokens) == 1 else stop_tokens or None
    with read_from(f"the Hugging Face layout of {family.label}"):
        any_heads = family.model_type not in EVEN_WIDTHS
        sizes = stack_fields(config, checkpoint.dtype, any_heads=any_heads)
        fields = sizes | family.write_fields(config)
    description = {name: value for name, value in fields.items() if value is not ABSENT}
    values = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **description,
        "tie_word_embeddings": config.tie_embeddings,
        **_tokens_of_texts(checkpoint.source),
        "eos_token_id": stop,
        "use_cache": True,
    }
    values = {name: value for name, value in values.items() if name not in family.absent}
    _check_expressed(config, family, values)

    tensors = rules.write_params(
        family.rules(config),
        dense_params(checkpoint),
        DecoderTarget(config).param_shapes(),
        where=str(checkpoint.source),
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    with new_directory(directory, total) as temporary:
        files = write_tensors(temporary / SAFETENSORS, tensors, shard_bytes=SHARD_BYTES)
        # The official EAGLE code finds the embedding only through an index.
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        write_json(temporary / f"{SAFETENSORS}.index.json", index)
        write_json(temporary / "config.json", values)
        generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": stop}
        write_json(temporary / "generation_config.json", generation)
        copy_tokenizer(checkpoint.source, temporary)


def _check_expressed(config: DecoderConfig, family: Family, values: dict[str, Any]) -> None:
    """Refuses a target that could not be read back from the fields that would be written."""
    layout = f"the Hugging Face layout of {family.label}"
    read = family.read_config(Fields(values, layout))
    if read != config:
        expressed = _leaves(read)
        lost = next(path for path, value in _leaves(config) if (path, value) not in expressed)
        raise CheckpointError(f"{layout} cannot express {lost}; use --to jax")


def _leaves(config: Any, path: str = "") -> list[tuple[str, Any]]:
    """Lists every value of a configuration with its path; a layer is named by its index."""
    if isinstance(config, tuple):
        return [
            leaf
            for index, entry in enumerate(config)
            for leaf in _leaves(entry, f"{path}[{index}]")
        ]
    if not dataclasses.is_dataclass(config):
        return [(f"{path} {config}", config)]
    fields = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [
        leaf
        for name, entry in fields
        for leaf in _leaves(entry, f"{path}.{name}" if path else name)
    ]


def _under_model(tensors: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Replaces another prefix that all layers have by ``model.``.

    ``AutoModel`` writes no prefix. Modules around a model, such as those of ``torch.compile``, add
    theirs.
    """
    matches = (re.match(r"((?:\w+\.)*?)layers\.\d+\.", name) for name in tensors)
    prefixes = sorted({match[1] for match in matches if match})
    if not prefixes or "model." in prefixes:
        return tensors
    if len(prefixes) > 1:
        named = " and ".join(f"{prefix}layers.0" for prefix in prefixes[:3])
        raise CheckpointError(
            f"{where}: its layers are named {named}; expected model.layers.0 for those of the"
            " language model, so rename them and remove the others"
        )

    return rules.renamed(tensors, functools.partial(_under_prefix, prefixes[0]), where)


def _under_prefix(prefix: str, name: str) -> str:
    if not name.startswith(prefix):
        return name.removeprefix(prefix.removesuffix("model."))
    inner = name.removeprefix(prefix)
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def _tokens_of_texts(source: Path) -> dict[str, int | None]:
    """Returns the token ids that only tokenizers use, as the source has them; null if absent."""
    fields = Fields(read_object(source, "config.json"), str(source / "config.json"))
    names = ("bos_token_id", "pad_token_id")
    return {name: None if fields.get(name) is None else fields.integer(name) for name in names}


def _stop_tokens(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Reads ``eos_token_id``; the generation configuration has priority, as in transformers."""
    name = "generation_config.json"
    generation = Fields(read_object(directory, name), str(directory / name))
    owner = fields if generation.get("eos_token_id") is None else generation
    return owner.token_ids("eos_token_id", vocab_size)
