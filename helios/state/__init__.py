"""Finds, saves and restores the state of a run. The counters have their public path here."""

from helios.counters import Cursor as Cursor
from helios.counters import Phase as Phase
from helios.counters import TrainingState as TrainingState
from helios.counters import TrainingUnit as TrainingUnit
