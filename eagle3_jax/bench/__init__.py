"""Measurements of the costs and gains of speculation on this machine."""
