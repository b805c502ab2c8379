"""Tables of certificates: of engines, of what it takes to find errors, and of false alarms."""

from __future__ import annotations

import re

from page_tables import Row, cores, record, table, version

# Name of the record and the engine in words.
ENGINES = {
    "vLLM 0.32.0 for CPUs": {
        "vllm-plain": "plain",
        "vllm-eagle3-greedy": "EAGLE-3, greedy requests only",
        "vllm-eagle3": "EAGLE-3",
        "vllm-ngram-greedy": "n-grams, greedy requests only",
        "vllm-ngram": "n-grams",
        "vllm-suffix-greedy": "suffix decoding, greedy requests only",
        "vllm-suffix": "suffix decoding",
        "vllm-tiny-plain": "plain, tiny model",
        "vllm-draft-model-greedy": "draft model, greedy requests only",
        "vllm-draft-model": "draft model",
        "vllm-mtp-greedy": "MTP, greedy requests only",
        "vllm-mtp": "MTP",
        "vllm-eagle-greedy": "EAGLE, greedy requests only",
        "vllm-eagle": "EAGLE",
        "vllm-p-eagle-greedy": "P-EAGLE, greedy requests only",
        "vllm-p-eagle": "P-EAGLE",
        "vllm-medusa-greedy": "Medusa, greedy requests only",
        "vllm-medusa": "Medusa",
        "vllm-dflash-greedy": "DFlash, greedy requests only",
        "vllm-dflash": "DFlash",
    },
    "llama.cpp b11434": {
        "llama-cpp-plain": "plain",
        "llama-cpp-draft-model": "draft model, likeliest drafts",
        "llama-cpp-draft-model-sampled": "draft model, `--spec-draft-sampling probabilistic`",
        "llama-cpp-eagle3": "EAGLE-3",
        "llama-cpp-ngram-simple": "n-grams, `simple`",
        "llama-cpp-synthetic": "`--spec-synth-len 3`, which accepts by chance",
    },
    "transformers 5.24.0": {
        "transformers-assisted": "assistant",
        "transformers-prompt-lookup": "prompt look-up",
        "transformers-mtp": "MTP",
        "transformers-dflash": "DFlash",
        "transformers-gemma4-assistant": "Gemma 4's assistant",
    },
    "this library": {
        "eagle3-jax-plain": "plain",
        "eagle3-jax-chain-sampled": "chain of sampled tokens",
        "eagle3-jax-block": "block verification",
        "eagle3-jax-tree": "tree",
        "eagle3-jax-fallback": "n-grams, else the head",
        "eagle3-jax-schedule": "schedule",
        "eagle3-jax-refilled": "three slots, refilled",
        "eagle3-jax-typical": "typical acceptance, which is not lossless",
    },
}


def power() -> str:
    """Writes the smallest number of requests that finds each error, and the test that finds it."""
    measured = record("certify-power")
    samples = record("certify-power-two-samples")
    lines = []
    for entry, of_samples in zip(measured["errors"], samples["errors"], strict=True):
        tests = sorted(entry["by"], key=lambda name: -entry["by"][name])
        texts = needed(of_samples["found"], samples["runs"])
        requests = needed(entry["found"], measured["runs"])
        ratio = f"{entry['tokens'] / entry['fewest_tokens']:.1f}" if requests[-1].isdigit() else ""
        tokens = [f"{entry['tokens']:,}", f"{entry['fewest_tokens']:,.0f}", ratio]
        lines.append([entry["error"], requests, *tokens, tests[0] if tests else "", texts])

    of_texts = samples["environment"]["git"]["commit"][:10]
    columns = [
        "injected error",
        "requests",
        "tokens",
        "fewest",
        "ratio",
        "found mostly by",
        "two samples of texts",
    ]
    return (
        table(columns, lines) + f"\n\n{version(measured['environment'])} (texts: `{of_texts}`), "
        f"{measured['runs']} runs of each error and size, α = 10⁻⁶ in all, "
        f"τ = {measured['mean_acceptance_length']:.2f}."
    )


def needed(successes: Row, runs: int) -> str:
    """Writes the smallest number of requests that finds an error in 95 % of the runs.

    If none does: in how many runs the largest number finds it.
    """
    enough = [requests for requests, count in successes.items() if count >= 0.95 * runs]
    most, count = list(successes.items())[-1]
    return f"{int(enough[0]):,}" if enough else f"{count} of {runs} runs by {int(most):,}"


def alarms() -> str:
    """Writes the verdicts about correct servers that look odd."""
    measured = record("certify-alarms")
    lines = []
    for kind in measured["kinds"]:
        counts = [
            str(kind["verdicts"].get(verdict, 0))
            for verdict in ("lossless", "inconclusive", "not lossless")
        ]
        lines.append([kind["kind"], str(kind["runs"]), *counts, f"{kind['smallest']:.2g}"])

    columns = ["correct server", "runs", "lossless", "inconclusive", "not lossless", "smallest p"]
    return (
        table(columns, lines)
        + f"\n\n{version(measured['environment'])}; default runs. The smallest p-value of all runs"
        " is times its number of tests."
    )


def bugs() -> str:
    """Writes what found each error of an engine."""
    measured = record("certify-bugs")
    lines = [
        [
            entry["bug"],
            entry["injected"],
            entry["verdict"],
            entry["by"],
            f"{entry['requests']:,}",
            f"{entry['seconds']:.0f}",
        ]
        for entry in measured["bugs"]
    ]

    columns = ["error", "injected as", "verdict", "found by", "requests", "seconds"]
    return (
        table(columns, lines)
        + f"\n\n{version(measured['environment'])}, {cores(measured['environment'])}."
    )


def engines() -> str:
    """Writes the verdicts about engines, a table for each."""
    columns = [
        "speculation",
        "verdict",
        "why, or what it would have found",
        "requests",
        "tokens",
        "seconds",
    ]
    tables = []
    commits = set()
    dates = []

    for engine, names in ENGINES.items():
        lines = []
        for name, title in names.items():
            certificate = record(f"certificate-{name}")
            commits.add(f"`{certificate['commit'][:10]}`")
            dates.append(certificate["started"][:10])

            size = [
                f"{certificate['requests']:,}",
                f"{certificate['tokens']:,}",
                f"{certificate['seconds']:,.0f}",
            ]
            lines.append(
                [title, f"**{certificate['headline'].lower()}**", reason(certificate), *size]
            )
        tables.append(f"## {engine}\n\n{table(columns, lines)}")

    days = " to ".join(sorted({min(dates), max(dates)}))
    return (
        "\n\n".join(tables)
        + f"\n\n{days}, two cores of a CPU. Commits {', '.join(sorted(commits))}."
    )


def reason(certificate: Row) -> str:
    """Writes what a certificate would have found, which test failed, or what was not seen."""
    if certificate["verdict"] == "lossless":
        return "; ".join(re.findall(r"\d+ % (?:too willing|apart)", " ".join(certificate["sees"])))
    if certificate["verdict"] == "inconclusive":
        return "not seen: " + ", ".join(
            entry["name"] for entry in certificate["requirements"] if not entry["is_met"]
        )
    test, _, detail = certificate["reason"].partition(": ")
    return f"{test} ({detail.rpartition('(')[2]}"
