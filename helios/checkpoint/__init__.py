"""Checkpoints on disk: names, sidecars, commits, retention and loading.

Modules here know neither models nor loops; they get plain dictionaries.
"""
