"""Batch processors: a step written as one function of model and batch.

A model that sets ``self.batch_processor`` needs no steps of its own. The loops run backward and the
update, not the processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from helios.core.loss_means import WeightedLoss
from helios.errors import LossNotProvidedError, UsageError
from helios.hooks.bus import check_call

if TYPE_CHECKING:
    from helios import Model

Transform = Callable[[Any], Any]
Forward = Callable[["Model", Any], tuple[Any, Tensor | None]]


@dataclass(frozen=True)
class Processed:
    """The result of a processor for a batch.

    Attributes:
        outputs: the outputs of the model; hooks read them as ``context.model_outputs``.
        loss: the scalar loss, or one with a weight; ``None`` if there is none.
    """

    outputs: Any
    loss: Tensor | WeightedLoss | None


class BatchProcessor(ABC):
    """Base of all batch processors.

    Args:
        need_backward: whether training runs backward on the loss; if False, the processor or other
            code updates the model, as in manual mode.
        transforms: a function, or several in order, that map a batch before the forward pass.
            Batch hooks see the batch before, forward hooks after them.

    """

    def __init__(
        self, need_backward: bool = True, transforms: Transform | Sequence[Transform] | None = None
    ) -> None:
        self._need_backward = need_backward
        self._is_evaluating = False
        self._transforms = [transforms] if callable(transforms) else list(transforms or ())

    @final
    def _check(self) -> None:
        """Check that the processor is ready for use.

        Raises:
            ArgumentTypeError: for a forward pass that does not take the model and a batch.
        """
        check_call(self._name(), self._function_of_step(), ("model", "batch"))

    @staticmethod
    def from_callable(
        function: Forward,
        need_backward: bool = True,
        transforms: Transform | Sequence[Transform] | None = None,
    ) -> BatchProcessor:
        """Return a processor whose forward pass is a plain function.

        Args:
            function: takes the model and a batch, returns ``(outputs, loss)``.
            need_backward: see the class.
            transforms: see the class.
        """
        return _FunctionProcessor(function, need_backward, transforms)

    @property
    def need_backward(self) -> bool:
        """Whether backward follows the current forward pass; False in every evaluation."""
        return self._need_backward and not self._is_evaluating

    @abstractmethod
    def forward(self, model: Model, batch: Any) -> tuple[Any, Tensor | None]:
        """Run the model on one batch.

        Returns:
            The outputs, and the loss as a scalar; the loss may be ``None`` if
            :attr:`need_backward` is False.
        """

    def _name(self) -> str:
        return f"{type(self).__name__}.forward"

    def _function_of_step(self) -> Forward:
        return self.forward

    @final
    def _transform(self, batch: Any) -> Any:
        """Return a batch for the forward pass."""
        for transform in self._transforms:
            batch = transform(batch)
        return batch

    @final
    def _process(
        self, model: Model, batch: Any, *, is_evaluating: bool, reads_loss: bool = True
    ) -> Processed:
        """Run the forward pass on a transformed batch.

        Args:
            model: the model.
            batch: the batch.
            is_evaluating: whether nothing is learned.
            reads_loss: whether the loss of an evaluation is read; one that nobody reads may have
                any shape.

        Raises:
            LossNotProvidedError: if backward is needed, and there is no loss.
            UsageError: if the forward pass returns anything but a pair, or a loss that is none.
        """
        self._is_evaluating = is_evaluating
        try:
            result = self.forward(model, batch)
        finally:
            self._is_evaluating = False
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(
                f"{self._name()} must return (outputs, loss), got {type(result).__name__}. Return "
                "(outputs, None) if there is no loss."
            )
        outputs, loss = result
        is_read = reads_loss if is_evaluating else self._need_backward
        if is_read and isinstance(loss, Tensor) and loss.numel() != 1:
            raise UsageError(
                f"{self._name()} must return (outputs, loss) with a scalar loss, got a tensor of "
                f"shape {tuple(loss.shape)}. Reduce it (loss.mean())."
            )
        if is_evaluating or not self._need_backward:
            return Processed(outputs, loss if is_evaluating else None)
        if loss is None:
            raise LossNotProvidedError(
                f"{self._name()} must return a loss in training, got None. Return "
                "(outputs, loss), or construct it with need_backward=False to do the update "
                "yourself."
            )
        return Processed(outputs, loss)


@final
class _FunctionProcessor(BatchProcessor):
    """A processor around a plain function."""

    def __init__(
        self,
        function: Forward,
        need_backward: bool,
        transforms: Transform | Sequence[Transform] | None,
    ) -> None:
        super().__init__(need_backward, transforms)
        self._function = function

    def _name(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__qualname__)

    def _function_of_step(self) -> Forward:
        return self._function

    def forward(self, model: Model, batch: Any) -> tuple[Any, Tensor | None]:
        """Call the function."""
        return self._function(model, batch)
