"""The levels of proof, in the order of the report."""

from __future__ import annotations

from typing import NamedTuple


class Level(NamedTuple):
    """One claim."""

    name: str  #: As tests name it: ``@pytest.mark.level("L5")``.
    title: str  #: Title in the report.
    claim: str  #: The claim that a green verdict proves, in one sentence.
    only_with: str = ""  #: The option that the level needs, ``gpu`` or ``aot``; empty for most.


LEVELS = (
    Level(
        "L0",
        "Exact distribution",
        "The acceptance rule emits exactly the target's distribution, by enumeration of all"
        " outcomes.",
    ),
    Level(
        "L1",
        "Injected randomness",
        "On a grid of given uniforms, acceptance and residual have the frequencies of the rule.",
    ),
    Level(
        "L2",
        "Output distribution of the compiled loop",
        "Sequences from the jitted loop follow the exact distribution of a tiny target.",
    ),
    Level(
        "L3",
        "Greedy, bit for bit",
        "A refused draft leaves no bit behind; the text is that of plain decoding, except for"
        " bfloat16 ties.",
    ),
    Level(
        "L4",
        "Greedy, margin-aware",
        "Every token is the reference's choice or approximately tied with it, no more often than in"
        " plain decoding.",
    ),
    Level(
        "L5",
        "Greedy against vLLM, both directions",
        "Every token of ours is vLLM's choice, and every token of vLLM's is ours.",
    ),
    Level(
        "L6",
        "Sampling on a real pair",
        "Sampled tokens of a trained pair follow the target's distribution at every index of a"
        " round.",
    ),
    Level(
        "L7",
        "Task sanity",
        "Task accuracy with speculation equals that without, within its confidence interval.",
        only_with="gpu",
    ),
    Level(
        "L8",
        "Acceptance parity with vLLM",
        "The same head accepts the same tokens in the same rounds as in vLLM.",
    ),
    Level(
        "L9",
        "Speed",
        "Speed next to other engines in the same run, and below what the hardware can do.",
    ),
    Level(
        "HF",
        "Parity with transformers",
        "Logits, features and greedy tokens equal those of transformers.",
    ),
    Level(
        "JV",
        "Our drafter inside vLLM",
        "vLLM, verifying what our drafter proposes, writes its own text and accepts what we"
        " accept.",
    ),
    Level(
        "AOT",
        "Compiled for accelerators",
        "On an H200 or a TPU a round has no work of the host, no copy of a cache or table, and no"
        " launch too many; on a GPU drafts leave the target's kernels as they are.",
        only_with="aot",
    ),
)

BY_NAME = {level.name: level for level in LEVELS}
