"""Files: durable writes, safe serialization, digests, locks, row files and event files.

Nothing in this package depends on a checkpoint, a model or a loop.
"""
