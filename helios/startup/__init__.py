"""What the trainer does before and after the loops: check, build, resume, report, tear down.

Part of the same room as ``helios.trainer``; nothing below may import it.
"""
