"""The faults, in one file for each subject; the name of a fault says what breaks.

Each gets what it replaces, and what that is called with.
"""
