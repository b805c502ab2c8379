"""Llama targets in the Hugging Face layout, both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from conversion import kinds, rules
from conversion.errors import CheckpointError, short
from conversion.files import copy_tokenizer, new_directory, read_json, write_json
from conversion.hf_config import (
    Fields,
    bias_fields,
    read_from,
    read_mixer,
    read_mlp,
    read_stack,
    refuse_quantised,
    refuse_unsupported,
    refuse_windows,
    stack_fields,
)
from conversion.rules import Params, Rule
from conversion.tensors import SAFETENSORS, read_tensors, write_tensors
from eagle3_jax.models.config import DecoderConfig, uniform
from eagle3_jax.models.decoder import DecoderTarget


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetCheckpoint:
    """A target as it lies on disk.

    Attributes:
        config: Its description.
        params: Nested dictionary of numpy arrays in the stored dtype, as :class:`DecoderTarget` expects it.
        stop_tokens: Tokens at which the model ends its answer.
        source: Where it was read from; tokenizer files are copied from there.
        dtype: The dtype that holds most of the parameters.
    """

    config: DecoderConfig
    params: Params
    stop_tokens: tuple[int, ...]
    source: Path
    dtype: str


def target_rules(config: DecoderConfig) -> list[Rule]:
    """The rule table of a Llama decoder."""
    table = [Rule("model.embed_tokens.weight", "embedding"), rules.norm("model.norm", "norm")]
    for index, layer in enumerate(config.layers):
        table += rules.block(layer, f"model.layers.{index}", f"blocks.{index}")
    return table if config.tie_embeddings else table + rules.linear("lm_head", "head")


def read_config(fields: Fields) -> DecoderConfig:
    """The description of a Llama.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    refuse_unsupported(fields)
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    mixer = read_mixer(fields, qkv_bias=bias, o_bias=bias)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias"))
    with read_from(fields.where):
        layers = uniform(fields.size("num_hidden_layers"), mixer, mlp)
        return DecoderConfig(layers=layers, tie_embeddings=fields.flag("tie_word_embeddings"), **read_stack(fields))


def read_target(directory: Path) -> TargetCheckpoint:
    """Read a Hugging Face Llama directory.

    Raises:
        CheckpointError: It is no Llama, or one that this library does not compute; the message says why.
    """
    tensors = read_tensors(directory)
    values = read_json(directory / "config.json")
    where = str(directory / "config.json")
    kind = kinds.recognise(values, tensors.keys(), where=str(directory))
    if kind not in (kinds.TARGET, kinds.LANGUAGE_MODEL):
        what = kinds.DIFFERENCES.get(kind, "an EAGLE-3 head")
        raise CheckpointError(f"{directory} is {what}, not a target; give the directory of the language model")
    if values.get("model_type") != "llama":
        raise CheckpointError(
            f"{where}: model_type is {short(values.get('model_type'))}; only 'llama' targets are supported"
        )
    fields = Fields(values, where)
    refuse_quantised(fields)
    num_layers = fields.size("num_hidden_layers")
    rules.check_layers(num_layers, tensors, r"model\.layers\.(\d{1,9})\.", f"{where}: num_hidden_layers")
    config = read_config(fields)
    known = ()
    if config.tie_embeddings:
        # Some writers store the tied projection as well. It may only repeat the embedding.
        known = (r"lm_head\.weight",)
        head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not _same_bits(head, embedding):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false, or remove lm_head.weight"
            )
    shapes = DecoderTarget(config).param_shapes()
    params = rules.read_params(target_rules(config), tensors, shapes, where=str(directory), known=known)
    return TargetCheckpoint(
        config=config,
        params=params,
        stop_tokens=_stop_tokens(directory, fields, config.vocab_size),
        source=directory,
        dtype=rules.main_dtype(params),
    )


def write_target(checkpoint: TargetCheckpoint, directory: str | Path) -> None:
    """Write a new Hugging Face Llama directory, readable by transformers 4.43 and newer and by vLLM.

    Raises:
        CheckpointError: The directory exists, or the layout cannot express the target.
    """
    config = checkpoint.config
    if config.layers[0].mixer.qk_norm:
        raise CheckpointError("qk_norm cannot be expressed in the Hugging Face Llama layout; use --to jax")
    shapes = DecoderTarget(config).param_shapes()
    tensors = rules.write_params(target_rules(config), checkpoint.params, shapes, where=str(checkpoint.source))
    stop = stop_field(checkpoint.stop_tokens)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **stack_fields(config, checkpoint.dtype),
        **bias_fields(config.layers[0]),
        "tie_word_embeddings": config.tie_embeddings,
        **{name: _token_field(checkpoint.source, name) for name in ("bos_token_id", "pad_token_id")},
        "eos_token_id": stop,
        "use_cache": True,
    }
    total = sum(np.asarray(value).nbytes for value in tensors.values())
    with new_directory(directory, total) as temporary:
        write_tensors(temporary / SAFETENSORS, tensors)
        # The official EAGLE code finds the embedding through an index, and through nothing else.
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), SAFETENSORS)}
        write_json(temporary / f"{SAFETENSORS}.index.json", index)
        write_json(temporary / "config.json", values)
        generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": stop}
        write_json(temporary / "generation_config.json", generation)
        copy_tokenizer(checkpoint.source, temporary)


def stop_field(stop_tokens: tuple[int, ...]) -> int | list[int] | None:
    """Stop tokens as ``eos_token_id`` writes them: one number, a list, or null."""
    return stop_tokens[0] if len(stop_tokens) == 1 else (list(stop_tokens) or None)


def _same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    same = first.shape == second.shape and first.dtype == second.dtype
    return same and bool(np.array_equal(first.view(np.uint8), second.view(np.uint8)))


def _token_field(source: Path, name: str) -> Any:
    """A token id that only tokenizers use: carried over from the source, null when it names none."""
    path = source / "config.json"
    value = read_json(path).get(name) if path.is_file() else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(f"{path}: {name} is {short(value)}; expected a token id")
    return value


def _stop_tokens(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """``eos_token_id``; the generation configuration comes first, as in transformers."""
    sources = [fields]
    generation = directory / "generation_config.json"
    if generation.is_file():
        sources.insert(0, Fields(read_json(generation), str(generation)))
    named = (source for source in sources if source.get("eos_token_id") is not None)
    return next((source.token_ids("eos_token_id", vocab_size) for source in named), ())
