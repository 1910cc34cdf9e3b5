"""What is made of the files of a run: reports, comparisons, packs; and what of a machine counts."""
