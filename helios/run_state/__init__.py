"""What of a run is state: one walk over what an owner reaches, and what is made of it.

Saved, changed since setup, changed by one replica only, equal on all processes: each question is a
module beside the walk.
"""
