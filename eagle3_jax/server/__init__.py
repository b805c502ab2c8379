"""A server of OpenAI's completions, for experiments."""
