"""Which checkpoint a call starts from, and whether it belongs to this run."""
