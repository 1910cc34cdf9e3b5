"""Process groups, collectives by name, and pickling between the processes of one job.

Nothing here may know what the processes compute.
"""
