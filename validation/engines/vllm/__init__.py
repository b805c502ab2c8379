"""Real vLLM, in its own environment or on its own machine, behind one interface."""
