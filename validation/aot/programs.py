"""The programs of the loop, compiled for an accelerator from shapes; no weight is made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from eagle3_jax import load_target
from eagle3_jax import loop as loops
from eagle3_jax.bench.random_models import shape_named
from eagle3_jax.devices.sharding import make_mesh, param_shardings, parse_mesh, row_shardings
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.files.sources import bundled
from eagle3_jax.loop import LoopParams, Prompts, SpeculativeLoop
from eagle3_jax.models import flash
from eagle3_jax.models.config import DecoderConfig, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, stored_type
from eagle3_jax.models.quantised import quantised_shapes
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import SamplingMode, SamplingParams
from validation.aot.hlo import Counts, count
from validation.aot.platforms import Platform
from validation.aot.same import text_of
from validation.decodings import NeverRight
from validation.device import DETERMINISTIC, ROUNDED_AS_WRITTEN, products

PROGRAMS = ("prefill", "step", "run", "generate")
SHIPPED = "shipped"  # the target of the shipped pair
# As users have it, and as L3 compares bits.
OPTIONS = {"default": {}, "exact": DETERMINISTIC | ROUNDED_AS_WRITTEN}
_FEWEST = 8  # layers that the default auxiliary layers need
_STOP_TOKENS = 2  # Llama has two ids that end a text
_DRAFT = re.compile(r"(plain)|(plain|chain|never|tree)([1-9]\d*)")
# The official tree: 60 nodes, 8 levels below the root, 10 candidates.
_TREE_DEPTH = 8
_TREE_TOP_K = 10
# One shape of each family with a special kind of layer, on a mesh that can serve its parameters.
SERVED = {
    "qwen3_moe": ("Qwen3-30B-A3B", "model=4"),
    "gpt_oss": ("gpt-oss-120b", "model=8"),
    "deepseek_v3": ("DeepSeek-V3", "model=8"),
    "qwen3_next": ("Qwen3-Next-80B-A3B", "model=2"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program to compile, in bfloat16."""

    platform: str = "cuda:h200"  #: As :meth:`Platform.named` takes it.
    target: str = "Llama-3.1-8B"  #: Name of a known shape, or :data:`SHIPPED`.
    #: ``plain``, ``plain6`` (in blocks of 6), ``chain5`` (K), ``never5`` (that chain, never right),
    #: ``tree60`` (nodes).
    draft: str = "chain5"
    batch: int = 1  #: Rows.
    program: str = "step"  #: One of :data:`PROGRAMS`.
    sampled: bool = False  #: Whether rows have temperatures; greedy otherwise.
    layers: int | None = None  #: Number of the target's first layers; all of them when ``None``.
    capacity: int = 4096  #: Slots of a row.
    prompt: int = 128  #: Tokens of a prompt.
    mesh: str = ""  #: Axes and their sizes, as ``model=4``; one device when empty.
    #: Kernels of target and head, as :data:`~eagle3_jax.models.quantised.WEIGHTS` names them.
    weights: str = "dense"
    options: str = "default"  #: Of the compiler, by their name in :data:`OPTIONS`.
    invariant: bool = (
        False  #: Whether the target's bits for a token depend on nothing but the tokens before it.
    )

    def __post_init__(self) -> None:
        Platform.named(self.platform)
        if not _DRAFT.fullmatch(self.draft):
            raise ValueError(
                f"there is no draft {self.draft!r}; use plain, plain6 (in blocks of 6), chain5 (K"
                " tokens), never5 (K tokens that are never right) or tree60 (nodes)"
            )

        most = self.config.num_layers
        if self.layers is not None and not 3 <= self.layers <= most:
            raise ValueError(
                f"--layers is {self.layers}; {self.target} can be cut to 3 to {most} of its layers"
            )
        if self.capacity < self.prompt:
            raise ValueError(f"--capacity {self.capacity} has no room for --prompt {self.prompt}")

    @property
    def config(self) -> DecoderConfig:
        """Of the target, with all its layers.

        Raises:
            ValueError: There is no such shape.
        """
        return _shipped_config() if self.target == SHIPPED else shape_named(self.target)

    @property
    def name(self) -> str:
        """Name that tells it from other cases, whatever its depth."""
        words = [self.platform, self.target, self.program, self.draft, f"b{self.batch}"]
        words.append("sampled" if self.sampled else "greedy")
        words += [self.weights] * (self.weights != "dense")
        words += [self.options] * (self.options != "default")
        words += ["invariant"] * self.invariant
        words += [self.mesh] * bool(self.mesh)
        for field in ("prompt", "capacity"):
            if getattr(self, field) != getattr(Case, field):
                words.append(f"{field}{getattr(self, field)}")
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A program at one depth."""

    layers: int  #: Layers of the target.
    counts: Counts  #: Counts of a round, or of a prefill.
    #: Bytes on a device: ``temp``, ``alias`` (of results, updated in place), and the ``peak``.
    memory: dict[str, int]
    state: int  #: Bytes of the state that ``step`` updates; 0 for other programs.


def compiled(case: Case) -> tuple[Facts, str]:
    """Traces, lowers and compiles a case. Returns facts and the optimized HLO.

    Raises:
        NotHere: The compiler of the platform is not installed.
        ValueError: The mesh does not fit.
    """
    config = dataclasses.replace(case.config, layers=case.config.layers[: case.layers])
    loop = SpeculativeLoop(
        target=DecoderTarget(config, dataclasses.replace(BFLOAT16, invariant=case.invariant)),
        drafter=_drafter(case.draft, config),
        sampling_mode=SamplingMode.TRUNCATED if case.sampled else SamplingMode.GREEDY,
    )
    params = _params(case, loop)

    platform = Platform.named(case.platform)
    devices = platform.devices(math.prod(parse_mesh(case.mesh).values()) if case.mesh else 1)
    if case.mesh:
        mesh = make_mesh(case.mesh, devices=devices)
        parts = ((loop.target, params.target), (loop.drafter, params.drafter))
        params = LoopParams(
            *(_placed(leaves, param_shardings(mesh, part, leaves)) for part, leaves in parts)
        )

        def place_rows(tree: Any) -> Any:
            return _placed(tree, row_shardings(mesh, tree))

        traced_under = jax.set_mesh(mesh)
    else:
        single = SingleDeviceSharding(devices[0])

        def place_rows(tree: Any) -> Any:
            return _placed(tree, jax.tree.map(lambda leaf: single, tree))

        params = place_rows(params)
        # By the kind of the device Pallas of jax 0.12 knows what to compile a kernel for.
        device = AbstractDevice(devices[0].device_kind, None, devices[0].platform)
        traced_under = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))

    exact_products = products("L3") if case.options == "exact" else contextlib.nullcontext()
    with traced_under, flash.enabled(platform.kind == "cuda"), exact_products:
        return _compiled(case, loop, params, place_rows)


def _compiled(
    case: Case, loop: SpeculativeLoop, params: LoopParams, place_rows: Callable[[Any], Any]
) -> tuple[Facts, str]:
    prompts = place_rows(_prompts(case))
    program = getattr(loops, case.program)
    state = None
    if case.program in ("step", "run"):
        state = place_rows(
            jax.eval_shape(lambda p, q: loop.prefill(p, q, case.capacity), params, prompts)
        )
        lowered = program.lower(loop, params, state)
    else:
        lowered = program.lower(loop, params, prompts, capacity=case.capacity)
    executable = lowered.compile(OPTIONS[case.options])
    text = text_of(executable)

    # On a mesh a cache may be gathered: its shape on one device, and its complete shape.
    cache = place_rows(jax.eval_shape(lambda: loop.target.init_cache(case.batch, case.capacity)))
    leaves = jax.tree.leaves(cache.layers)
    shapes = [leaf.shape for leaf in leaves]
    shapes += [_on_a_device(leaf) for leaf in [*leaves, params.target["embedding"]]]

    analysis: Any = executable.memory_analysis()
    facts = Facts(
        layers=case.layers or case.config.num_layers,
        counts=count(text, shapes, rounds=case.program in ("run", "generate")),
        memory={
            "temp": analysis.temp_size_in_bytes,
            "alias": analysis.alias_size_in_bytes,
            "peak": analysis.peak_memory_in_bytes,
        },
        state=sum(
            math.prod(_on_a_device(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
    )
    return facts, text


def _placed(tree: Any, shardings: Any) -> Any:
    """Returns the shapes of a tree with their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _on_a_device(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)


