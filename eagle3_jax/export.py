"""A generation as a file: traced and lowered once, run anywhere JAX runs, without this library's models or Flax.

The file holds the program (StableHLO, by :mod:`jax.export`) and what it was made for; the weights stay arguments, by
name. A process that loads it imports no model and traces nothing but one call.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import export as jax_export

from eagle3_jax import __version__

if TYPE_CHECKING:
    from eagle3_jax.decode import SpeculativeDecoder
    from eagle3_jax.types import SamplingMode

FORMAT = 1
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # what JAX lowers for; any other name it would write into the file unread
_ABOUT, _PROGRAM = "about.json", "program.jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What an exported generation was made for.

    Attributes:
        batch: Rows, exactly.
        prompt_tokens: Longest prompt.
        max_new_tokens: Most tokens it can add to the longest prompt.
        max_positions: Longest sequence of the target.
        vocab_size: ``V``.
        sampling_mode: Supported sampling: ``greedy``, ``temperature`` or ``truncated`` (top-k and top-p as well).
        num_nodes: Nodes of a draft, the root included.
        max_depth: Levels below the root.
        stop_tokens: Ids that end a row.
        platforms: Where it runs.
        parameters: Shape and dtype of every array, by name.
        versions: What it was written with.
    """

    batch: int
    prompt_tokens: int
    max_new_tokens: int
    max_positions: int
    vocab_size: int
    sampling_mode: str
    num_nodes: int
    max_depth: int
    stop_tokens: tuple[int, ...]
    platforms: tuple[str, ...]
    parameters: dict[str, tuple[tuple[int, ...], str]]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ExportedRow:
    """One prompt's result.

    Attributes:
        tokens: New tokens only, a stop token included.
        num_drafts: Rounds.
        num_accepted_tokens: Draft tokens accepted in them.
    """

    tokens: list[int]
    num_drafts: int
    num_accepted_tokens: int


