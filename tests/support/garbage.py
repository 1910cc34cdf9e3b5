"""Rare collections of garbage, in each process of the tests that imports this first.

With Python's own thresholds a twentieth of the processor's time goes into looking through objects
of which nearly all are in use: without cycles, what is not is freed at once anyway.
"""

from __future__ import annotations

import gc

gc.set_threshold(100_000, 20, 100)
