"""Prompts of users: requests, and questions of benchmarks."""
