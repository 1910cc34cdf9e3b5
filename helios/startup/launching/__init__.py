"""Which processes carry out a call, and what they do together."""
