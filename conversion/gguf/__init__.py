"""Reads GGUF files of llama.cpp as the Hugging Face checkpoints that they were made from."""

from eagle3_jax.conversion.gguf.reading import Contents, read_contents, read_text

__all__ = ["Contents", "read_contents", "read_text"]
