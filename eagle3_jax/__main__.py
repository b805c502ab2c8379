"""``python -m eagle3_jax`` is the command ``eagle3``."""

from eagle3_jax.cli import main

main()
