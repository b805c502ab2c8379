"""Claims of the library checked against the outside world: vLLM, transformers, statistics, hardware. See README.md."""
