"""Replicas of a run: which process trains which, and how their gradients and losses are summed.

The order of every sum depends on the number of replicas, not on the number of processes.
"""
