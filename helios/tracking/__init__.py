"""What a tracker keeps of a run, and how it is sent to a server.

Training only appends to a file; another process reads that file and sends it.
"""
