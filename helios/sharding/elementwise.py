"""Optimizers whose update of an element depends on nothing but that element."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from helios.errors import UsageError

_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam),
    *(optim.Adamax, optim.Adadelta, optim.ASGD, optim.Rprop),
)


def check_optimizer(path: str, optimizer: Optimizer) -> None:
    """Check that an optimizer computes the same bits on shards as on whole parameters.

    An optimizer of the user says so with the attribute ``is_elementwise = True``.

    Args:
        path: its name, for the message.
        optimizer: the optimizer.

    Raises:
        UsageError: if it does not, or was used before.
    """
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and getattr(kind, "is_elementwise", False) is not True:
        raise UsageError(
            f'Trainer(sharding="full") needs an optimizer that works element by element, but '
            f"{path} is {kind.__name__}. Use e.g. AdamW; if yours does, set is_elementwise = True "
            "in its class."
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            f'Trainer(sharding="full") needs optimizers without fused kernels, whose bits depend '
            f"on where a shard ends, but {path} has fused=True. Pass foreach=True instead."
        )
    if optimizer.state:
        raise UsageError(
            f'Trainer(sharding="full") needs optimizers that have no state after setup(), but '
            f"{path} was stepped or loaded there. Load it with a checkpoint of Helios."
        )
