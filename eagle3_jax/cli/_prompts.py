"""Which prompts a command decodes, from its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import say_what_is_awaited
from eagle3_jax.prompts import Prompt, Renderer, in_turn, random_prompts, read_prompts
from eagle3_jax.sources import bundled, locate

if TYPE_CHECKING:
    from eagle3_jax.decode import LoadedTarget


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Which prompts a command decodes.

    Attributes:
        files: JSONL, or ``random``; empty for the bundled ones.
        length: Of every prompt; ``None`` leaves them as they are.
        tasks: Categories, by comma; ``None`` for all.
        most: Prompts.
        max_new_tokens: For each.
    """

    files: Sequence[str]
    length: int | None
    tasks: str | None
    most: int
    max_new_tokens: int

    def read(self, target: LoadedTarget, directory: str | None) -> list[Prompt]:
        """Prompts of all categories in turn, put together by category."""
        found = self._all(target, directory)
        names = list(dict.fromkeys(prompt.category for prompt in found))
        wanted = names if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        for name in wanted:
            if name not in names:
                raise Misuse(f"--tasks {self.tasks!r}: there are no prompts of {name!r}; there are {', '.join(names)}")
        return in_turn([prompt for prompt in found if prompt.category in wanted], self.most)

    def _all(self, target: LoadedTarget, directory: str | None) -> list[Prompt]:
        renderer: Renderer | None = None
        found = []
        length = self.length or min(128, target.max_positions // 2)
        for name in self.files or [str(bundled("prompts.jsonl"))]:
            is_sized = name == "random" or self.length is not None
            if is_sized and length + self.max_new_tokens > target.max_positions:
                raise Misuse(
                    f"prompts of {length} tokens and --max-new-tokens {self.max_new_tokens} exceed the target's "
                    f"{target.max_positions} positions; lower --prompt-tokens or --max-new-tokens"
                )
            if name == "random":
                found += random_prompts(self.most, target.vocab_size, length)
                continue
            renderer = renderer or Renderer.of(locate(directory, "target"))
            say_what_is_awaited(name)
            found += read_prompts(Path(name), target, renderer, max_new_tokens=self.max_new_tokens, length=self.length)
        return found
