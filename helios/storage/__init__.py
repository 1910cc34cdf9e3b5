"""Files: durable writes, safe serialization, digests, locks, row files and event files.

Nothing here may know a checkpoint, a model or a loop.
"""
