"""What of a machine matters to reproducibility, and what is wrong with it."""
