"""Snapshots on disk: names, sidecars, commits, retention and loading.

Nothing here may know a model or a loop; it is handed plain dictionaries.
"""
