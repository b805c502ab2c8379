"""Hugging Face transformers as a contender of the benchmark; optional."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from eagle3_jax.analysis.bench import Run


@dataclasses.dataclass
class TransformersContender:
    """``AutoModelForCausalLM.generate`` with its cache, greedy, float32, in eager PyTorch.

    Attributes:
        name: In reports.
        dtype: In reports.
        model: The loaded model.
    """

    name: str
    dtype: str
    model: Any

    @classmethod
    def load(cls, directory: Path) -> TransformersContender:
        """Load a target's directory.

        Raises:
            ImportError: transformers or torch is not installed.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return cls("transformers generate", "float32", model)

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        """One token for the prefill, then all of them; the difference is decoding."""
        prefill, _ = self._timed(prompt, 1)
        total, tokens = self._timed(prompt, max_new_tokens)
        return Run(prefill, max(total - prefill, 1e-9), tokens)

    def _timed(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        import torch

        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - start, output[0, len(prompt) :].tolist()
