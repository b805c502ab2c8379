"""What measurements are reported with: tables, plots, pages, and a description of where they were taken."""
