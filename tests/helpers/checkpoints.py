"""Tiny checkpoints in every layout, and a second implementation of an EAGLE-3 head in PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_jax import LoadedTarget, conversion, load_drafter, load_target
from eagle3_jax.conversion import CheckpointError, rules
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.topology import Topology
from eagle3_jax.types import DraftSampling

TARGET = DecoderConfig(
    vocab_size=61,
    width=32,
    layers=uniform(8, GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8), GatedMLP(width=24)),
    max_positions=64,
    norm_eps=1e-5,
)
NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def assert_close(ours: Any, truth: np.ndarray) -> None:
    assert np.abs(np.asarray(ours) - truth).max() <= 1e-4 * np.abs(truth).max()


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    # Transformers asks for the format.
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def refused(read: Callable[[Path], Any], path: Path, says: str) -> None:
    """Checks that reading a file raises one printable line in two seconds and writes nothing."""
    before = sorted(path.rglob("*")) if path.is_dir() else []
    begun = time.process_time()
    with pytest.raises(CheckpointError, match=says) as refusal:
        read(path)
    assert time.process_time() - begun < 2
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 600
    assert before == (sorted(path.rglob("*")) if path.is_dir() else [])


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets fields of config.json; ``None`` removes a field."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_tensors(directory: Path, **changes: np.ndarray | None) -> None:
    """Sets tensors (``__`` for a dot); ``None`` removes a tensor."""
    path = directory / "model.safetensors"
    stored = {name: value.copy() for name, value in read_tensors(directory).items()}
    tensors = {**stored, **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, path)


def edited(directory: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray | None]) -> Path:
    """Sets fields and tensors of a checkpoint, or removes them (``None``); returns its path."""
    edit_config(directory, **fields)
    edit_tensors(directory, **tensors)
    return directory


def same_params(first: Any, second: Any) -> bool:
    """Returns whether nested parameters are bit-equal, dtypes included."""
    first_leaves = dict(rules.flatten(first))
    second_leaves = dict(rules.flatten(second))
    bits = lambda leaf: (leaf.dtype, leaf.shape, np.ascontiguousarray(leaf).tobytes())
    if first_leaves.keys() != second_leaves.keys():
        return False
    return all(bits(leaf) == bits(second_leaves[path]) for path, leaf in first_leaves.items())


def same_target(first: Any, second: Any) -> bool:
    """Returns whether two targets are equal, bit for bit."""
    ours, theirs = (dict(rules.flatten(target.params)) for target in (first, second))
    return first.config == second.config and all(
        np.array_equal(ours[name], theirs[name]) for name in theirs
    )


def same_head(first: Any, second: Any) -> bool:
    """Returns whether two heads are equal, bit for bit."""
    parts = lambda head: {
        "head": head.head,
        "ids": head.draft_to_target,
        "embedding": head.embedding,
    }
    present = lambda head: {name: part for name, part in parts(head).items() if part is not None}
    return first.config == second.config and same_params(present(first), present(second))


def round_trip(directory: Path, to: str, target: DecoderConfig, says: str | None = None) -> None:
    """Converts a head to ``out`` next to it and reads it again; ``says`` expects this error."""
    source = conversion.read_head(directory, target)
    out = directory.with_name("out")

    if says is not None:
        with pytest.raises(CheckpointError, match=says):
            conversion.convert(directory, out, to, target)
        assert not out.exists()
        return

    conversion.convert(directory, out, to, target)
    again = conversion.read_head(out, target)
    assert again.dialect == to
    assert conversion.identify(out) == conversion.identify(directory) == source.method
    assert same_head(source, again)
    assert again.draft_to_target is None or again.draft_to_target.dtype == np.int32


def target_config_json(config: DecoderConfig = TARGET) -> dict[str, Any]:
    layer = config.layers[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.mixer.num_heads,
        "num_key_value_heads": layer.mixer.num_kv_heads,
        "head_dim": layer.mixer.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }


Draw = Callable[..., np.ndarray]


def drawing(random: np.random.Generator, dtype: Any = np.float32) -> Draw:
    """Returns a function for random numbers of a shape, around zero or, for norms, around one."""

    def draw(*shape: int, around: float = 0.0) -> np.ndarray:
        return (around + random.normal(0, 0.3, shape)).astype(np.float32).astype(dtype)

    return draw


def draft_vocabulary(
    random: np.random.Generator, vocab: int, draft_vocab: int
) -> dict[str, np.ndarray]:
    """Returns ``d2t`` and ``t2d`` of random tokens."""
    chosen = np.sort(random.permutation(vocab)[:draft_vocab])
    return {
        "d2t": chosen.astype(np.int64) - np.arange(draft_vocab),
        "t2d": np.isin(np.arange(vocab), chosen),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredHead:
    """The sizes of a head of any method, and their fields and tensors in files."""

    width: int = 32
    vocab: int = 61
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 24
    layers: int = 1
    theta: float = 10_000.0
    eps: float = 1e-5
    dtype: Any = np.float32
    seed: int = 1

    def block_tensors(
        self,
        draw: Draw,
        name: str,
        *,
        norms: Sequence[str],
        fed: int | None = None,
        bias: str = "",
        qk_norm: bool = False,
    ) -> dict[str, np.ndarray]:
        """Returns the tensors of a block in Llama's names.

        ``fed`` is the width that attention reads; ``bias`` names the projections that have one.
        """
        width = self.width
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        fed = fed or width
        shapes = {"q": (queries, fed), "k": (keys, fed), "v": (keys, fed), "o": (width, queries)}

        out = {f"{name}.{norm}.weight": draw(width, around=1) for norm in norms}
        out |= {
            f"{name}.self_attn.{key}_proj.weight": draw(*shape) for key, shape in shapes.items()
        }
        out |= {f"{name}.self_attn.{key}_proj.bias": draw(shapes[key][0]) for key in bias}
        out |= {
            f"{name}.self_attn.{key}_norm.weight": draw(self.head_dim, around=1)
            for key in "qk"
            if qk_norm
        }
        out |= {f"{name}.mlp.{key}_proj.weight": draw(self.inner, width) for key in ("gate", "up")}
        return out | {f"{name}.mlp.down_proj.weight": draw(width, self.inner)}

    def geometry(self, **more: Any) -> dict[str, Any]:
        """Returns the fields of ``config.json`` that all heads have."""
        values = {
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "torch_dtype": "float16",
        }
        return values | more


def write_llama(directory: Path, config: DecoderConfig = TARGET, seed: int = 0) -> Path:
    """Writes a random target in the Hugging Face layout, without transformers."""
    draw = drawing(np.random.default_rng(seed))
    width = config.width
    mixer = config.layers[0].mixer
    sizes = StoredHead(
        width=width,
        heads=mixer.num_heads,
        kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        inner=config.layers[0].mlp.width,
    )

    tensors = {
        "model.embed_tokens.weight": draw(config.vocab_size, width),
        "model.norm.weight": draw(width, around=1),
    }
    for layer in range(config.num_layers):
        tensors |= sizes.block_tensors(draw, f"model.layers.{layer}", norms=NORMS)
    tensors["lm_head.weight"] = draw(config.vocab_size, width)
    return write_checkpoint(directory, target_config_json(config), tensors)


@functools.cache
def loaded_target() -> LoadedTarget:
    """Returns a random target of the sizes of :data:`TARGET`."""
    with tempfile.TemporaryDirectory() as folder:
        return load_target(write_llama(Path(folder)))


def target_tables() -> list[np.ndarray]:
    """Returns embedding and output matrix of :func:`loaded_target`, both ``[V D]``."""
    params: Any = loaded_target().params
    return [np.asarray(table) for table in (params["embedding"], params["head"]["kernel"].T)]


def loaded_head(
    write: Callable[[Path], Path],
    topology: Topology | None = None,
    draft_sampling: DraftSampling | None = None,
) -> tuple[Any, Any]:
    """Returns the drafter for :func:`loaded_target` from these files, and its parameters."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_drafter(write(Path(folder)), target=loaded_target())
    return loaded.drafter.with_topology(topology, draft_sampling), loaded.params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(StoredHead):
    """The options of an EAGLE-3 head; the defaults are those of an official one."""

    target_width: int = 32
    draft_vocab: int = 40
    aux: tuple[int, ...] = (2, 4, 5)
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    bias: bool = False
    own_embedding: bool = False
    windows: tuple[int | None, ...] = ()
    sinks: bool = False
    #: Latent attention: the ranks of queries (0 for none), of keys and values, and the channels of
    #: a head that do not rotate, that rotate, and of its value.
    latent: tuple[int, int, int, int, int] | None = None

    def block_tensors(self, draw: Draw, name: str, **options: Any) -> dict[str, np.ndarray]:
        out = super().block_tensors(draw, name, **options)
        attention = f"{name}.self_attn"
        if self.sinks:
            out[f"{attention}.sinks"] = draw(self.heads, around=1)
        if self.latent is None:
            return out

        fed = options.get("fed") or self.width
        rank, kv_rank, still, turning, value = self.latent
        size = self.heads * (still + turning)
        shapes = {"q_a": (rank, fed), "q_b": (size, rank)} if rank else {"q": (size, fed)}
        shapes |= {
            "kv_b": (self.heads * (still + value), kv_rank),
            "o": (self.width, self.heads * value),
        }
        out = {key: tensor for key, tensor in out.items() if ".self_attn." not in key}
        out |= {f"{attention}.{key}_proj.weight": draw(*shape) for key, shape in shapes.items()}
        out[f"{attention}.kv_a_proj_with_mqa.weight"] = draw(kv_rank + turning, fed)
        norms = {"q_a": rank, "kv_a": kv_rank}
        return out | {
            f"{attention}.{key}_layernorm.weight": draw(size, around=1)
            for key, size in norms.items()
            if size
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the tensors in official names, further layers as ``layers.N``."""
        random = np.random.default_rng(self.seed)
        draw = drawing(random, self.dtype)
        width = self.width
        chunks = len(self.aux)

        out = {
            "fc.weight": draw(width, chunks * self.target_width),
            "norm.weight": draw(width, around=1),
        }

        options: dict[str, Any] = {"bias": "qkvo" if self.bias else "", "qk_norm": self.qk_norm}
        out |= self.block_tensors(
            draw, "midlayer", norms=(*NORMS, "hidden_norm"), fed=2 * width, **options
        )

        for layer in range(1, self.layers):
            out |= self.block_tensors(draw, f"layers.{layer}", norms=NORMS, **options)

        if self.fc_norm:
            out |= {f"fc_norm.{i}.weight": draw(self.target_width, around=1) for i in range(chunks)}
        if self.norm_before_fc:
            out["input_norm.weight"] = draw(chunks * self.target_width, around=1)

        if self.own_embedding:
            out["embed_tokens.weight"] = draw(self.vocab, width)
        out["lm_head.weight"] = draw(self.draft_vocab, width)
        if self.draft_vocab < self.vocab:
            out |= draft_vocabulary(random, self.vocab, self.draft_vocab)

        return out

    def config(self) -> dict[str, Any]:
        """Returns the fields of the official layout, and those that a variation needs."""
        values = self.geometry(
            architectures=["LlamaForCausalLM"],
            model_type="qwen3" if self.qk_norm else "llama",
            draft_vocab_size=self.draft_vocab,
            tie_word_embeddings=False,
        )

        flags = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
        values |= {flag: True for flag in flags if getattr(self, flag)}

        if self.head_dim * self.heads != self.width or self.qk_norm:
            values["head_dim"] = self.head_dim
        if self.theta != 10_000.0:
            values["rope_theta"] = self.theta

        if self.windows:
            values["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in self.windows
            ]
            values |= {
                "sliding_window": max(window for window in self.windows if window),
                "use_sliding_window": True,
            }

        if self.latent:
            names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
            values |= dict(zip((*names, "v_head_dim"), self.latent, strict=True))
            values |= {
                "architectures": ["Eagle3DeepseekV2ForCausalLM"],
                "model_type": "kimi_k2",
                "q_lora_rank": self.latent[0] or None,
                "num_key_value_heads": self.heads,
            }

        if self.bias:
            values["attention_bias"] = True
        if self.own_embedding or self.target_width != self.width:
            values["target_hidden_size"] = self.target_width
        if self.aux != (2, 4, 5):
            values["eagle_aux_hidden_state_layer_ids"] = list(self.aux)

        return values

    def write(self, directory: Path, dialect: str = "eagle") -> Path:
        config = self.config()
        tensors = self.tensors()
        layered = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}

        if dialect == "sglang":
            config["architectures"] = ["LlamaForCausalLMEagle3"]
        elif dialect == "modelopt":
            ids = config.pop("eagle_aux_hidden_state_layer_ids", list(self.aux))
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": ids[::-1],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            }
            tensors = {name: value for name, value in layered.items() if name != "t2d"}
        elif dialect == "speculators":
            outer = (
                "draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm",
                "norm_before_fc",
            )  # fmt: skip
            top = {name: config.pop(name) for name in outer if name in config}
            config.pop("eagle_aux_hidden_state_layer_ids", None)
            top["target_hidden_size"] = config.pop("target_hidden_size", None)
            config = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "norm_before_residual": self.norm_before_residual,
                "eagle_aux_hidden_state_layer_ids": list(self.aux),
                **top,
                "transformer_layer_config": config,
            }
            tensors = layered

        return write_checkpoint(directory, config, tensors)


@dataclasses.dataclass(frozen=True)
class Drafted:
    logits: np.ndarray
    tokens: list[int]


class TorchLayers:
    """The parts of a block in PyTorch, without a cache: they run complete sequences."""

    def __init__(self, head: Any, weights: dict[str, Any]):
        import torch

        self.torch = torch
        self.head = head
        self.w = {name.removesuffix(".weight"): value for name, value in weights.items()}

    def rms(self, x: Any, name: str) -> Any:
        return x / self.torch.sqrt((x * x).mean(-1, keepdim=True) + self.head.eps) * self.w[name]

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.w[name].T + self.w.get(f"{name}.bias", self.torch.zeros(()))

    def turn(self, x: Any) -> Any:
        torch = self.torch
        half = self.head.head_dim // 2
        angle = torch.arange(x.shape[0])[:, None] * self.head.theta ** (-torch.arange(half) / half)
        cos = torch.cos(angle)[:, None]
        sin = torch.sin(angle)[:, None]
        a = x[..., :half]
        b = x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, x: Any, name: str, window: int | None = None) -> Any:
        torch = self.torch
        head = self.head
        count = x.shape[0]

        q, k, v = (
            self.linear(x, f"{name}.{key}_proj").view(count, -1, head.head_dim) for key in "qkv"
        )
        if f"{name}.q_norm" in self.w:
            q = self.rms(q, f"{name}.q_norm")
            k = self.rms(k, f"{name}.k_norm")

        repeat = head.heads // head.kv_heads
        q = self.turn(q)
        k = self.turn(k).repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)

        score = torch.einsum("qhd,khd->hqk", q, k) / head.head_dim**0.5
        back = torch.arange(count)[:, None] - torch.arange(count)[None, :]
        score = score.masked_fill((back < 0) | (back >= (window or count)), -torch.inf)
        if f"{name}.sinks" in self.w:
            sinks = self.w[f"{name}.sinks"][:, None, None].expand(-1, count, 1)
            score = torch.cat([score, sinks], -1)
        out = torch.einsum("hqk,khd->qhd", score.softmax(-1)[..., :count], v).reshape(count, -1)

        return self.linear(out, f"{name}.o_proj")

    def attend_latent(self, x: Any, name: str) -> Any:
        """Runs latent attention with explicit keys and values; neighbours rotate together."""
        torch = self.torch
        rank, kv_rank, still, turning, value = self.head.latent
        count = x.shape[0]
        if rank:
            latent = self.rms(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
            q = self.linear(latent, f"{name}.q_b_proj")
        else:
            q = self.linear(x, f"{name}.q_proj")
        q = q.view(count, -1, still + turning)
        latent, shared = self.linear(x, f"{name}.kv_a_proj_with_mqa").split([kv_rank, turning], -1)
        kv = self.linear(self.rms(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj")
        k, v = kv.view(count, -1, still + value).split([still, value], -1)

        frequency = self.head.theta ** (-torch.arange(turning // 2) * 2 / turning)
        angle = torch.arange(count)[:, None, None] * frequency
        turn = torch.polar(torch.ones_like(angle), angle)

        def turned(x: Any) -> Any:
            pairs = torch.view_as_complex(x.reshape(count, -1, turning // 2, 2).contiguous())
            return torch.view_as_real(pairs * turn).flatten(2)

        q = torch.cat([q[..., :still], turned(q[..., still:])], -1)
        k = torch.cat([k, turned(shared).expand(-1, k.shape[1], -1)], -1)
        score = torch.einsum("qhd,khd->hqk", q, k) / (still + turning) ** 0.5
        score = score.masked_fill(torch.ones(count, count).triu(1) > 0, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", score.softmax(-1), v).reshape(count, -1)
        return self.linear(out, f"{name}.o_proj")

    def mlp(self, x: Any, name: str) -> Any:
        gate = self.torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def block(self, x: Any, name: str, *, fed: Any = None, window: int | None = None) -> Any:
        """Runs a block of Llama's. Its attention reads ``fed``, by default the normed input."""
        fed = self.rms(x, f"{name}.input_layernorm") if fed is None else fed
        if getattr(self.head, "latent", None):
            x = x + self.attend_latent(fed, f"{name}.self_attn")
        else:
            x = x + self.attend(fed, f"{name}.self_attn", window)
        return x + self.mlp(self.rms(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")


class TorchHead(TorchLayers):
    """The network of an EAGLE-3 head."""

    def __init__(self, head: Head, embedding: np.ndarray):
        import torch

        raw = {
            name: torch.from_numpy(np.asarray(v, np.float32))
            for name, v in head.tensors().items()
            if name != "t2d"
        }
        super().__init__(
            head, {name.replace("midlayer.", "layers.0."): value for name, value in raw.items()}
        )
        self.chosen = self.w.get("d2t", torch.zeros(head.draft_vocab)).long() + torch.arange(
            head.draft_vocab
        )
        self.table = torch.from_numpy(np.array(embedding, np.float32))

    def fuse(self, features: np.ndarray) -> Any:
        """Fuses ``features [T A Dt]``."""
        chunks = self.torch.from_numpy(features)
        if self.head.fc_norm:
            chunks = self.torch.stack(
                [self.rms(chunks[:, i], f"fc_norm.{i}") for i in range(len(self.head.aux))], 1
            )
        flat = chunks.flatten(1)
        return self.linear(self.rms(flat, "input_norm") if self.head.norm_before_fc else flat, "fc")

    def run(self, tokens: Any, stream: Any) -> Any:
        """Runs the layers on a sequence from position 0; rows see themselves and earlier ones."""
        first, *others = self.head.windows or (None,) * self.head.layers
        normed = self.rms(stream, "layers.0.hidden_norm")
        both = self.torch.cat(
            [self.rms(self.table[tokens], "layers.0.input_layernorm"), normed], -1
        )
        x = self.block(
            normed if self.head.norm_before_residual else stream, "layers.0", fed=both, window=first
        )
        for layer, window in enumerate(others, 1):
            x = self.block(x, f"layers.{layer}", window=window)
        return x

    def logits(self, output: Any) -> Any:
        return self.linear(self.rms(output, "norm"), "lm_head")


def draft_greedily(
    run: Callable[[Any, Any], Any],
    read: Callable[[Any], Any],
    tokens: np.ndarray,
    stream: Any,
    depth: int,
    *,
    chosen: Any = None,
    feed_back: Callable[[Any], Any] = lambda output: output,
) -> Drafted:
    """Returns logits at every true pair, and a greedy chain after the last.

    The chain is recomputed from the start at each step.

    Args:
        run: The network, from target ids and a stream of states, from position 0 on, to outputs.
        read: From outputs to logits.
        tokens: ``[T]``, the target ids after positions 0..T-1.
        stream: ``[T D]``, states at these positions.
        depth: Number of tokens to draft.
        chosen: Target id of each draft id; by default these are equal.
        feed_back: From outputs to the states of drafted tokens.
    """
    import torch

    ids = torch.from_numpy(np.array(tokens)).long()
    logits = []
    drafts = []
    for _ in range(depth):
        output = run(ids, stream)
        logits.append(read(output))
        best = logits[-1][-1].argmax()
        drafts.append(int(best if chosen is None else chosen[best]))
        ids = torch.cat([ids, torch.tensor(drafts[-1:])])
        stream = torch.cat([stream, feed_back(output[-1:])])
    return Drafted(logits[0].numpy(), drafts)


def torch_draft(
    head: Head, embedding: np.ndarray, features: np.ndarray, tokens: np.ndarray, depth: int
) -> Drafted:
    """Drafts with an EAGLE-3 head after ``features [T A Dt]`` and the ``tokens`` after them.

    The features are those of positions 0 to T-1.
    """
    network = TorchHead(head, embedding)
    options = {"feed_back": lambda output: network.rms(output, "norm")} if head.norm_output else {}
    stream = network.fuse(features)
    return draft_greedily(
        network.run, network.logits, tokens, stream, depth, chosen=network.chosen, **options
    )
