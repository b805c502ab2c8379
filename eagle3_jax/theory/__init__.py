"""Costs and gains of speculation, computed from configurations, datasheets and rates."""
