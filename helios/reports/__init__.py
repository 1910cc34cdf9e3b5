"""What is made of the files of runs: pages and comparisons. Nothing in here trains."""
