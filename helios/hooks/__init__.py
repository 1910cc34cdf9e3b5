"""The table of events and the bus that tells them.

Nothing here may know who listens.
"""
