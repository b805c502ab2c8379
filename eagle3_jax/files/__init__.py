"""Files and names: prompts, JSON lines, places of checkpoints, and writing."""
