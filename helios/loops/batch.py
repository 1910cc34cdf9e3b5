"""``BatchLoop``: move the batch of one replica to the device, and run the optimizer loop."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any, ClassVar

from helios.counters import Phase
from helios.errors import UsageError
from helios.loops.loop import Loop, make_stray_stop, require
from helios.loops.optimizer import OptimizerLoop
from helios.loops.yielding import YieldLoop
from helios.session import Session


class BatchLoop(Loop):
    """The default batch loop."""

    _internals: ClassVar[str] = "_is_done _prepared_in _replaced optimizer_loop"

    roles = ("optimizer_loop",)
    _role_types: ClassVar = {"optimizer_loop": OptimizerLoop}
    _role_arguments: ClassVar = {"optimizer_loop": ("batch",)}

    if TYPE_CHECKING:

        def connect(self, *, optimizer_loop: Loop = ...) -> None: ...  # type: ignore[override]

    def __init__(self, optimizer_loop: Loop | None = None) -> None:
        super().__init__()
        self.optimizer_loop: OptimizerLoop = optimizer_loop  # type: ignore[assignment]
        self._is_done = False
        self._prepared_in = (0, 0)
        # The default loop, while one that the model's step needs has its place.
        self._replaced: OptimizerLoop | None = None

    @property
    def done(self) -> bool:
        """Whether the replica's batch is done."""
        return self._is_done

    def _adapt(self, session: Session | None) -> None:
        """Run a train_step that yields its losses by a YieldLoop, unless a loop was connected."""
        step = None if session is None else session.model.train_step
        if type(self.optimizer_loop) is OptimizerLoop and isgeneratorfunction(step):
            self._replaced, self.optimizer_loop = self.optimizer_loop, YieldLoop()
        elif session is None and self._replaced is not None:
            self.optimizer_loop, self._replaced = self._replaced, None

    def _guarded_advance(self) -> Callable[..., None]:
        """Return ``advance``; one of the user's must prepare the batch that it trains on."""
        advance, session = super()._guarded_advance(), self._session
        maps = "process_training_batch" in session.hooks.active or not session.leaves_batches
        if not maps or not self._has_own_advance:
            return advance

        def checked(*args: Any) -> None:
            advance(*args)
            turn = session.state.global_iteration, session.turns.replica
            # A loop may leave out a batch: then nothing has handed over gradients.
            has_trained = session.turns.has_collected or session.is_manual
            if has_trained and self._prepared_in != turn:
                raise UsageError(
                    f"{type(self).__name__} must call self.prepare(batch) once for each batch that "
                    "it trains on, got no call: it would neither be on the device nor mapped by "
                    "process_training_batch. Write batch = self.prepare(batch)."
                )

        return checked

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
        self._prepared_in = (session.state.global_iteration, session.turns.replica)
        try:
            if not session.leaves_batches:
                batch = session.model.batch_to_device(batch, Phase.TRAINING)
            if "process_training_batch" not in session.hooks.active:
                return batch
            return session.hooks.transform("process_training_batch", batch, session.state)
        except StopIteration as error:
            raise make_stray_stop(error) from error
