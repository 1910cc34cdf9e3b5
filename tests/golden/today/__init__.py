"""Trainings of commit e702e9a, with their checkpoints and results; see README.md."""
