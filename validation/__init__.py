"""Claims of the library, checked against vLLM, transformers and statistics. See README.md."""
