"""Processors of logits, and the grammars of some of them."""
