"""Data of a run of training, and an interruption of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax import SpeculativeDecoder, load_target
from eagle3_jax.training.loop import Trainer
from eagle3_jax.training.texts import Text, Texts


def written_texts(directory: Path, seed: int = 0, writer: Path | None = None) -> Path:
    """Writes a directory of seven texts, as ``eagle3 train data`` does; the first is held out.

    Texts are random tokens, or three random tokens and their continuation by ``writer``, a target.
    """
    tokens = np.random.default_rng(seed).integers(0, 96, (7, 12)).tolist()
    learn = [False] * 3 + [True] * 9
    if writer is not None:
        decoder = SpeculativeDecoder(load_target(writer), stop_tokens=())
        prompts = [row[:3] for row in tokens]
        answers = decoder.generate(prompts, max_new_tokens=9).tokens
        tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    directory.mkdir()
    texts = [Text(row, learn, 2**63 + index if index else 0) for index, row in enumerate(tokens)]
    Texts.of(texts[:3]).save(directory / "texts-00000.npz")
    Texts.of(texts[3:]).save(directory / "texts-00001.npz")
    (directory / "data.json").write_text(json.dumps({"options": {"--held-out": 0.1}, "shards": 2}))
    return directory


def kill_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupts the next run after a number of steps."""
    run = Trainer.run

    def killed(*arguments: Any) -> Any:
        for state, metrics in run(*arguments):
            yield state, metrics
            if int(state.step) == step:
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", killed)
