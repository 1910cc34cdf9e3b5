"""The parameters of an optimizer."""

from __future__ import annotations

import operator
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return list(chain.from_iterable(map(operator.itemgetter("params"), optimizer.param_groups)))
