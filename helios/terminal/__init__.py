"""What a run shows: the screen, progress bars, and the loggers.

Nothing here may know a model or a loop.
"""
