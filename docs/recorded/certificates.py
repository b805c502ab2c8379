"""Tables of certificates: those of real servers, and what injected errors take to be found."""

from __future__ import annotations

from page_tables import Row, record, table, version

# Name of the record, the server in words, and where it was asked.
SERVERS = (
    ("certificate-vllm-plain", "vLLM 0.32.0 for CPUs, plain"),
    ("certificate-vllm-greedy", "vLLM 0.32.0 for CPUs, EAGLE-3 K=3, greedy requests only"),
    ("certificate-vllm-speculating", "vLLM 0.32.0 for CPUs, EAGLE-3 K=3"),
    ("certificate-llama-cpp-plain", "llama.cpp of llama-cpp-python 0.3.36, plain"),
    ("certificate-llama-cpp-speculating", "the same with a draft model, three tokens"),
    ("certificate-llama-cpp-synthetic", "the same with `--spec-synth-len 3`, which accepts by chance"),
    ("certificate-eagle3-jax-chain", "`eagle3 serve`, chain of three likeliest tokens"),
)


def power() -> str:
    """Writes the smallest number of requests that finds each error in nearly all runs, and the test that does."""
    measured = record("certify-power")
    samples = record("certify-power-two-samples")
    lines = []
    for entry, of_samples in zip(measured["errors"], samples["errors"], strict=True):
        tests = sorted(entry["by"], key=lambda name: -entry["by"][name])
        texts = needed(of_samples["found"], samples["runs"])
        lines.append([entry["error"], needed(entry["found"], measured["runs"]), tests[0] if tests else "", texts])
    honest = measured["honest"]
    shares = ", ".join(f"{share:.1%} below {limit}" for limit, share in honest["shares"].items())
    of_texts = samples["environment"]["git"]["commit"][:10]
    columns = ["injected error", "requests", "found mostly by", "two samples of texts"]
    return table(columns, lines) + (
        f"\n\n{version(measured['environment'])} (texts: `{of_texts}`), "
        f"{measured['runs']} runs of each error and size, α = 10⁻⁶ in all, "
        f"τ = {measured['mean_acceptance_length']:.2f}.\n"
        f"A correct sampler, {honest['runs']:,} runs of {honest['requests']} requests: the smallest p-value times the "
        f"number of tests was {shares};\nthe smallest of all was {honest['smallest']:.1g}."
    )


def needed(successes: Row, runs: int) -> str:
    """Writes the smallest number of requests that finds an error, or in how many runs the largest number does."""
    enough = [requests for requests, count in successes.items() if count >= 0.95 * runs]
    most, count = list(successes.items())[-1]
    return f"{int(enough[0]):,}" if enough else f"{count} of {runs} runs by {int(most):,}"


def certificates() -> str:
    """Writes the verdicts about servers."""
    lines = []
    commits = set()
    for name, title in SERVERS:
        certificate = record(name)
        commits.add(f"`{certificate['commit'][:10]}`")
        worst = min(certificate["tests"], key=lambda test: test["p_value"])
        finding = f"{worst['name']}, p = {worst['p_value']:.1g}" if certificate["verdict"] == "not lossless" else ""
        tokens = max(test["tokens"] for test in certificate["tests"])
        size = [f"{certificate['requests']:,}", f"{tokens:,}", f"{certificate['seconds']:.0f}"]
        lines.append([title, certificate["headline"].lower(), *size, finding])
    release = record(SERVERS[0][0])["version"]
    return table(["server", "verdict", "answers", "tokens", "seconds", "by"], lines) + (
        "\n\nSmolLM2-135M-Instruct, two cores of a CPU, temperature 1, twelve prompts.\n"
        f"Version {release}, commits {', '.join(sorted(commits))}."
    )
