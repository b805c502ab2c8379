"""The contract of a target, run on somebody's own: :func:`check_target`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from eagle3_jax.contract import blocks, members
from eagle3_jax.contract.report import PROTOCOL, ContractReport, class_name, examine
from eagle3_jax.contract.scripted import writes_its_own_text
from eagle3_jax.contract.texts import TargetSubject
from eagle3_jax.decode import LoadedTarget

TARGET_CHECKS: dict[str, Callable[[TargetSubject], str]] = {
    PROTOCOL: members.keeps_the_protocol,
    "its cache leads with the batch": members.cache_leads_with_the_batch,
    "keeps shapes and types": members.keeps_shapes,
    "gives logits in float32": members.gives_float32,
    "a commit keeps shapes and types": members.commit_keeps_shapes,
    "a token depends on those before it": blocks.depends_on_the_text,
    "a prefill equals its tokens one by one": blocks.prefill_equals_tokens,
    "a prefill leaves what its tokens leave": blocks.prefill_leaves_its_tokens,
    "a block equals its tokens one by one": blocks.block_equals_tokens,
    "a committed block equals its text afresh": blocks.committed_block_equals_text,
    "a node of a tree equals its own path": blocks.node_equals_path,
    "a committed path equals its text afresh": blocks.committed_path_equals_text,
    "committing nothing changes nothing": blocks.nothing_changes_nothing,
    "rows are independent of their neighbours": blocks.is_alone_in_its_row,
    "what the mask hides has no influence": blocks.hides_what_the_mask_hides,
    "a long text equals its tokens one by one": blocks.long_text_equals_tokens,
    "features are those of the layers asked for": members.gives_features,
    "lends its tables": members.lends_tables,
    "greedy output is its own": writes_its_own_text,
}


def check_target(
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ContractReport:
    """Run a target of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_target(target))`` shows the report. Everything is compared with the target's
    own logits for texts that are fed token by token, so a wrong model that is wrong everywhere alike passes: compare
    its logits with another implementation first. It compiles about twenty-five programs; random weights at a small
    size are the place to start, as long as the output depends on the text.

    **Limits.** Most checks use 3 rows, texts of up to 20 tokens and blocks of 6. One check uses 9 rows, texts of 96
    tokens (fewer if ``max_positions`` is smaller), prompts of up to 64 and blocks of 16. A fault that starts beyond
    these sizes is not seen, nor is one that moves logits by less than ``tolerance``, nor one that is the same token by
    token (such as a wrong angle at position 24, whatever the block).

    Args:
        target: With its parameters.
        checks: Which of :data:`TARGET_CHECKS`; all when left out.
        tolerance: Largest deviation of a logit, as a share of the largest logit; when left out 1e-4, and 3e-2 for a
            target with parameters or a cache of less than 32 bits (6e-2 for long texts).
        seed: Of every text.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    findings = examine(TargetSubject(target, tolerance, seed), TARGET_CHECKS, checks)
    return ContractReport(f"{class_name(target.model)}, {target.name}", findings)
