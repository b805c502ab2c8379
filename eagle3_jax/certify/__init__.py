"""Certificates for servers: whether what they write while speculating follows the distribution that they report.

:func:`certify` asks a server that speaks OpenAI's protocol and judges its answers; ``eagle3 certify`` is its command.
``docs/certify.md`` says what a verdict means.
"""

from eagle3_jax.certify.certificate import Certificate, Verdict
from eagle3_jax.certify.client import Client, ServerError
from eagle3_jax.certify.examine import Plan, certify
from eagle3_jax.certify.statistics import Draws, Sampling, Test, judge

__all__ = ["Certificate", "Client", "Draws", "Plan", "Sampling", "ServerError", "Test", "Verdict", "certify", "judge"]