class ExportedGeneration:
    """A generation that was exported or loaded.

    Example::

        export_generation(decoder, prompt_tokens=128, max_new_tokens=128).save("generation.zip")
        # elsewhere, with the same weights
        generation = ExportedGeneration.load("generation.zip")
        generation(parameters, [[1, 17, 5]])[0].tokens
    """

    def __init__(self, program: jax_export.Exported, about: About):
        """See the class.

        Args:
            program: What is run.
            about: What it was made for.
        """
        self.program, self.about = program, about
        self._call = jax.jit(program.call)

    def __call__(
        self,
        parameters: Mapping[str, jax.Array | np.ndarray],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[ExportedRow]:
        """Complete a batch of prompts; compiles at the first call.

        Args:
            parameters: Those that :func:`parameters_of` named when it was exported.
            prompts: As many as it was exported for.
            max_new_tokens: At most what it was exported for, and that when left out.
            temperature: 0 is greedy.
            top_k: 0 for all tokens.
            top_p: 1 for all tokens.
            seed: Random seed, 0 to 2^32 - 1.

        Raises:
            ValueError: It was not made for this; the message says what it was made for.
        """
        about = self.about
        limit = about.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._check(parameters, prompts, limit)
        self._check_sampling(temperature, top_k, top_p)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to {2**32 - 1}")
        tokens = np.zeros((about.batch, about.prompt_tokens), np.int32)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = prompt
        length = np.array([len(prompt) for prompt in prompts], np.int32)
        asked = {
            "tokens": tokens,
            "length": length,
            "limit": np.minimum(length + limit, about.max_positions).astype(np.int32),
            "temperature": np.full(about.batch, temperature, np.float32),
            "top_k": np.full(about.batch, top_k, np.int32),
            "top_p": np.full(about.batch, top_p, np.float32),
            "seed": np.uint32(seed),
        }
        made = jax.device_get(self._call({name: parameters[name] for name in about.parameters}, asked))
        return [
            ExportedRow(
                made["tokens"][row, length[row] : made["length"][row]].tolist(),
                int(made["num_drafts"][row]),
                int(made["num_accepted_tokens"][row]),
            )
            for row in range(about.batch)
        ]

    def save(self, path: str | Path) -> None:
        """Write it as one file, which appears under its name only when complete."""
        from eagle3_jax.writing import whole_file  # who only loads needs none of it

        with whole_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_ABOUT, json.dumps({"format": FORMAT, **dataclasses.asdict(self.about)}, indent=1))
            archive.writestr(_PROGRAM, bytes(self.program.serialize()))

    @classmethod
    def load(cls, path: str | Path) -> ExportedGeneration:
        """Read what :meth:`save` wrote; nothing is traced.

        Raises:
            ValueError: It is no such file, or one that this JAX or this device cannot run.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                values, serialized = json.loads(archive.read(_ABOUT)), archive.read(_PROGRAM)
        except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not an exported generation ({error}); export it again") from None
        if (found := values.pop("format", None)) != FORMAT:
            raise ValueError(f"{path} is of format {found}; this version reads format {FORMAT}, so export it again")
        for name in ("stop_tokens", "platforms"):
            values[name] = tuple(values[name])
        values["parameters"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in values["parameters"].items()}
        about = About(**values)
        try:
            program = jax_export.deserialize(bytearray(serialized))
        except Exception as error:  # of many types, none of them documented
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path} was written with jax {about.versions['jax']}, and jax {jax.__version__} cannot read it "
                f"({reason}); export it again"
            ) from None
        return cls(program, about)

    def _check(self, parameters: Mapping[str, Any], prompts: Sequence[Sequence[int]], limit: int) -> None:
        about = self.about
        for name, (shape, dtype) in about.parameters.items():
            if name not in parameters:
                raise ValueError(f"the parameter {name} is missing; expected {dtype}{list(shape)}")
            given = parameters[name]
            if tuple(given.shape) != shape or str(given.dtype) != dtype:
                raise ValueError(f"{name} is {given.dtype}{list(given.shape)}; exported for {dtype}{list(shape)}")
        if len(prompts) != about.batch:
            raise ValueError(f"{len(prompts)} prompts were given; exported for exactly {about.batch}")
        for prompt in prompts:
            if not 1 <= len(prompt) <= about.prompt_tokens:
                raise ValueError(f"a prompt has {len(prompt)} tokens; exported for 1 to {about.prompt_tokens}")
            if not all(0 <= token < about.vocab_size for token in prompt):
                raise ValueError(f"a prompt holds an id outside the vocabulary; expected 0 to {about.vocab_size - 1}")
        if not 1 <= limit <= about.max_new_tokens:
            raise ValueError(f"max_new_tokens is {limit}; exported for 1 to {about.max_new_tokens}")

    def _check_sampling(self, temperature: float, top_k: int, top_p: float) -> None:
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1):
            raise ValueError(
                f"temperature {temperature:g}, top_k {top_k} and top_p {top_p:g}; expected at least 0, at least 0, and "
                "above 0 up to 1"
            )
        needed = "greedy" if temperature == 0 else "temperature" if top_k == 0 and top_p == 1 else "truncated"
        offered = ("greedy", "temperature", "truncated")
        if offered.index(needed) > offered.index(self.about.sampling_mode):
            raise ValueError(
                f"this needs a program exported with sampling_mode {needed}; this one is {self.about.sampling_mode}"
            )


def export_generation(
    decoder: SpeculativeDecoder,
    *,
    batch: int = 1,
    prompt_tokens: int = 128,
    max_new_tokens: int = 128,
    sampling_mode: SamplingMode | None = None,
    platforms: Sequence[str] | None = None,
) -> ExportedGeneration:
    """Trace and lower one whole generation of fixed shapes.

    Args:
        decoder: Target, drafter, draft shape and stop tokens.
        batch: Rows.
        prompt_tokens: Longest prompt; shorter ones are padded.
        max_new_tokens: Most tokens to add.
        sampling_mode: What sampling it must be able to do; greedy when left out.
        platforms: Of :data:`PLATFORMS`, such as ``("cpu", "cuda")``; the present one when left out. The hardware need
            not be present.

    Raises:
        ValueError: The target has no room for this, the decoder is not lossless, or a platform is unknown.
    """
    from eagle3_jax.models import flash
    from eagle3_jax.state import LoopParams, Prompts
    from eagle3_jax.types import FinishReason, SamplingMode, SamplingParams

    if min(batch, prompt_tokens, max_new_tokens) < 1 or prompt_tokens >= decoder.target.max_positions:
        raise ValueError(
            f"batch {batch}, prompt_tokens {prompt_tokens} and max_new_tokens {max_new_tokens}; expected at least 1, "
            f"and a prompt shorter than the {decoder.target.max_positions} positions of {decoder.target.name}"
        )
    if not decoder.lossless:
        name = type(decoder.loop.verifier).__name__
        raise ValueError(f"the decoder accepts by {name}, so its output is not the target's; export one without")
    if platforms is not None:
        _check_platforms(platforms)
    sampling_mode = SamplingMode.GREEDY if sampling_mode is None else sampling_mode
    loop = dataclasses.replace(decoder.loop, sampling_mode=sampling_mode)
    capacity = min(prompt_tokens + max_new_tokens, decoder.target.max_positions) + loop.drafter.num_nodes
    stop_tokens = np.tile(np.array(decoder.stop_tokens, np.int32), (batch, 1))
    named = parameters_of(decoder)
    treedef, order = _layout(decoder)

    def generation(parameters: dict[str, jax.Array], asked: dict[str, jax.Array]) -> dict[str, Any]:
        params: LoopParams = jax.tree.unflatten(treedef, [parameters[name] for name in order])
        full = asked["limit"] >= decoder.target.max_positions
        # The keys are those of `sampling.row_keys`, of a seed that is an argument here.
        prompts = Prompts(
            tokens=asked["tokens"],
            length=asked["length"],
            limit=asked["limit"],
            limit_reason=jax.numpy.where(full, int(FinishReason.CAPACITY), int(FinishReason.LENGTH)),
            stop_tokens=jax.numpy.asarray(stop_tokens),
            sampling=SamplingParams(temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"]),
            keys=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(asked["seed"]), jax.numpy.arange(batch)),
        )
        outcome = loop.generate(params, prompts, capacity)
        return {
            "tokens": outcome.tokens,
            "length": outcome.length,
            "num_drafts": outcome.stats.num_drafts,
            "num_accepted_tokens": outcome.stats.num_accepted_tokens,
        }

    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named.items()}
    rows = {name: jax.ShapeDtypeStruct((batch,), np.int32) for name in ("length", "limit", "top_k")}
    rows |= {name: jax.ShapeDtypeStruct((batch,), np.float32) for name in ("temperature", "top_p")}
    rows |= {
        "tokens": jax.ShapeDtypeStruct((batch, prompt_tokens), np.int32),
        "seed": jax.ShapeDtypeStruct((), np.uint32),
    }
    with flash.enabled(False):  # JAX exports Triton kernels for one platform only, without a promise to run them later
        program = jax_export.export(jax.jit(generation), platforms=platforms)(shapes, rows)
    about = About(
        batch=batch,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_positions=decoder.target.max_positions,
        vocab_size=decoder.target.vocab_size,
        sampling_mode=sampling_mode.name.lower(),
        num_nodes=loop.drafter.num_nodes,
        max_depth=loop.drafter.max_depth,
        stop_tokens=decoder.stop_tokens,
        platforms=program.platforms,
        parameters={name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in named.items()},
        versions={"eagle3_jax": __version__, "jax": jax.__version__},
    )
    return ExportedGeneration(program, about)


def parameters_of(decoder: SpeculativeDecoder) -> dict[str, jax.Array]:
    """The arrays that a program exported from this decoder takes, by name; one that two models share comes once."""
    leaves = jax.tree.leaves(decoder.params)
    return dict(zip(_layout(decoder)[1], leaves, strict=True))


def _check_platforms(platforms: Sequence[str]) -> None:
    given = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [repr(name) for name in given if name not in PLATFORMS]
    if isinstance(platforms, str) or unknown or not given:
        said = f"unknown platform {', '.join(unknown)}" if unknown else f"platforms is {platforms!r}"
        raise ValueError(
            f"{said}; expected one or several of {', '.join(PLATFORMS)}, such as platforms=('cpu', 'cuda')"
        )


def _layout(decoder: SpeculativeDecoder) -> tuple[Any, list[str]]:
    """The tree of the parameters, and the name of each leaf: the first name of an array that occurs twice."""
    leaves, treedef = jax.tree.flatten_with_path(decoder.params)
    first: dict[int, str] = {}
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return treedef, [first.setdefault(id(leaf), name) for name, (_, leaf) in zip(names, leaves, strict=True)]


__all__ = ["About", "ExportedGeneration", "ExportedRow", "export_generation", "parameters_of"]
