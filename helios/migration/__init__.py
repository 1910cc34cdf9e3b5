"""Migration of checkpoints of helios-ml, the earlier package, to the current format.

Use ``helios.chkpt_migrator`` or ``helios migrate``; a start never reads an old file.
"""
