"""``eagle3 oracle OUT``: files with which any engine, in any language, tests its verification.

``README.md`` defines every array and every rule. ``check.py`` computes the verdicts again by numpy
alone. Both are copied into the folder. ``docs/oracle.md`` says how an engine uses them.
"""

from eagle3_jax.oracle.write import write_oracle

__all__ = ["write_oracle"]
