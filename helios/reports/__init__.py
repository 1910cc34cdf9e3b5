"""Pages and comparisons from the files of runs. Nothing in here trains."""
