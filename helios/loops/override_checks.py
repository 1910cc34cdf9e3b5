"""Checks what users write in place of a micro-batch's calls.

In an ``advance`` of the user's a missing call is an error: a forgotten update would count as a
step, and a second one would divide by a wrong number of micro-batches; neither would show in the
losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from helios.core.loss_means import WeightedLoss
from helios.core.utils import parameters_of
from helios.errors import ArgumentError, UsageError
from helios.model.processor import Processed
from helios.replicas.gradients import make_mixed_error

_DEFAULT = "super().advance(batch)"


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


@final
class EarlierGradients:
    """The gradients of earlier micro-batches of a window, set aside while those of one are made.

    What the user reads, projects or replaces is then the gradient of one micro-batch, however many
    make up a window.

    Args:
        optimizers: the optimizers of the parameters.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        parameters = (each for optimizer in optimizers for each in parameters_of(optimizer))
        self._found: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            if parameter.grad is not None:
                self._found.append((parameter, parameter.grad))
                parameter.grad = None

    def add_back(self, optimizer: Optimizer | None = None) -> None:
        """Add them to the gradients that parameters have now.

        Args:
            optimizer: the one whose parameters are meant; ``None`` for all that are left.
        """
        if not self._found:
            return
        members = None if optimizer is None else set(map(id, parameters_of(optimizer)))
        left: list[tuple[Tensor, Tensor]] = []
        for parameter, gradient in self._found:
            if members is not None and id(parameter) not in members:
                left.append((parameter, gradient))
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = gradient.add_(parameter.grad)
        self._found = left


