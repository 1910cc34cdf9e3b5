"""What is made of the files of a run: reports and comparisons."""
