"""What a certificate sees: requests that find each injected error, and false alarms.

    R=validation/results
    python examples/certify_power.py --output $R/certify-power.json
    python examples/certify_power.py --alarms 200 --output $R/certify-alarms.json
    python examples/certify_power.py --two-samples --output $R/certify-power-two-samples.json

The sampler draws from a vocabulary of 64 with a chain of three. Short and long answers come in the
proportion of a default run. One core: half an hour, two hours, ten minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from faulty_sampler import (
    CORRECT,
    FAULTS,
    NUM_PROMPTS,
    PROMPTS,
    Fault,
    FaultySampler,
    FaultySource,
    to_bfloat16,
)

from eagle3_jax.certify import texts
from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.examine import certify
from eagle3_jax.certify.statistics import Draws, Sampling, Test, judge
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.frequencies import ALPHA
from eagle3_jax.measure.records import write_record

PLAN = Plan(prompts=PROMPTS, concurrency=1, with_fields=False)
REQUESTS = tuple(round(4 * 2 ** (step / 2)) for step in range(29))  # to 65,536
NEEDED = 0.95  # share of the runs that must find an error
# Correct servers that look odd.
HONEST: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "exact reports": (Sampling(), {}),
    "reports after a temperature of 0.95": (Sampling(0.95), {"processed": True}),
    "reports after top-p 0.9": (Sampling(top_p=0.9), {"processed": True}),
    "reports before top-p 0.9": (Sampling(top_p=0.9), {}),
    "noise, rounded to bfloat16": (Sampling(), {"noise": 0.003, "round_to": to_bfloat16}),
    "noise, rounded to two decimals": (
        Sampling(),
        {"noise": 0.003, "round_to": functools.partial(round, ndigits=2)},
    ),
}


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20, help="runs of each error and size")
    parser.add_argument(
        "--alarms",
        type=int,
        default=0,
        help="runs of each kind of correct server, instead of errors",
    )
    parser.add_argument(
        "--two-samples",
        action="store_true",
        help="compare texts of two samples, instead of reports",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")

    options = parser.parse_args()
    about = {"environment": environment(), "alpha": ALPHA}
    if options.alarms:
        write_record(
            options.output, about | {"kinds": [alarms(name, options.alarms) for name in HONEST]}
        )
        return

    find = finds_by_texts if options.two_samples else finds_by_reports
    errors = [power(name, fault, options.runs, find) for name, fault in FAULTS.items()]
    about |= {
        "runs": options.runs,
        "errors": errors,
        "plan": {"requests": PLAN.num_requests, "long": PLAN.num_long},
    }
    write_record(options.output, about | {"mean_acceptance_length": acceptance_length()})


def acceptance_length() -> float:
    """Returns the tokens of a round of the correct sampler."""
    draws = FaultySampler(CORRECT).draws(1024, 64)
    speculated = draws[draws.index > 0]
    return len(speculated) / float((speculated.chunk_index == 0).sum())


def power(
    name: str, fault: Fault, runs: int, find: Callable[[Fault, int, int], str]
) -> dict[str, Any]:
    """Returns how many runs of each size find an error, until nearly all do, and by which test."""
    num_found = {}
    tests: Counter = Counter()
    fewest = FaultySampler(fault).fewest_tokens()

    for requests in REQUESTS:
        names = [find(fault, requests, 1000 + run) for run in range(runs)]
        num_found[requests] = sum(map(bool, names))
        num_tokens = (PLAN.short_tokens - 1) * requests + (PLAN.max_new_tokens - 1) * num_long(
            requests
        )
        tests.update(filter(None, names))
        print(f"{name}: {num_found[requests]} of {runs} runs of {requests} requests", flush=True)
        if num_found[requests] >= NEEDED * runs:
            break

    return {
        "error": name,
        "fewest_tokens": fewest,
        "tokens": num_tokens,
        "found": num_found,
        "by": dict(tests),
    }


def draws_of(fault: Fault, requests: int, seed: int) -> Draws:
    """Returns the tokens of short answers and, in the proportion of a default run, of long ones."""
    number = requests + num_long(requests)
    prompts = np.arange(number) % NUM_PROMPTS
    sampler = FaultySampler(fault)
    tokens, chunk_index = sampler.answer(prompts, PLAN.max_new_tokens, seed=seed)
    lengths = np.where(np.arange(number) < requests, PLAN.short_tokens, PLAN.max_new_tokens)
    return sampler.reported(prompts, tokens, chunk_index, lengths)


def num_long(requests: int) -> int:
    """Returns the number of long answers that come with short ones."""
    return max(1, round(requests * PLAN.num_long / PLAN.num_requests))


def finds_by_reports(fault: Fault, requests: int, seed: int) -> str:
    """Returns the name of the test that finds an error; empty if none does."""
    draws = draws_of(fault, requests, seed)
    results: list[Test] = judge(draws[draws.index > 0], seed=seed)
    best = min(results, key=lambda test: test.p_value)
    return best.name if best.p_value < ALPHA / len(results) else ""


def finds_by_texts(fault: Fault, requests: int, seed: int) -> str:
    """Returns whether texts of a sampler and of a correct one differ, as a name."""
    prompts = np.arange(requests) % NUM_PROMPTS

    def counts_of(sampler: FaultySampler, first_seed: int) -> Counter:
        tokens, _ = sampler.answer(prompts, texts.TOKENS, seed=first_seed + seed)
        return Counter(zip(prompts.tolist(), map(str, tokens.tolist()), strict=True))

    faulty = counts_of(FaultySampler(fault), 0)
    correct = counts_of(FaultySampler(sampling=fault.sampling), 10_000)
    return "texts" if texts.compare_texts(faulty, correct).p_value < ALPHA else ""


def alarms(name: str, runs: int) -> dict[str, Any]:
    """Returns the verdicts about a correct server, and the smallest p-value times their number."""
    sampling, manners = HONEST[name]
    verdicts: Counter[str] = Counter()
    smallest = 1.0

    for run in range(runs):
        source = FaultySource(FaultySampler(sampling=sampling), **manners)
        plan = dataclasses.replace(PLAN, sampling=sampling, seed=10_000 * run)
        certificate = certify(source, plan)

        verdicts[str(certificate.verdict)] += 1
        p_value = min(test.p_value for test in certificate.tests + certificate.first_tokens)
        smallest = min(smallest, p_value / certificate.level * ALPHA)
        print(f"{name}: {dict(verdicts)}, smallest {smallest:.2g}", flush=True)
    return {"kind": name, "runs": runs, "verdicts": dict(verdicts), "smallest": smallest}


if __name__ == "__main__":
    main()
