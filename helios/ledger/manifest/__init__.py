"""The manifest of a run: what it ran on and with, at its first start and at each resume."""
