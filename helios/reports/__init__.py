"""What is made of the files of a run: reports and comparisons; and what of a machine counts."""
