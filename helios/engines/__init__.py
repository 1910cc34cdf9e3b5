"""Engines: device, precision, backward, clipping and update, and sums over processes.

An engine never decides when something happens.
"""

from helios.engines.engine import Engine
from helios.engines.precision import Precision

__all__ = ["Engine", "Precision"]
