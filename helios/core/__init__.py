"""Tools without knowledge of training: randomness, logging, files, codec, registries.

Nothing here may know a model, a data set or a loop.
"""
