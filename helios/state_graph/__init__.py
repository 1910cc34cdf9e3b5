"""Finds, saves and compares the state of a run: one walk over an owner, and its consumers.

A module each determines what is saved, what has changed since setup, what a replica changes
independently, and what must be equal on all processes.
"""
