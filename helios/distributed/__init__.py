"""Process groups, collectives, and pickling between the processes of one job.

Nothing in this package depends on what the processes compute.
"""
