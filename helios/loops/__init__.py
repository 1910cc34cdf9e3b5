"""The order of things.

Nothing here may open a file, talk to other processes or hold a counter.
"""
