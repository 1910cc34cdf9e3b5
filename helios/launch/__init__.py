"""Starts and supervises the processes of a run (torchrun, srun or spawn).

Nothing in this package depends on what the processes compute.
"""
