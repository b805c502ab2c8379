"""What speculation costs and gains, computed from numbers: nothing here needs JAX."""
