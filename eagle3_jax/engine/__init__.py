"""Serving: requests that share the rows of a running batch."""
