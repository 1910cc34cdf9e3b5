"""``BatchLoop``: move the batch of one replica to the device, and run the optimizer loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from helios.counters import Phase
from helios.loops.loop import Loop, make_stray_stop, require
from helios.loops.optimizer import OptimizerLoop


class BatchLoop(Loop):
    """The default batch loop."""

    _internals: ClassVar[str] = "_is_done optimizer_loop"

    roles = ("optimizer_loop",)
    _role_types: ClassVar = {"optimizer_loop": OptimizerLoop}
    _role_arguments: ClassVar = {"optimizer_loop": ("batch",)}

    if TYPE_CHECKING:

        def connect(self, *, optimizer_loop: Loop = ...) -> None: ...  # type: ignore[override]

    def __init__(self, optimizer_loop: Loop | None = None) -> None:
        super().__init__()
        self.optimizer_loop: OptimizerLoop = optimizer_loop  # type: ignore[assignment]
        self._is_done = False

    @property
    def done(self) -> bool:
        """Whether the replica's batch is done."""
        return self._is_done

    def reset(self) -> None:
        """Prepare for one iteration."""
        self._is_done = False

    def advance(self, batch: Any) -> None:
        """Train on the batch of one replica."""
        self._is_done = True
        child = self.optimizer_loop or require(self.optimizer_loop)
        # Helios' own has one round for each batch.
        train = child.run if child._has_own_cycle else child.advance
        train(self.prepare(batch))

    def prepare(self, batch: Any) -> Any:
        """Return a batch on the device, as the owner of ``process_training_batch`` maps it.

        Loops that replace this one must call it too, exactly once per batch.

        Raises:
            UsageError: if it raises ``StopIteration``, which must not end a loop.
        """
        session = self._session
        try:
            if not session.leaves_batches:
                batch = session.model.batch_to_device(batch, Phase.TRAINING)
            if "process_training_batch" not in session.hooks.active:
                return batch
            return session.hooks.transform("process_training_batch", batch, session.state)
        except StopIteration as error:
            raise make_stray_stop(error) from error
