"""What speculation costs and gains: measured, predicted, bounded."""
