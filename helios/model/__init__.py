"""What users subclass, and which of its attributes are state.

Nothing here may open a file or decide when something happens.
"""
