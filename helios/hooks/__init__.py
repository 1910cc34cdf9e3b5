"""The table of events, and the bus that emits them to their receivers."""
