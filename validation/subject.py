"""What a run validates: its options, a target, its EAGLE-3 head, and prompts."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagle3_jax import LoadedDrafter, LoadedTarget, load_drafter, load_target
from eagle3_jax.conversion.sidecars import tokenizer_config_of
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.prompts.benchmark import Prompt, read_prompts
from eagle3_jax.text.template import ChatTemplate

Pair = tuple[LoadedTarget, LoadedDrafter]

DEFAULT_TARGET = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_DRAFTER = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
SHIPPED = "the shipped pair"
_NO_TEMPLATE = "plain text: the target has no chat template"
CPU_TOKENS = 96
GPU_TOKENS = 256
# tokens; the levels cut prompts to their last ones, so that all share the compiled programs of a
# bucket
CONTEXT = 100


@dataclasses.dataclass(frozen=True)
class Setting:
    """The options of a run; a rehearsal is ``--gpu`` without a GPU: the flow, not the figures."""

    gpu: bool = False
    rehearsal: bool = False
    quick: bool = False
    target: str | None = None
    drafter: str | None = None
    prompt_files: tuple[Path, ...] = ()
    price_per_hour: float | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real run on a GPU, and no rehearsal."""
        return self.gpu and not self.rehearsal


@dataclasses.dataclass(eq=False)
class Subject:
    """A pair and its prompts. Models are loaded at first use and kept until :meth:`release`."""

    name: str  #: Name in the report.
    target_directory: Path  #: Directory in the Hugging Face layout or in the native one.
    drafter_directory: Path  #: Directory in any dialect that the library reads.
    prompt_files: Sequence[Path]  #: JSONL.
    max_new_tokens: int  #: Limit of prompts without one in their file.
    dtypes: tuple[str, ...]  #: Precisions in which it is validated, the main one first.
    reason: str = ""  #: Why it is not the default subject; empty if it is.
    one_at_a_time: bool = False  #: Drop a precision as soon as another is asked for.
    _pairs: dict[str, Pair] = dataclasses.field(default_factory=dict, repr=False)

    def pair(self, dtype: str) -> Pair:
        """Target and head in a precision."""
        if dtype not in self._pairs:
            if self.one_at_a_time:
                self.release()
            target = load_target(self.target_directory, dtype=dtype)
            self._pairs[dtype] = target, load_drafter(self.drafter_directory, target=target)
        return self._pairs[dtype]

    def release(self) -> None:
        """Free the memory of every precision. :meth:`pair` loads again."""
        self._pairs.clear()
        gc.collect()

    @property
    def has_chat_template(self) -> bool:
        """Whether questions go through a chat template."""
        return ChatTemplate.from_config(tokenizer_config_of(self.target_directory)) is not None

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """All prompts of all files."""
        target = self.pair(self.dtypes[0])[0]
        return [
            prompt
            for file in self.prompt_files
            for prompt in read_prompts(file, target, max_new_tokens=self.max_new_tokens)
        ]

    @property
    def prompt_tokens(self) -> list[list[int]]:
        """Token ids of every prompt."""
        return [prompt.tokens for prompt in self.prompts]

    @property
    def description(self) -> dict[str, str | int]:
        """For the report."""
        return {
            "name": self.name,
            # The commit, for a model from the hub.
            "target": self.target_directory.name,
            "drafter": self.drafter_directory.name,
            "prompts": len(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "questions": "the target's chat template" if self.has_chat_template else _NO_TEMPLATE,
            "dtypes": ", ".join(self.dtypes),
            **({"not the default": self.reason} if self.reason else {}),
        }


def choose(setting: Setting) -> Subject:
    """The subject of a run: the named pair, the hardware's default, or the shipped pair.

    Raises:
        ValueError: Only one of target and drafter was named, or one of them is not there.
    """
    target = setting.target
    drafter = setting.drafter
    if (target is None) != (drafter is None):
        present, missing = (
            ("--target", "--drafter") if drafter is None else ("--drafter", "--target")
        )
        raise ValueError(
            f"{present} was given without {missing}, and a head fits one target only; add {missing}"
        )

    reason = ""
    sources = (
        (target, drafter) if target or not setting.on_gpu else (DEFAULT_TARGET, DEFAULT_DRAFTER)
    )
    try:
        directories = locate(sources[0], "target"), locate(sources[1], "eagle3")
    except ValueError as error:
        if target is not None:
            raise
        reason = str(error)
        sources = (None, None)
        directories = bundled("target"), bundled("eagle3")

    return Subject(
        name=SHIPPED if sources[0] is None else f"{sources[0]} with {sources[1]}",
        target_directory=directories[0],
        drafter_directory=directories[1],
        prompt_files=setting.prompt_files or [bundled("prompts.jsonl")],
        max_new_tokens=GPU_TOKENS if setting.on_gpu else CPU_TOKENS,
        dtypes=("bfloat16", "float32") if setting.gpu else ("mixed", "float32", "bfloat16"),
        reason=reason,
        one_at_a_time=setting.on_gpu,
    )


def some_prompts(subject: Subject, count: int) -> list[list[int]]:
    """Prompts from all files in turn, each cut to its last :data:`CONTEXT` tokens."""
    tokens = subject.prompt_tokens
    return [tokens[index * len(tokens) // count % len(tokens)][-CONTEXT:] for index in range(count)]


def random_prompts(
    count: int, vocab_size: int, *, seed: int, low: int, high: int
) -> list[list[int]]:
    """Random token ids, from ``low`` to ``high - 1`` of them a row."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, vocab_size, size=rng.integers(low, high)).tolist() for _ in range(count)
    ]
