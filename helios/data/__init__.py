"""Positions in, batches out: samplers, keyed loaders and data modules.

Nothing here may know a model, a checkpoint or a loop.
"""
