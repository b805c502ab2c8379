"""Certifies five ways in which ``generate`` of transformers speculates, as Python functions.

    python examples/certify_transformers.py --output validation/results
    python examples/certify_transformers.py --target DIR --way mtp --output .
    python examples/certify_transformers.py --target DIR --drafter DIR --way dflash --output .

The first command takes all five with the tiny models of ``tests/golden/published``. Directories in
the layout of Hugging Face; ``--drafter`` of DFlash or of Gemma 4's assistant. The assistant of
``assisted`` is the target with noise on its weights. One core: minutes for each.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from eagle3_jax.certify.certificate import Certificate
from eagle3_jax.certify.function import certify_sampler
from eagle3_jax.certify.statistics import Sampling

TINY = Path(__file__).parent.parent / "tests" / "golden" / "published"
# Ways, with the tiny model of each.
WAYS = {
    "assisted": "dflash_qwen3",
    "prompt-lookup": "dflash_qwen3",
    "mtp": "deepseek_v3_mtp1",
    "dflash": "dflash_qwen3",
    "gemma4-assistant": "gemma4_dense",
}
PROMPT_LENGTH = 12
PROMPTS = 12
SAMPLING = Sampling(temperature=0.5, top_k=20)  # of tiny models, which are unsure at 1


class Rounds(BaseStreamer):
    """Keeps the number of tokens of each round."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.lengths.append(value.numel())

    def end(self) -> None:
        """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """A sampler around ``generate``.

    Attributes:
        target: The model.
        options: Of ``generate``: what makes it speculate.
        drafts_at_once: Whether the first token of an answer is drafted too. It is asked for alone
            then, so that nothing is drafted for it.
    """

    target: Any
    options: dict[str, Any]
    drafts_at_once: bool

    def __call__(
        self, prompt_ids: list[int], seed: int, sampling: Sampling, max_new_tokens: int
    ) -> Iterator[tuple[list[int], Any]]:
        torch.manual_seed(seed)
        ids = prompt_ids
        if self.drafts_at_once:
            ((first, log_probs),) = self._rounds(ids, sampling, 1)
            yield first, log_probs
            ids = [*ids, *first]
        if max_new_tokens > len(ids) - len(prompt_ids):
            yield from self._rounds(ids, sampling, max_new_tokens - (len(ids) - len(prompt_ids)))

    def _rounds(
        self, ids: list[int], sampling: Sampling, number: int
    ) -> Iterator[tuple[list[int], Any]]:
        """Yields the tokens of each round, with the target's log-probabilities."""
        sampled = {"do_sample": False}
        if sampling.temperature:
            sampled = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": 1.0,
            }

        rounds = Rounds()
        inputs = torch.tensor([ids])
        with torch.no_grad():
            result = self.target.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=number,
                return_dict_in_generate=True,
                output_logits=True,
                streamer=rounds,
                **sampled,
                **self.options,
            )

        tokens = result.sequences[0, len(ids) :].tolist()
        log_probs = torch.stack([row[0] for row in result.logits]).float().log_softmax(-1).numpy()
        start = 0
        for length in rounds.lengths[1:]:  # the prompt comes first
            yield tokens[start : start + length], log_probs[start : start + length]
            start += length


def sampler(way: str, target: Any, drafter: Path | None) -> Generate:
    """Returns the sampler of a way to speculate."""
    match way:
        case "assisted":
            return Generate(target, {"assistant_model": noisy(target)}, drafts_at_once=True)
        case "prompt-lookup":
            return Generate(
                target,
                {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
                drafts_at_once=True,
            )
        case "mtp":
            # transformers knows the layers that draft by their numbers in published models.
            config = target.config.get_text_config()
            first = config.num_hidden_layers
            target._keys_to_ignore_on_load_unexpected = [
                *(target._keys_to_ignore_on_load_unexpected or ()),
                *(rf"model\.layers\.{first + k}\." for k in range(config.num_mtp_layers)),
            ]
            return Generate(target, {"use_mtp": True}, drafts_at_once=False)

        case "dflash":
            model = transformers.AutoModel.from_pretrained(drafter, dtype=torch.float32).eval()
            options = {"assistant_model": model, "speculation_type": "dflash"}
            return Generate(target, options, drafts_at_once=False)
        case _:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                drafter, dtype=torch.float32
            ).eval()
            return Generate(target, {"assistant_model": model}, drafts_at_once=False)


def noisy(model: Any) -> Any:
    """Returns a copy of a model with noise on its weights."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += (
                0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
            )
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def prompts(target: Any) -> list[list[int]]:
    """Returns prompts that repeat themselves, so that a look-up finds something."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.config.get_text_config().vocab_size
    halves = torch.randint(3, vocab_size, (PROMPTS, PROMPT_LENGTH // 2), generator=generator)
    return torch.cat([halves, halves], dim=1).tolist()


def main() -> None:
    """Certifies, prints the verdict and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", type=Path, help="directory of the target; default: a tiny one for each way"
    )
    parser.add_argument(
        "--drafter", type=Path, help="directory of the drafter of dflash and gemma4-assistant"
    )
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--requests", type=int, default=2048, help="short sampled answers")
    parser.add_argument("--output", type=Path, required=True, help="directory of the records")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for way in options.way or WAYS:
        target = transformers.AutoModelForCausalLM.from_pretrained(
            options.target or TINY / WAYS[way] / "target", dtype=torch.float32
        ).eval()
        drafter = options.drafter or TINY / WAYS[way] / "drafter"
        certificate: Certificate = certify_sampler(
            sampler(way, target, drafter),
            prompts(target),
            sampling=SAMPLING,
            num_requests=options.requests,
        )
        print(f"{way}: {certificate.headline}: {certificate.reason}", flush=True)
        facts = {"model": f"transformers {transformers.__version__}, {way}"}
        values = certificate.to_json()
        values["facts"] |= facts
        file = options.output / f"certificate-transformers-{way}.json"
        file.write_text(json.dumps(values, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
