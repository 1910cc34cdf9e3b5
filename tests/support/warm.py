"""The last module that the fork server of ranks imports: one training, and then no garbage.

What each rank would do again, it finds done: modules that a training imports late, and caches that
the first step fills. Objects that were made until then are frozen, else the first collection in a
rank would write to each of them, and so copy the memory that it shares with the server. Its memory
is joined into huge pages, so that forks are cheap.
"""

from __future__ import annotations

import gc
import logging
import random
import tempfile
from pathlib import Path

import torch

from tests import leaks
from tests.support import elastic, huge_pages


def _train() -> None:
    before = leaks.take_snapshot()
    torch_state, state = torch.get_rng_state(), random.getstate()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        elastic.train(Path(folder), elastic.Elastic(num_replicas=2, total_steps=2))
    logging.disable(logging.NOTSET)
    leaks.reset_generators()
    torch.set_rng_state(torch_state)
    random.setstate(state)
    assert not before.leaks()


# A process that may have asked for GPUs must not be forked.
if not torch.backends.cuda.is_built():
    _train()
gc.collect()
gc.freeze()
huge_pages.collapse()
