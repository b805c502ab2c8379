"""Hugging Face transformers as a contender of the benchmark; optional."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.analysis.bench import Run


@dataclasses.dataclass
class TransformersContender:
    """``AutoModelForCausalLM.generate`` with its cache, greedy, in eager PyTorch.

    Attributes:
        name: In reports.
        dtype: In reports.
        model: The loaded model.
        options: Further arguments of ``generate``, such as ``prompt_lookup_num_tokens`` for its assisted generation.
    """

    name: str
    dtype: str
    model: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path, *, dtype: str = "float32", device: str = "cpu") -> TransformersContender:
        """Load a target's directory.

        Raises:
            ImportError: transformers or torch is not installed.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()  # type: ignore[arg-type]
        return cls("transformers generate", dtype, model)

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Run:
        """One token for the prefill, then all of them; the difference is decoding."""
        prefill, _ = self._timed(prompts, 1)
        total, tokens = self._timed(prompts, max_new_tokens)
        return Run(prefill, max(total - prefill, 1e-9), tokens)

    def _timed(self, prompts: Sequence[list[int]], count: int) -> tuple[float, list[list[int]]]:
        import torch

        width = max(map(len, prompts))  # padded on the left, where generation does not see it
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=self.model.device)
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=self.model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=real,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                **self.options,
            )
        new = output[:, width:].tolist()  # on the host, so nothing is left to wait for
        return time.perf_counter() - start, new
