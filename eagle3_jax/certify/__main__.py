"""``python -m eagle3_jax.certify``."""

import sys

from eagle3_jax.certify.command import main

if __name__ == "__main__":
    sys.exit(main())
