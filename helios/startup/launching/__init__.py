"""Which processes run a call, and what they do together."""
