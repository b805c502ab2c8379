"""Others' software that decodes the same prompts: Hugging Face transformers and vLLM, each of them optional."""
