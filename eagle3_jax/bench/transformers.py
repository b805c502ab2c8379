"""Hugging Face transformers as a contender: ``generate``, and its assisted generation."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.bench.contenders import Contender, Run

_PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 5}


@dataclasses.dataclass
class TransformersContender(Contender):
    """``AutoModelForCausalLM.generate`` with its cache, greedy, in eager PyTorch."""

    name: str  #: Name in reports.
    dtype: str  #: Precision in reports.
    model: Any  #: The loaded model.
    #: Further arguments of ``generate``, such as ``prompt_lookup_num_tokens`` for its assisted
    #: generation.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Assisted generation does not tell in how many rounds, and takes one prompt at a time.
        self.drafts = bool(self.options)
        self.largest_batch = 1 if self.options else None

    @classmethod
    def load(
        cls, directory: Path, *, dtype: str = "float32", on_gpu: bool = False
    ) -> list[TransformersContender]:
        """``generate`` with the model of a target's directory, and the same with prompt lookup.

        Args:
            directory: Directory of the target in the Hugging Face layout.
            dtype: ``float32`` or ``bfloat16``.
            on_gpu: Whether it is to run there.

        Raises:
            ImportError: transformers or torch is not installed, or torch does not see the GPU.
            OSError: transformers cannot read the directory.
            ValueError: It knows no such model.
        """
        import torch

        if on_gpu and not torch.cuda.is_available():
            raise ImportError("this build of PyTorch does not see the GPU")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        model = model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
        plain = cls("transformers generate", dtype, model)
        return [
            plain,
            dataclasses.replace(plain, name="transformers prompt lookup", options=_PROMPT_LOOKUP),
        ]

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Run:
        """One token for the prefill, then all of them; the difference is decoding."""
        prefill, _ = self._timed(prompts, 1)
        total, tokens = self._timed(prompts, max_new_tokens)
        return Run(prefill, max(total - prefill, 1e-9), tokens)

    def _timed(self, prompts: Sequence[list[int]], count: int) -> tuple[float, list[list[int]]]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        # On the left, where generation does not see the padding.
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad(rows)
        real = pad([torch.ones_like(row) for row in rows])

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
        # On the host, so nothing is left to wait for.
        new = output[:, ids.shape[1] :].tolist()
        return time.perf_counter() - start, new
