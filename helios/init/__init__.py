"""Keyed initialization: modules get their values after ``setup``, each under a key of its path."""
