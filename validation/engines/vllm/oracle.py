"""Runs inside the environment of vLLM: its sampler decides chains of ``eagle3 oracle``.

``python oracle.py FOLDER VERDICTS.npz [SHARE]`` writes the arrays ``CASE.num_accepted`` and
``CASE.next_token``. vLLM itself applies temperature, top-k, top-p and penalties. The token after a
chain that is accepted to its end is an argument of its rule, so here it is the case's own. SHARE is
an injected error: so much of every q is uniform instead.
"""

# Its imports are those of the other environment.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

# A residual that is this much off in one token samples another one.
MARGIN = 1e-3
ROUNDING = 1e-7  # of a residual
# Settings that vLLM refuses with drafts, or applies elsewhere.
NOT_APPLIED = {"min_p", "bias", "grammar", "all_settings"}


def main() -> None:
    """Decides every case of chains by the token rule."""
    folder, out, *shares = sys.argv[1:]
    share = float(shares[0]) if shares else 0.0
    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()
        rejection_sampler.expand_batch_to_tokens = repeat

    verdicts = {}
    for path in sorted(Path(folder, "cases").glob("*.npz")):
        case = dict(np.load(path))
        is_chain = (case["parents"] == np.arange(case["parents"].shape[2]) - 1).all()
        if (
            json.loads(str(case["about"]))["rule"] == "token"
            and is_chain
            and path.stem not in NOT_APPLIED
        ):
            rounds = [decide(case, number, share) for number in range(len(case["tokens"]))]
            for name, arrays in zip(
                ("num_accepted", "next_token"), zip(*rounds, strict=True), strict=True
            ):
                verdicts[f"{path.stem}.{name}"] = np.stack(arrays)

    np.savez(out, **verdicts)


def repeat(x: Any, row_ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Stands for a function of the CPU build that writes into a copy (``worker.py``)."""
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(torch.diff(row_ends, prepend=row_ends.new_zeros(1)))


def decide(case: dict[str, np.ndarray], number: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns accepted counts and next tokens of a round, as vLLM's rule decides them."""
    of_round = {
        name: array[number] for name, array in case.items() if array.ndim and name in PER_ROUND
    }
    valid = of_round["valid"][:, 1:]
    counts = valid.sum(axis=1)
    drafts = torch.from_numpy(of_round["tokens"][:, 1:][valid])
    row_ends = torch.from_numpy(np.cumsum(counts).astype(np.int32))

    probs = None
    if "q" in of_round:
        q = torch.from_numpy(of_round["q"][:, 1:][valid])
        probs = (1 - share) * q + share / q.shape[-1]

    logits = torch.from_numpy(of_round["logits"][:, :-1][valid])
    metadata = types.SimpleNamespace(num_draft_tokens=counts.tolist(), cu_num_draft_tokens=row_ends)
    settings = settings_of(case, number)
    logits = rejection_sampler.RejectionSampler.apply_logits_processors(
        SAMPLER, logits, settings, metadata
    )
    logits = rejection_sampler.apply_sampling_constraints(logits, row_ends, settings)

    # vLLM's own draws are replaced by those of the oracle.
    uniforms = torch.from_numpy(of_round["accept"][:, 1:][valid].astype(np.float64))
    noise = torch.from_numpy(noise_of(of_round))
    bonus = torch.from_numpy(of_round["next_token"][:, None].astype(np.int64))
    with (
        mock.patch.object(rejection_sampler, "generate_uniform_probs", return_value=uniforms),
        mock.patch.object(
            torch.Tensor, "exponential_", lambda values, **options: values.copy_(noise)
        ),
    ):
        output = rejection_sampler.rejection_sample(
            drafts, counts.tolist(), int(counts.max()), row_ends, probs, logits, bonus, settings
        )

    accepted = (output >= 0).sum(dim=1) - 1
    return accepted.numpy(), output.gather(1, accepted[:, None])[:, 0].numpy()


PER_ROUND = ("tokens", "valid", "q", "logits", "p", "accept", "next_token", "num_accepted")
SAMPLER: Any = types.SimpleNamespace(
    apply_penalties=rejection_sampler.RejectionSampler.apply_penalties,
    _combine_outputs_with_spec_tokens=rejection_sampler.RejectionSampler._combine_outputs_with_spec_tokens,
)


def noise_of(of_round: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the noise with which the expected residual samples the expected token, by a margin.

    vLLM takes the largest of residual over noise. Noise that is the expected residual makes them
    equal, except for the expected token.
    """
    noise = np.ones((len(of_round["tokens"]), of_round["p"].shape[-1]), np.float32)
    for row, count in enumerate(of_round["num_accepted"]):
        if count < of_round["valid"][row, 1:].sum():
            refused = of_round["tokens"][row, count + 1]
            q = (
                of_round["q"][row, count + 1]
                if "q" in of_round
                else np.eye(noise.shape[1])[refused]
            )
            residual = np.maximum(of_round["p"][row, count] - q, 0)
            noise[row] = residual + ROUNDING
            noise[row, of_round["next_token"][row]] /= 1 + MARGIN
    return noise


def settings_of(case: dict[str, np.ndarray], number: int) -> types.SimpleNamespace:
    """Returns what vLLM's sampler reads of a batch, before a round."""
    rows = range(len(case["prompt_length"]))
    prompts = [case["text"][row, : case["prompt_length"][row]].tolist() for row in rows]
    outputs = [
        case["text"][row, len(prompts[row]) : case["length"][number, row]].tolist() for row in rows
    ]
    drafts = [
        case["tokens"][number, row, 1:][case["valid"][number, row, 1:]].tolist() for row in rows
    ]

    size = case["p"].shape[-1]
    longest = max(map(len, prompts))
    padded = [prompt + [size] * (longest - len(prompt)) for prompt in prompts]
    of_each = torch.ones(len(prompts))
    temperature = torch.from_numpy(case["temperature"].astype(np.float32))
    top_k = np.where(case["top_k"] > 0, case["top_k"], size)

    return types.SimpleNamespace(
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        temperature=temperature,
        top_k=torch.from_numpy(top_k.astype(np.int32)),
        top_p=torch.from_numpy(case["top_p"].astype(np.float32)),
        generators={},
        no_penalties=not (case["presence"] or case["frequency"] or case["repetition"] != 1),
        presence_penalties=float(case["presence"]) * of_each,
        frequency_penalties=float(case["frequency"]) * of_each,
        repetition_penalties=float(case["repetition"]) * of_each,
        prompt_token_ids=torch.tensor(padded),
        output_token_ids=outputs,
        spec_token_ids=drafts,
        bad_words_token_ids={},
        allowed_token_ids_mask=None,
        logitsprocs=types.SimpleNamespace(non_argmax_invariant=[]),
        thinking_budget_state_holder=None,
    )


if __name__ == "__main__":
    main()
