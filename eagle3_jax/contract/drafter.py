"""The contract of a drafter, run on somebody's own: :func:`check_drafter`.

The loop keeps the output exact whatever a drafter proposes, with one exception that it cannot see: ``probs`` that are
not what the tokens were drawn from. A drafter that breaks another rule is exact and slow. Both show here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from eagle3_jax.contract import decoding, drafts
from eagle3_jax.contract.report import PROTOCOL, ContractReport, class_name, examine
from eagle3_jax.contract.subject import Subject
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.types import Drafter

DRAFTER_CHECKS: dict[str, Callable[[Subject], str]] = {
    PROTOCOL: drafts.keeps_the_protocol,
    "keeps shapes and types": drafts.keeps_shapes,
    "proposes from its state alone": drafts.proposes_from_its_state_alone,
    "commits nothing by proposing": drafts.commits_nothing_by_proposing,
    "starts at the root": drafts.starts_at_the_root,
    "puts parents before children": drafts.is_topological,
    "is as deep as it says": drafts.is_as_deep_as_it_says,
    "drafts ids of the vocabulary": drafts.drafts_ids_of_the_vocabulary,
    "rows are independent of their neighbours": drafts.is_alone_in_its_row,
    "an empty observation changes nothing": drafts.ignores_empty_observations,
    "padding behind an observation does not matter": drafts.ignores_padding,
    "observing in pieces is observing at once": drafts.does_not_care_how_truth_is_cut,
    "a long text is as good as a short one": drafts.drafts_after_a_long_text,
    "declares distributions": drafts.declares_distributions,
    "draws from what it declares": drafts.draws_from_what_it_declares,
    "knows before it draws": drafts.knows_before_it_draws,
    "greedy output is the target's": decoding.leaves_greedy_output_alone,
    "sampled output has the target's law": decoding.leaves_the_law_alone,
}


def check_drafter(
    drafter: LoadedDrafter | Drafter[Any],
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    samples: int = 32768,
    seed: int = 0,
) -> ContractReport:
    """Run a drafter of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_drafter(MyDrafter(), target))`` shows the report. The statistical checks fail
    a drafter that is right once in a million; their lines say what deviation they would have seen. It compiles about
    fifteen programs and decodes a few thousand short sequences, so a small target is the place to start.

    **Limits.** Texts are 72 tokens long at most, in 4 rows, with a capacity of 96. Declared probabilities must add up
    to 1 within 2e-5, so a ``q`` that is rounded to bfloat16 fails. A ``q`` that is rounded and normalized again, or
    tokens that are sampled from a rounded ``q`` where the exact one is declared, are about 0.2 % off: no check sees
    that with fewer than ten million samples. With the default ``samples`` a node that is sampled at a temperature 2 %
    off the declared one is detected with 90 % power, if the standard deviation of ``log q`` is about 1 there and the
    node is always valid; the report has the number for your drafter.

    Args:
        drafter: An instance, with its parameters if it has any.
        target: What it drafts for. The law is enumerated with the vocabulary cut to three tokens (top-k), so any
            target in float32 will do.
        checks: Which of :data:`DRAFTER_CHECKS`; all when left out.
        samples: Drafts and sequences drawn by the statistical checks; four times as many drafts after a long text.
        seed: Of everything random.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
    findings = examine(Subject(loaded, target, samples, seed), DRAFTER_CHECKS, checks)
    return ContractReport(f"{class_name(loaded.drafter)} with {target.name}", findings)
