"""Replicas of a run: which process trains which, and how their gradients and losses are summed.

Every sum is made in a fixed order that the number of replicas sets, not the number of processes.
"""
