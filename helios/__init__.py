"""Helios trains PyTorch models so that a killed run, started again, gives the same bits."""
