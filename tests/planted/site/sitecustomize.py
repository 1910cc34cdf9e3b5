"""Python imports this at its start in each process of a run with a planted fault."""

from tests.planted import planting

planting.start()
