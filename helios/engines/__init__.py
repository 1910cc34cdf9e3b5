"""Engines: device, precision, backward, clipping and update, and sums over processes.

An engine never decides when something happens.
"""

# Importing an engine of the reference by its name raises an error that names its replacement.
from helios.core.moved import refuse_engine_name as __getattr__  # noqa: F401
from helios.engines.engine import Engine
from helios.engines.precision import Precision

__all__ = ["Engine", "Precision"]