def _drafter(draft: str, config: DecoderConfig) -> Any:
    kind, size = _DRAFT.fullmatch(draft).groups()[-2:]  # type: ignore[union-attr]
    if kind in (None, "plain"):
        return Plain(int(size or 1))
    # Fewer layers than the default features need are enough for the cost of a layer.
    head = usual_head(config, aux_layers=(0, 1, 2) if config.num_layers < _FEWEST else None)
    if kind != "tree":
        chain = Eagle3Drafter(head, Chain(int(size)), BFLOAT16)
        return chain if kind == "chain" else NeverRight(chain, config.vocab_size)
    tree = DynamicTree(num_nodes=int(size), max_depth=_TREE_DEPTH, top_k=_TREE_TOP_K)
    return Eagle3Drafter(head, tree, BFLOAT16)


def _params(case: Case, loop: SpeculativeLoop) -> LoopParams:
    """Returns shapes and types of every parameter, as a device stores them."""

    def stored(part: Any) -> Any:
        dense = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(
                leaf.shape, stored_type(path, leaf.ndim, BFLOAT16)
            ),
            part.param_shapes(),
        )
        return (
            dense
            if case.weights == "dense"
            else quantised_shapes(dense, part.param_products(), case.weights)
        )

    target: Any = stored(loop.target)
    drafter: Any = loop.drafter
    if isinstance(drafter, Plain):
        return LoopParams(target, None)
    head = drafter.inner if isinstance(drafter, NeverRight) else drafter
    table = jax.ShapeDtypeStruct((head.config.draft_vocab_size,), jnp.int32)
    params = {"head": stored(head), "embedding": target["embedding"], "draft_to_target": table}
    if head is drafter:
        return LoopParams(target, params)
    return LoopParams(
        target,
        {"inner": params, "tokens": jax.ShapeDtypeStruct((case.batch, case.capacity), jnp.int32)},
    )


@functools.cache
def _shipped_config() -> DecoderConfig:
    model: Any = load_target(bundled("target"), dtype=BFLOAT16.name).model
    return model.config


def _prompts(case: Case) -> Prompts:
    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((case.batch, *shape), dtype)

    return Prompts(
        tokens=rows(case.prompt),
        length=rows(),
        limit=rows(),
        limit_reason=rows(),
        stop_tokens=rows(_STOP_TOKENS),
        sampling=SamplingParams(
            temperature=rows(dtype=jnp.float32), top_k=rows(), top_p=rows(dtype=jnp.float32)
        ),
        keys=jax.eval_shape(lambda: row_keys(0, case.batch)),
    )
