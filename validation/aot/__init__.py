"""Programs of the loop, compiled ahead of time for accelerators that are not present."""
