"""Tables of the published chat model, from one record in validation/results that ``examples/smollm2.py`` writes."""

from __future__ import annotations

from typing import Any

from methods import table
from speeds import record

RECORD = record("smollm2-cpu-amd-epyc-2-cores")
FORMS = ("float32", "mixed", "int8")
ROWS = (1, 2, 4, 6)
PREFILLS = (32, 128)


def parts() -> dict[str, dict[str, str]]:
    """The tables by page and mark."""
    return {"docs/numbers.md": {"chat model": f"{rounds()}\n\n{facts()}"}}


def rounds() -> str:
    """Milliseconds of a step by rows and precision, in multiples of the fastest plain step; and of prefills."""
    figures = RECORD["rounds"]["figures"]
    titles = ["weights", *(f"{count} row{'s' if count > 1 else ''}" for count in ROWS), "prefill of 32", "of 128"]
    lines = [[f"`{form}`", *(step(figures[f"{form}, {count} rows"]) for count in ROWS)] for form in FORMS]
    for form, line in zip(FORMS, lines, strict=True):
        line += [f"{figures[f'{form}, prefill of {count}']['milliseconds']:.0f}" for count in PREFILLS]
    return f"{table(titles, lines)}\n\n{origin('rounds')}"


def step(figure: dict[str, Any]) -> str:
    """Milliseconds of a step, and its ratio to the fastest plain step."""
    return f"{figure['milliseconds']:.1f} ({figure['times_fastest_plain_step']:.2f})"


def facts() -> str:
    """What the other parts of the record say, as a list."""
    figures = RECORD["rounds"]["figures"]
    texts = RECORD["texts"]
    divergence = RECORD["divergence"]
    share = figures["int8, 4 rows"]["outside_products"]
    ratios = [
        figures[f"int8, prefill of {count}"]["milliseconds"]
        / figures[f"int8, prefill of {count}, products alone"]["milliseconds"]
        for count in PREFILLS
    ]
    starts = {(row["weights"], row["compiled_programs"]): row for row in RECORD["start"]["rows"]}
    cold = starts["int8", "cold"]
    warm = starts["int8", "warm"]
    parted = [row["logits_apart"] for row in texts["parted"]]
    apart = f"; the others part where two logits are at most {max(parted):.2g} apart" if parted else ""
    nats = "mean {mean_nats:.4f}, median {median_nats:.4f}, 99th percentile {p99_nats:.3f}".format(**divergence)
    lines = [
        f"- **A verification of four rows in `int8`** spends {share:.0%} outside products with weights.",
        f"  Attention is a part of this share. A prefill takes {ratios[0]:.2f} and {ratios[1]:.2f} times its products.",
        f"- **`int8` compared with float32** over {divergence['tokens']:,} tokens of greedy answers to",
        f"  {divergence['prompts']} prompts of MT-bench, HumanEval and GSM8K, in nats a token:",
        f"  {nats}. The likeliest token is the same",
        f"  for {divergence['same_likeliest_token']:.1%}.",
        f"  Of the answers of 32 tokens, {divergence['equal_texts']} are equal.",
        "- **Answers in float32 with drafts by n-grams**, of which every token is the likeliest one of transformers:",
        f"  {texts['equal']} of {texts['prompts']} equal{apart}.",
        "- **From the command to the first character** of an answer in `int8`:",
        f"  {cold['first_character_seconds']:.0f} s, and {warm['first_character_seconds']:.0f} s once the programs are",
        f"  compiled. Peak memory: {cold['peak_megabytes']:,} MB.",
    ]
    return "\n".join(lines)


def origin(part: str) -> str:
    """Version, commit and machine of a part."""
    about = RECORD[part]["environment"]
    cpu = about["cpu"]
    versions = about["versions"]
    commit = about["git"]["commit"][:10]
    return (
        f"Version {versions['eagle3_jax']}, commit `{commit}`, {cpu['cores']} cores of an {cpu['model']}, "
        f"jax {versions['jax']}, batch 1, context 100 of 256. Medians."
    )
