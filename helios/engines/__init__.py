"""What a device does: moving data, backward, clipping and the optimizer step.

Nothing here may decide when something happens.
"""
