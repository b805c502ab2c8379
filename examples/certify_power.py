"""What a certificate sees: how many requests find each injected error, and how often a correct sampler fails.

    python examples/certify_power.py --output validation/results/certify-power.json
    python examples/certify_power.py --two-samples --output validation/results/certify-power-two-samples.json

The sampler draws from a vocabulary of 64 with a chain of three; each request has 32 tokens. One core, half an hour.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.bench.environment import environment
from eagle3_jax.bench.records import write_record
from eagle3_jax.certify import Sampling, Test, judge
from eagle3_jax.certify.examine import TWO_SAMPLE_TOKENS, compare_texts
from eagle3_jax.certify.faulty import CORRECT, FAULTS, NUM_PROMPTS, Fault, FaultySampler
from eagle3_jax.testing.report import ALPHA

TOKENS = 32
REQUESTS = (64, 256, 1024, 4096, 16384)
LIMITS = (0.05, 0.01, 0.001)


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs of each error and size")
    parser.add_argument("--honest-runs", type=int, default=1000, help="runs of a correct sampler, of 256 requests each")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--two-samples", action="store_true", help="compare texts of two samples instead")
    options = parser.parse_args()
    if options.two_samples:
        errors = [two_samples(name, fault, options.runs) for name, fault in FAULTS.items()]
        about = {"environment": environment(), "tokens": TWO_SAMPLE_TOKENS, "alpha": ALPHA, "runs": options.runs}
        write_record(options.output, {**about, "errors": errors})
        return
    record = {
        "environment": environment(),
        "tokens": TOKENS,
        "vocab_size": 64,
        "num_speculative_tokens": 3,
        "alpha": ALPHA,
        "runs": options.runs,
        "mean_acceptance_length": acceptance_length(),
        "errors": [power(name, fault, options.runs) for name, fault in FAULTS.items()],
        "honest": false_alarms(options.honest_runs),
    }
    write_record(options.output, record)


def judged(sampler: FaultySampler, requests: int, seed: int) -> list[Test]:
    """Returns the tests of all tokens but the first ones."""
    draws = sampler.draws(requests, TOKENS, seed=seed)
    return judge(draws[draws.index > 0], alpha=ALPHA, seed=seed)


def acceptance_length() -> float:
    """Returns the tokens of a round of the correct sampler."""
    draws = FaultySampler(CORRECT).draws(4096, TOKENS)
    speculated = draws[draws.index > 0]
    return len(speculated) / float((speculated.chunk_index == 0).sum())


def power(name: str, fault: Fault, runs: int) -> dict[str, Any]:
    """Returns how many runs of each size find an error, until nearly all do, and by which test."""
    sampler = FaultySampler(fault, sampling=Sampling(top_p=0.9) if fault.plain_acceptance else None)
    num_found = {}
    tests: Counter = Counter()
    for requests in REQUESTS:
        num_found[requests] = 0
        for run in range(runs):
            results = judged(sampler, requests, 1000 + run)
            best = min(results, key=lambda test: test.p_value)
            if best.p_value < ALPHA / len(results):
                num_found[requests] += 1
                tests[best.name] += 1
        print(f"{name}: {num_found[requests]} of {runs} runs of {requests} requests", flush=True)
        if num_found[requests] >= 0.95 * runs:
            break
    return {"error": name, "found": num_found, "by": dict(tests)}


def texts_of(sampler: FaultySampler, requests: int, seed: int) -> Counter:
    """Returns the texts of short answers, by prompt."""
    prompts = np.arange(requests) % NUM_PROMPTS
    tokens, _ = sampler.answer(prompts, TWO_SAMPLE_TOKENS, seed=seed)
    return Counter((prompt, str(text)) for prompt, text in zip(prompts.tolist(), tokens.tolist(), strict=True))


def two_samples(name: str, fault: Fault, runs: int) -> dict[str, Any]:
    """Returns how many runs of each size find an error by texts of this sampler and of a correct one."""
    sampling = Sampling(top_p=0.9) if fault.plain_acceptance else None
    faulty = FaultySampler(fault, sampling=sampling)
    correct = FaultySampler(CORRECT, sampling=sampling)
    num_found = {}
    for requests in REQUESTS:
        p_values = []
        for run in range(runs):
            tests = compare_texts(texts_of(faulty, requests, 2000 + run), texts_of(correct, requests, 9000 + run))
            p_values += [test.p_value for test in tests]
        num_found[requests] = sum(p_value < ALPHA for p_value in p_values)
        print(f"{name}: {num_found[requests]} of {runs} runs of {requests} requests each", flush=True)
        if num_found[requests] >= 0.95 * runs:
            break
    return {"error": name, "found": num_found}


def false_alarms(runs: int) -> dict[str, Any]:
    """Returns the shares of honest runs whose smallest p-value, times the number of tests, is below limits."""
    sampler = FaultySampler(CORRECT)
    smallest = []
    for run in range(runs):
        results = judged(sampler, 256, 100_000 + run)
        smallest.append(min(1.0, len(results) * min(test.p_value for test in results)))
    shares = {str(limit): float((np.array(smallest) < limit).mean()) for limit in LIMITS}
    return {"runs": runs, "requests": 256, "smallest": min(smallest), "shares": shares}


if __name__ == "__main__":
    main()
