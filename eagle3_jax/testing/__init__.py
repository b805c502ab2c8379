"""The contracts of the loop, as checks of your own drafter, target or acceptance rule."""

from eagle3_jax.testing.drafter import DRAFTER_CHECKS, check_drafter
from eagle3_jax.testing.report import ContractReport, Finding
from eagle3_jax.testing.target import TARGET_CHECKS, check_target
from eagle3_jax.testing.verifier import VERIFIER_CHECKS, check_verifier

__all__ = [
    "DRAFTER_CHECKS",
    "TARGET_CHECKS",
    "VERIFIER_CHECKS",
    "ContractReport",
    "Finding",
    "check_drafter",
    "check_target",
    "check_verifier",
]
