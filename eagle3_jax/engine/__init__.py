"""The engine: requests that share the rows of one running batch."""
