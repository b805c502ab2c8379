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

if TYPE_CHECKING:
    from eagle3_jax.decode import SpeculativeDecoder
    from eagle3_jax.types import SamplingMode

FORMAT = 2
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # JAX checks no names of platforms
_MODES = ("greedy", "temperature", "truncated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What an exported generation was made for, in types of JSON."""

    batch: int  #: Rows, exactly.
    prompt_tokens: int  #: Longest prompt.
    max_new_tokens: int  #: Most tokens that it can add to the longest prompt.
    max_positions: int  #: Longest sequence of the target.
    vocab_size: int  #: ``V``.
    sampling_mode: str  #: Supported sampling: ``greedy``, ``temperature`` or ``truncated`` (top-k and top-p as well).
    platforms: list[str]  #: Platforms on which it runs.
    parameters: dict[str, str]  #: Dtype and shape of every array as text, by name.
    jax: str = jax.__version__  #: Version of JAX that wrote it.
    format: int = FORMAT  #: Version of these fields.


@dataclasses.dataclass(frozen=True)
class ExportedRow:
    """One prompt's result."""

    tokens: list[int]  #: New tokens only, a stop token included.
    num_drafts: int  #: Rounds.
    num_accepted_tokens: int  #: Draft tokens accepted in them.


class ExportedGeneration:
    """A generation that was exported or loaded.

    Example::

        export_generation(decoder, prompt_tokens=128, max_new_tokens=128).save("generation.zip")
        # elsewhere, with the same weights
        generation = ExportedGeneration.load("generation.zip")
        generation(parameters, [[1, 17, 5]])[0].tokens
    """

    def __init__(self, program: jax_export.Exported, about: About):
        """Wraps a lowered program; ``about`` says which shapes and sampling it was made for."""
        self.program = program
        self.about = about
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
            max_new_tokens: At most the number that it was exported for, which is the default.
            temperature: 0 is greedy.
            top_k: 0 for all tokens.
            top_p: 1 for all tokens.
            seed: Random seed, 0 to 2^32 - 1.

        Raises:
            ValueError: The program was exported for something else; the message says for what.
        """
        about = self.about
        limit = about.max_new_tokens if max_new_tokens is None else max_new_tokens
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        needed = "greedy" if temperature == 0 else "temperature" if top_k == 0 and top_p == 1 else "truncated"
        if len(prompts) != about.batch:
            raise ValueError(f"{len(prompts)} prompts were given; exported for exactly {about.batch}")
        if lengths.min() < 1 or lengths.max() > about.prompt_tokens:
            raise ValueError(f"a prompt is empty or too long; exported for 1 to {about.prompt_tokens} tokens")
        if not all(0 <= token < about.vocab_size for prompt in prompts for token in prompt):
            raise ValueError(f"a prompt has an id outside the vocabulary; expected 0 to {about.vocab_size - 1}")
        if not 1 <= limit <= about.max_new_tokens:
            raise ValueError(f"max_new_tokens is {limit}; exported for 1 to {about.max_new_tokens}")
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= seed < 2**32):
            raise ValueError(
                f"temperature {temperature:g}, top_k {top_k}, top_p {top_p:g} and seed {seed}; expected at least 0, at "
                f"least 0, above 0 up to 1, and 0 to {2**32 - 1}"
            )
        if _MODES.index(needed) > _MODES.index(about.sampling_mode):
            raise ValueError(
                f"this needs a program exported with sampling_mode {needed}; this one is {about.sampling_mode}"
            )
        for name, expected in about.parameters.items():
            given = _type_of(parameters[name]) if name in parameters else "missing"
            if given != expected:
                raise ValueError(f"the parameter {name} is {given}; exported for {expected}")
        tokens = np.zeros((about.batch, about.prompt_tokens), np.int32)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = prompt
        asked = {
            "tokens": tokens,
            "length": lengths,
            "limit": np.minimum(lengths + limit, about.max_positions).astype(np.int32),
            "temperature": np.full(about.batch, temperature, np.float32),
            "top_k": np.full(about.batch, top_k, np.int32),
            "top_p": np.full(about.batch, top_p, np.float32),
            "seed": np.uint32(seed),
        }
        made = jax.device_get(self._call({name: parameters[name] for name in about.parameters}, asked))
        columns = (made[name] for name in ("tokens", "length", "num_drafts", "num_accepted_tokens"))
        return [
            ExportedRow(tokens[start:end].tolist(), int(drafts), int(accepted))
            for start, tokens, end, drafts, accepted in zip(lengths, *columns, strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Write it as one file, which appears under its name only when complete."""
        from eagle3_jax.writing import whole_file  # loading needs none of it

        with whole_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("about.json", json.dumps(dataclasses.asdict(self.about), indent=1))
            archive.writestr("program.jax", bytes(self.program.serialize()))

    @classmethod
    def load(cls, path: str | Path) -> ExportedGeneration:
        """Read a file of :meth:`save`; nothing is traced.

        Raises:
            ValueError: It is no such file, or one that this JAX or this device cannot run.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                values = json.loads(archive.read("about.json"))
                serialized = archive.read("program.jax")
        except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not an exported generation ({error}); export it again") from None
        if (found := values.get("format")) != FORMAT:
            raise ValueError(f"{path} is of format {found}; this version reads format {FORMAT}, so export it again")
        about = About(**values)
        try:
            return cls(jax_export.deserialize(bytearray(serialized)), about)
        except Exception as error:  # of many types, none of them documented
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path} was written with jax {about.jax}, and jax {jax.__version__} cannot read it ({reason}); "
                "export it again"
            ) from None


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
        sampling_mode: Sampling that it must support. Default: greedy.
        platforms: Some of :data:`PLATFORMS`, such as ``("cpu", "cuda")``. Default: the present one. The hardware need
            not be present.

    Raises:
        ValueError: The target has no room for this, the decoder is not lossless, or a platform is unknown.
    """
    from eagle3_jax.models import flash
    from eagle3_jax.state import LoopParams, Prompts
    from eagle3_jax.types import FinishReason, SamplingMode, SamplingParams

    target = decoder.target
    if min(batch, prompt_tokens, max_new_tokens) < 1 or prompt_tokens >= target.max_positions:
        raise ValueError(
            f"batch {batch}, prompt_tokens {prompt_tokens} and max_new_tokens {max_new_tokens}; expected at least 1, "
            f"and a prompt shorter than the {target.max_positions} positions of {target.name}"
        )
    if not decoder.lossless:
        name = type(decoder.loop.verifier).__name__
        raise ValueError(f"the decoder accepts by {name}, so its output is not the target's; export one without")
    if platforms is not None and (not platforms or isinstance(platforms, str) or not set(platforms) <= set(PLATFORMS)):
        raise ValueError(
            f"platforms is {platforms!r}; expected one or several of {', '.join(PLATFORMS)}, such as "
            "platforms=('cpu', 'cuda')"
        )
    sampling_mode = SamplingMode.GREEDY if sampling_mode is None else sampling_mode
    loop = dataclasses.replace(decoder.loop, sampling_mode=sampling_mode)
    capacity = min(prompt_tokens + max_new_tokens, target.max_positions) + loop.drafter.num_nodes
    stop_tokens = np.tile(np.array(decoder.stop_tokens, np.int32), (batch, 1))
    named = parameters_of(decoder)
    treedef, order = _layout(decoder)

    def generation(parameters: dict[str, jax.Array], asked: dict[str, jax.Array]) -> dict[str, Any]:
        params: LoopParams = jax.tree.unflatten(treedef, [parameters[name] for name in order])
        full = asked["limit"] >= target.max_positions
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
        counters = {name: getattr(outcome.stats, name) for name in ("num_drafts", "num_accepted_tokens")}
        return {"tokens": outcome.tokens, "length": outcome.length, **counters}

    shaped = jax.ShapeDtypeStruct
    shapes = {name: shaped(leaf.shape, leaf.dtype) for name, leaf in named.items()}
    rows = {name: shaped((batch,), np.int32) for name in ("length", "limit", "top_k")}
    rows |= {name: shaped((batch,), np.float32) for name in ("temperature", "top_p")}
    rows |= {"tokens": shaped((batch, prompt_tokens), np.int32), "seed": shaped((), np.uint32)}
    with flash.enabled(False):  # JAX exports Triton kernels for one platform only, without a promise to run them later
        program = jax_export.export(jax.jit(generation), platforms=platforms)(shapes, rows)
    about = About(
        batch=batch,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_positions=target.max_positions,
        vocab_size=target.vocab_size,
        sampling_mode=sampling_mode.name.lower(),
        platforms=list(program.platforms),
        parameters={name: _type_of(leaf) for name, leaf in named.items()},
    )
    return ExportedGeneration(program, about)


def parameters_of(decoder: SpeculativeDecoder) -> dict[str, jax.Array]:
    """The arrays that a program exported from this decoder takes, by name; one that two models share comes once."""
    leaves = jax.tree.leaves(decoder.params)
    return dict(zip(_layout(decoder)[1], leaves, strict=True))


def _type_of(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _layout(decoder: SpeculativeDecoder) -> tuple[Any, list[str]]:
    """The tree of the parameters, and the name of each leaf: the first name of an array that occurs twice."""
    leaves, treedef = jax.tree.flatten_with_path(decoder.params)
    first: dict[int, str] = {}
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return treedef, [first.setdefault(id(leaf), name) for name, (_, leaf) in zip(names, leaves, strict=True)]


__all__ = ["About", "ExportedGeneration", "ExportedRow", "export_generation", "parameters_of"]
