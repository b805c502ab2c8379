"""Certificates: whether what a speculating server writes follows the distribution that it reports.

:func:`certify` asks a server that speaks OpenAI's protocol and judges its answers,
:func:`certify_sampler` a Python function; ``eagle3 certify`` is the command. ``docs/certify.md``
says what a verdict means. This needs no JAX.
"""

from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate, Control, Finding, Requirement, Verdict
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.examine import certify
from eagle3_jax.certify.function import certify_sampler
from eagle3_jax.certify.source import Completion, Refused, Report, ServerError, Source
from eagle3_jax.certify.statistics import Draws, Sampling, Test, judge

__all__ = [
    "Certificate",
    "Client",
    "Completion",
    "Control",
    "Draws",
    "Finding",
    "Plan",
    "Refused",
    "Report",
    "Requirement",
    "Sampling",
    "ServerError",
    "Source",
    "Test",
    "Verdict",
    "certify",
    "certify_sampler",
    "judge",
]
