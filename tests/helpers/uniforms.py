"""All values of a uniform, and how programs that run through them are compiled."""

from __future__ import annotations

VALUES = 2**24
# These programs run for longer than they compile.
OPTIMISED = {"xla_backend_optimization_level": 3}
