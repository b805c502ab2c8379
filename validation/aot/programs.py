"""The programs of the loop, compiled for an accelerator from shapes alone: no weight is ever made."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, SingleDeviceSharding

from eagle3_jax import loop as loops
from eagle3_jax.bench.random_models import shape_name, shape_named
from eagle3_jax.devices.sharding import make_mesh, param_shardings, parse_mesh, row_shardings
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.load import precision_named
from eagle3_jax.loop import LoopParams, Prompts, SpeculativeLoop
from eagle3_jax.models import flash
from eagle3_jax.models.config import DecoderConfig, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import Precision, stored_type
from eagle3_jax.models.quantised import WEIGHTS, eight_bit_shapes
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import SamplingMode, SamplingParams
from validation.aot.facts import Part, parts_of
from validation.aot.platforms import Platform

PROGRAMS = ("prefill", "step", "generate")
_FEWEST = 8  # layers that the default auxiliary layers need
_STOP_TOKENS = 2  # as many ids as end a text of Llama's
_DRAFT = re.compile(r"plain|(plain|chain|tree)([1-9]\d*)")
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
    """A program to compile."""

    platform: str = "cuda:h200"  #: As :meth:`Platform.named` takes it.
    target: str = "Llama-3.1-8B"  #: Name of a shape that is known.
    #: ``plain``, ``plain6`` (tokens of a block, of which one counts), ``chain5`` (K) or ``tree60`` (nodes).
    draft: str = "chain5"
    batch: int = 1  #: Rows.
    program: str = "step"  #: One of :data:`PROGRAMS`.
    sampled: bool = False  #: Whether rows have temperatures; greedy otherwise.
    layers: int | None = None  #: The target's first ones; all of them when ``None``.
    dtype: str = "bfloat16"  #: A precision's name.
    capacity: int = 4096  #: Slots of a row.
    prompt: int = 128  #: Tokens of a prompt.
    mesh: str = ""  #: Axes and their sizes, as ``model=4``; one device when empty.
    #: Of the kernels of target and head, as :data:`~eagle3_jax.models.quantised.WEIGHTS` names them.
    weights: str = "dense"

    def __post_init__(self) -> None:
        Platform.named(self.platform)
        shape_name(self.target)
        precision_named(self.dtype)
        if not _DRAFT.fullmatch(self.draft):
            raise ValueError(
                f"there is no draft {self.draft!r}; use plain, plain6 (tokens of a block), chain5 (K tokens) or "
                "tree60 (nodes)"
            )
        if self.program not in PROGRAMS:
            raise ValueError(f"there is no program {self.program!r}; use one of {', '.join(PROGRAMS)}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"there are no weights {self.weights!r}; use one of {', '.join(WEIGHTS)}")
        most = shape_named(self.target).num_layers
        if self.layers is not None and not 3 <= self.layers <= most:
            raise ValueError(f"--layers is {self.layers}; {self.target} can be cut to 3 to {most} of its layers")
        for name in ("batch", "prompt", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; expected at least 1")
        if self.capacity < self.prompt:
            raise ValueError(f"--capacity {self.capacity} has no room for --prompt {self.prompt}")

    @property
    def name(self) -> str:
        """What tells it from other cases, whatever its depth."""
        words = [self.platform, self.target, self.program, self.draft, f"b{self.batch}"]
        words += ["sampled" if self.sampled else "greedy"]
        words += [self.dtype] * (self.dtype != "bfloat16") + [self.weights] * (self.weights != "dense")
        words += [self.mesh] * bool(self.mesh)
        for field in ("prompt", "capacity"):
            if getattr(self, field) != getattr(Case, field):
                words.append(f"{field}{getattr(self, field)}")
        return " ".join(words)


class Placing:
    """Shapes with shardings, and what a program is traced under."""

    def __init__(self, platform: Platform, axes: str):
        """See the class.

        Args:
            platform: Whose devices.
            axes: As ``model=4,data=2``; empty for one device.
        """
        count = math.prod(parse_mesh(axes).values()) if axes else 1
        devices = platform.devices(count)
        self._device = devices[0]
        self._one = SingleDeviceSharding(devices[0])
        self.mesh: Mesh | None = make_mesh(axes, devices=devices[:count]) if axes else None

    def params(self, loop: SpeculativeLoop, params: LoopParams) -> LoopParams:
        """Parameters of target and head, divided as their layers say."""
        if self.mesh is None:
            return self._everything(params)
        parts = ((loop.target, params.target), (loop.drafter, params.drafter))
        return LoopParams(*(_with(leaves, param_shardings(self.mesh, part, leaves)) for part, leaves in parts))

    def rows(self, tree: Any) -> Any:
        """Prompts or a state, divided by rows and key heads."""
        return self._everything(tree) if self.mesh is None else _with(tree, row_shardings(self.mesh, tree))

    def traced(self) -> contextlib.AbstractContextManager[Any]:
        """What programs are traced under: a mesh, as the decoder does, or no axes and the name of the device.

        By that name Pallas of jax 0.12 knows what to compile a kernel for.
        """
        if self.mesh is not None:
            return jax.set_mesh(self.mesh)
        device = AbstractDevice(self._device.device_kind, None, self._device.platform)
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))

    def _everything(self, tree: Any) -> Any:
        return _with(tree, jax.tree.map(lambda leaf: self._one, tree))


def _with(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


@dataclasses.dataclass(frozen=True)
class Facts:
    """A program at one depth."""

    layers: int  #: Of the target.
    parts: dict[str, Part]  #: See :func:`validation.aot.facts.parts_of`.
    seconds: dict[str, float]  #: To ``trace``, ``lower`` and ``compile``, by the clock.
    #: Bytes on a device: ``argument``, ``output``, ``alias`` (of the output, updated in place), ``temp``, ``peak``.
    memory: dict[str, int]
    state: int  #: Bytes of the state that ``step`` is given to consume; 0 for other programs.
    #: As ``seconds``, of all cores: what does not depend on who else is busy.
    cpu_seconds: dict[str, float] = dataclasses.field(default_factory=dict)


def compiled(case: Case) -> tuple[Facts, str]:
    """Trace, lower and compile it: facts, and the optimised HLO.

    Raises:
        NotHere: The platform's compiler is not installed.
        ValueError: The mesh does not fit.
    """
    config = shape_named(case.target)
    precision = precision_named(case.dtype)
    platform = Platform.named(case.platform)
    config = dataclasses.replace(config, layers=config.layers[: case.layers])
    loop = SpeculativeLoop(
        target=DecoderTarget(config, precision),
        drafter=_drafter(case.draft, config, precision),
        sampling_mode=SamplingMode.TRUNCATED if case.sampled else SamplingMode.GREEDY,
    )
    params = params_of(case, loop, precision)
    placing = Placing(platform, case.mesh)
    with placing.traced(), flash.enabled(platform.kind == "cuda"):
        return _compiled(case, loop, placing, placing.params(loop, params), placing.rows(_prompts(case)))


def _compiled(
    case: Case, loop: SpeculativeLoop, placing: Placing, params: LoopParams, prompts: Prompts
) -> tuple[Facts, str]:
    state = None
    if case.program == "step":  # traced for it alone: what was traced before is not timed
        state = placing.rows(jax.eval_shape(lambda p, q: loop.prefill(p, q, case.capacity), params, prompts))
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        clock = time.perf_counter()
        cores = time.process_time()
        yield
        seconds[name] = time.perf_counter() - clock
        cpu_seconds[name] = time.process_time() - cores

    with timed("trace"):
        if case.program == "step":
            traced = loops.step.trace(loop, params, state)
        elif case.program == "prefill":
            traced = loops.prefill.trace(loop, params, prompts, capacity=case.capacity)
        else:
            traced = loops.generate.trace(loop, params, prompts, capacity=case.capacity)
    with timed("lower"):
        lowered = _lowered(traced, case)
    with timed("compile"):
        program = lowered.compile()
    cache = placing.rows(jax.eval_shape(lambda: loop.target.init_cache(case.batch, case.capacity)))
    leaves = jax.tree.leaves(cache.layers)
    analysis: Any = program.memory_analysis()
    memory = {name: getattr(analysis, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    caches = tuple(dict.fromkeys(shape for leaf in leaves for shape in (leaf.shape, _on_a_device(leaf))))
    table = _on_a_device(params.target["embedding"])
    text = str(program.as_text())
    return Facts(
        layers=loop.target.config.num_layers,  # type: ignore[attr-defined]
        parts=parts_of(text, rounds=case.program == "generate", caches=caches, table=table),
        seconds=seconds,
        memory=memory | {"peak": analysis.peak_memory_in_bytes},
        state=_bytes(state),
        cpu_seconds=cpu_seconds,
    ), text


def _lowered(traced: Any, case: Case) -> Any:
    try:
        return traced.lower()
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise ValueError(f"{case.name} calls Python on the host, which needs the device itself: {error}") from None


def _drafter(draft: str, config: DecoderConfig, precision: Precision) -> Any:
    kind, size = _DRAFT.fullmatch(draft).groups()  # type: ignore[union-attr]
    if draft.startswith("plain"):
        return Plain(int(size or 1))
    # Fewer layers than the default features ask for are enough to see what a layer becomes.
    head = usual_head(config, aux_layers=(0, 1, 2) if config.num_layers < _FEWEST else None)
    topology = (
        Chain(int(size))
        if kind == "chain"
        else DynamicTree(num_nodes=int(size), max_depth=_TREE_DEPTH, top_k=_TREE_TOP_K)
    )
    return Eagle3Drafter(head, topology, precision)


def params_of(case: Case, loop: SpeculativeLoop, precision: Precision) -> LoopParams:
    """Shapes and types of every parameter, as they are stored on a device."""

    def stored(part: Any) -> Any:
        dense = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, stored_type(path, leaf.ndim, precision)),
            part.param_shapes(),
        )
        return dense if case.weights == "dense" else eight_bit_shapes(dense, part.param_products(), case.weights)

    target: Any = stored(loop.target)
    if isinstance(loop.drafter, Plain):
        return LoopParams(target, None)
    width = loop.drafter.config.draft_vocab_size  # type: ignore[attr-defined]
    head = {
        "head": stored(loop.drafter),
        "embedding": target["embedding"],
        "draft_to_target": jax.ShapeDtypeStruct((width,), jnp.int32),
    }
    return LoopParams(target, head)


def _prompts(case: Case) -> Prompts:
    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((case.batch, *shape), dtype)

    return Prompts(
        tokens=rows(case.prompt),
        length=rows(),
        limit=rows(),
        limit_reason=rows(),
        stop_tokens=rows(_STOP_TOKENS),
        sampling=SamplingParams(temperature=rows(dtype=jnp.float32), top_k=rows(), top_p=rows(dtype=jnp.float32)),
        keys=jax.eval_shape(lambda: row_keys(0, case.batch)),
    )


def _bytes(tree: Any) -> int:
    """On a device."""
    return sum(math.prod(_on_a_device(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _on_a_device(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)
