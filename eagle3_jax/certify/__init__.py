"""Certificates: whether what a speculating server writes follows the distribution that it reports.

:func:`~eagle3_jax.certify.examine.certify` asks a server that speaks OpenAI's protocol and judges
its answers, :func:`~eagle3_jax.certify.function.certify_sampler` a Python function;
``eagle3 certify`` is the command. ``docs/certify.md`` says what a verdict means. This needs no JAX.
"""
