"""What devices and processes do: moving, backward, clipping, the update; launching, summing.

Nothing here may decide when something happens.
"""
