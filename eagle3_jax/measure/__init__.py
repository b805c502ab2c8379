"""What speculation costs and gains, measured on the machine at hand."""
