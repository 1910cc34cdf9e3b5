"""Computes gradients a second time in some steps, to find hardware that computes wrongly."""
