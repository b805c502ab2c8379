"""Which vLLM a validation compares with, and the pins of the one that `make vllm` builds."""
