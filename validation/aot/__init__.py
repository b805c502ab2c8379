"""What the programs of the loop become on accelerators that are not here: compiled ahead of time, from shapes alone."""