@final
class OwnRound:
    """The calls of ``forward``, ``backward`` and ``update`` in one ``advance`` of a loop.

    Args:
        name: the class of the loop.
        optimizers: the optimizers of the model, by path.

    Attributes:
        earlier: the gradients of earlier micro-batches.
        weights: by optimizer, the weight of the losses of this one; ``None`` if they have none.
    """

    def __init__(self, name: str, optimizers: Mapping[str, Optimizer]) -> None:
        self._name = name
        self._optimizers = optimizers
        self.earlier = EarlierGradients(optimizers.values())
        self.weights: dict[Optimizer, float | None] = {}
        self._num_forwards = self._num_backwards = 0
        self._is_manual = False
        self._waiting: dict[str, bool] = {}
        # Losses, and the optimizers whose parameters have got gradients of each.
        self._reached: list[tuple[object, list[str]]] = []
        self._collected: set[str] = set()
        self._updated: set[str] = set()

    def see_default(self, *, is_manual: bool) -> None:
        """Record that ``super().advance(batch)`` has trained on the batch."""
        self._num_forwards += 1
        self._num_backwards += 1
        self._is_manual |= is_manual
        self._updated.add(_DEFAULT)

    def see_forward(self, *, is_manual: bool) -> None:
        """Record a forward pass, which is all of a manual step."""
        self._num_forwards += 1
        self._is_manual |= is_manual

    def begin_backward(
        self, losses: object, optimizer: Optimizer | None, *, is_sharded: bool
    ) -> None:
        """Record a backward.

        Args:
            losses: what is passed to it.
            optimizer: the one to which its gradients are limited; ``None`` for all.
            is_sharded: whether models are sharded over the processes.

        Raises:
            UsageError: without a forward pass or a loss, or after the update.
        """
        self._check_automatic()
        if not self._num_forwards:
            raise UsageError(
                f"{self._name}.advance must call forward(batch) before backward(loss), got no "
                "call: events, precision and random numbers belong to it. Write "
                "loss = self.forward(batch)."
            )
        self._check_loss(losses)
        self._num_backwards += 1
        if is_sharded and self._num_backwards > 1:
            raise UsageError(
                f'{self._name}.advance must call backward(loss) once with sharding="full", whose '
                "gradients are summed during backward, got a second call. Add the losses, or use "
                'sharding="none".'
            )
        names = [*self._optimizers] if optimizer is None else [self._path_of(optimizer)]
        for name in names:
            if name in self._updated:
                raise self._make_double_error(name)
            if name in self._collected:
                raise UsageError(
                    f"{self._name}.advance must call backward for {name!r} before update takes its "
                    "gradients along with those of another optimizer, because one backward was for "
                    "both. Pass the optimizer whose parameters get the gradients: "
                    "backward(loss, optimizer)."
                )
            self._waiting[name] = False
        reached = next((known for loss, known in self._reached if loss is losses), None)
        if reached is None:
            self._reached.append((losses, names))
        else:
            reached += names

    def _check_loss(self, losses: object) -> None:
        if isinstance(losses, Tensor):
            if losses.numel() == 1 and losses.requires_grad:
                return
            shown = f"a tensor of shape {tuple(losses.shape)} with requires_grad="
            shown = f"{shown}{losses.requires_grad}"
        elif isinstance(losses, dict | Processed | WeightedLoss):
            return
        else:
            shown = "None" if losses is None else type(losses).__name__
        raise UsageError(
            f"{self._name}.advance must call backward(loss) with a scalar loss that has a graph, "
            f"or with what forward(batch) returned, got {shown}. Reduce it (loss.mean()), and do "
            "not detach it."
        )

    def count_weight(self, optimizer: Optimizer, weight: float | None) -> None:
        """Add the weight of a loss, before its backward.

        The weights of earlier losses go with their gradients, as in a step that computes two of
        them and keeps the second one.
        """
        if has_gradients(optimizer) and optimizer in self.weights:
            known = self.weights[optimizer]
            if known is not None and weight is not None:
                weight += known
            elif known is not weight:
                raise make_mixed_error()
        self.weights[optimizer] = weight

    def end_backward(self) -> None:
        """Record which optimizers have got gradients."""
        for name, has_some in self._waiting.items():
            self._waiting[name] = has_some or has_gradients(self._optimizers[name])

    def begin_update(self, optimizer: Optimizer) -> tuple[str, tuple[Optimizer, ...]]:
        """Record an update, and add back what earlier micro-batches have made.

        Returns:
            The path of the optimizer, and those whose gradients are collected now: it, and all that
            have gradients of the same loss; none if an earlier update has done it.

        Raises:
            UsageError: without gradients, for a second one, or if the gradients are gone.
        """
        self._check_automatic()
        path = self._path_of(optimizer)
        if path in self._updated:
            raise self._make_double_error(path)
        if path not in self._waiting:
            raise UsageError(
                f"{self._name}.advance must call backward(loss) before it updates {path!r}, got no "
                "call. Write self.backward(loss), then self.update(optimizer)."
            )
        group = [] if path in self._collected else [path]
        for _, reached in self._reached if group else ():
            if path in reached:
                group += [x for x in self._waiting if x in reached and x not in group]
        group = [name for name in group if name not in self._collected]
        for name in group:
            if self._waiting[name] and not has_gradients(self._optimizers[name]):
                raise UsageError(
                    f"{self._name}.advance must leave the gradients of {name!r} in its parameters "
                    "until update(optimizer), but they are None now: nothing would be learned. "
                    "Call zero_grad() before the last backward, or assign parameter.grad."
                )
            self.earlier.add_back(self._optimizers[name])
        self._collected.update(group)
        del self._waiting[path]
        self._updated.add(path)
        return path, tuple(self._optimizers[name] for name in group)

    def end(self) -> None:
        """Check that nothing is missing.

        Raises:
            UsageError: if a call is.
        """
        if self._is_manual:
            return
        missing = ""
        if not self._num_forwards:
            missing = "super().advance(batch), or forward, backward and update,"
        elif not self._num_backwards:
            missing = "backward(loss) and update(optimizer)"
        elif self._waiting:
            missing = f"update(optimizer) for {', '.join(map(repr, self._waiting))}"
        if missing:
            raise UsageError(
                f"{self._name}.advance must call {missing} for each batch, got no call. update "
                "hands the gradients of a micro-batch over, and steps when a window ends; to leave "
                "a step out, call self.session.context.skip_step(reason)."
            )

    def make_unused_error(self, paths: Iterable[str]) -> UsageError:
        """Make the error for optimizers whose gradients of a window nobody uses."""
        return UsageError(
            f"{self._name}.advance must call update(optimizer) in the last micro-batch of a "
            f"window, got no call for {', '.join(map(repr, sorted(paths)))}, which has gradients "
            "of earlier ones. Call backward and update for it there, too."
        )

    def _check_automatic(self) -> None:
        if self._is_manual:
            raise UsageError(
                f"{self._name}.advance must not call backward(loss) or update(optimizer) when "
                "train_step returns None and so does both itself. Return the loss, or remove the "
                "calls."
            )

    def _path_of(self, optimizer: object) -> str:
        for path, known in self._optimizers.items():
            if known is optimizer:
                return path
        raise ArgumentError(
            f"{self._name}.advance must pass an optimizer of the model to backward and update, one "
            f"of {list(self._optimizers)}, got {type(optimizer).__name__}. Assign it to an "
            "attribute of the model in setup()."
        )

    def _make_double_error(self, path: str) -> UsageError:
        return UsageError(
            f"{self._name}.advance must call update(optimizer) once for each optimizer, got "
            f"another round for {path!r}. For several updates per batch call "
            "super().advance(batch) several times."
        )


@final
class StepsMade:
    """Counts the steps of optimizers while something of the user's runs.

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.count = 0
        self._handles = [each.register_step_post_hook(self._see) for each in optimizers]

    def _see(self, *args: object) -> None:
        self.count += 1

    def close(self) -> int:
        """Stop counting; returns the number of steps."""
        for handle in self._handles:
            handle.remove()
        return self.count
