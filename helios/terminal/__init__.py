"""The output of a run: terminal, progress bars and loggers.

Nothing in this package depends on a model or a loop.
"""
