"""Checkpoints of helios-ml, the earlier package, brought to the present format.

``helios.chkpt_migrator`` and ``helios migrate`` are the ways in; a start never reads an old file.
"""
