"""L6: the distribution of the second token, by enumeration, and samples of it from both engines.

The second token is the first one for which a draft is verified.
"""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np

from eagle3_jax import LoadedTarget, SamplingParams, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.measure.frequencies import Fit, fit_counts
from eagle3_jax.testing.verifier import warped
from validation.engines.vllm.bridge import EngineOptions, Tokens, eagle3
from validation.engines.vllm.process import Process, ProcessEngine
from validation.forcing import forced_logits

DIRECTORY = Path(__file__).parent.parent / "tests" / "golden" / "vllm"  # a tiny target and its head
PROMPT = [17, 200, 33, 90, 5]
DRAWS = 2048
BATCH = 128
K = 3
ALPHA = 1e-6
SETTINGS = {"T=1": (1.0, 1.0), "T=0.7, top-p 0.9": (0.7, 0.9)}
SHIPPED = "vLLM, EAGLE-3 as shipped"
REPAIRED = "vLLM, EAGLE-3 repaired"

Draws = dict[str, collections.Counter[int]]


def enumerate_second_token(target: LoadedTarget, temperature: float, top_p: float) -> np.ndarray:
    """Returns ``sum_a p(a | prompt) p(x | prompt, a)``, ``[V]``, in float64."""
    logits = forced_logits(target, [[*PROMPT, first] for first in range(target.vocab_size)])

    def warp(row: np.ndarray) -> np.ndarray:
        return warped(row.astype(np.float64), temperature, 0, top_p)

    first = warp(logits[0][len(PROMPT) - 1])
    return sum(p * warp(row[len(PROMPT)]) for p, row in zip(first, logits, strict=True) if p > 0)


def title(setting: str) -> str:
    """Returns the title of the table in a report."""
    return f"Second token, {DRAWS} draws, {setting}"


def exact_distribution(setting: str) -> np.ndarray:
    """Returns the distribution of the second token of the tiny target, ``[V]``."""
    return enumerate_second_token(load_target(DIRECTORY / "target"), *SETTINGS[setting])


def ours(setting: str, count: int = DRAWS) -> Draws:
    """Returns our draws, with and without a head; ``count`` is a multiple of :data:`BATCH`."""
    target = load_target(DIRECTORY / "target")
    draws = {}
    temperature, top_p = SETTINGS[setting]
    sampling = SamplingParams(temperature=temperature, top_p=top_p)

    head = load_drafter(DIRECTORY / "eagle3", target=target)
    for name, decoder in {
        "ours, plain": SpeculativeDecoder(target, stop_tokens=()),
        "ours, EAGLE-3": SpeculativeDecoder(target, head, num_speculative_tokens=K, stop_tokens=()),
    }.items():
        outputs: list[Tokens] = []
        for batch in range(count // BATCH):
            outputs += decoder.generate(
                [PROMPT] * BATCH, max_new_tokens=2, sampling=sampling, seed=batch
            ).tokens
        draws[name] = collections.Counter(output[1] for output in outputs)
    return draws


def vllms(process: Process, setting: str) -> Draws:
    """Returns vLLM's draws.

    On a CPU, whose build samples wrongly under speculation, also those of a repaired vLLM.
    """
    temperature, top_p = SETTINGS[setting]
    options = {"model": str(DIRECTORY / "target"), "max_model_len": 64, "max_num_seqs": BATCH}

    def draws_of(engine: ProcessEngine) -> collections.Counter[int]:
        generated = engine.generate(
            [PROMPT] * DRAWS, max_new_tokens=2, temperature=temperature, top_p=top_p, seed=0
        )
        return collections.Counter(output[1] for output in generated.outputs)

    draws = {"vLLM, plain": draws_of(process.engine(EngineOptions(**options)))}
    speculating = process.engine(
        EngineOptions(**options, speculative=eagle3(DIRECTORY / "eagle3", K))
    )
    draws[SHIPPED] = draws_of(speculating)
    if process.versions["device"] == "cpu":
        with speculating.repaired("sampling"):
            draws[REPAIRED] = draws_of(speculating)
    return draws


def fits(draws: Draws, exact: np.ndarray) -> dict[str, Fit]:
    """Compares every row of draws with the exact distribution."""
    tokens = range(len(exact))
    return {
        name: fit_counts(np.array([counts[token] for token in tokens]), exact)
        for name, counts in draws.items()
    }


def follows(fit: Fit) -> bool:
    """Whether chance explains the deviation."""
    return min(fit.chi_square, fit.g_test) > ALPHA
