"""Faults that are planted into Helios by name, each with the test that must turn red."""
