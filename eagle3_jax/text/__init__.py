"""Texts of a target: chat templates and tokens."""
