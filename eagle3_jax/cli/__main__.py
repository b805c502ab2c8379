"""``python -m eagle3_jax.cli``."""

from eagle3_jax.cli import main

main()
