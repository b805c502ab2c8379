"""vLLM, which decodes the same prompts as this library, in its own environment."""
