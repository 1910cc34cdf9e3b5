"""What devices and processes do: moving, backward, clipping, the update; launching, summing.

Nothing here may decide when something happens.
"""

# Who imports an engine of the reference by its name is told what replaces it, and nothing else.
from helios.engines.reference_names import refuse as __getattr__  # noqa: F401
