"""Requests that wait for the next safe point, and how all processes agree on them.

A request may be made in any process and at any time. It takes effect at the next boundary, where
all processes agree on it.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, final

from helios.errors import UsageError
from helios.replicas.replicas import Replicas
from helios.run_state import Requests, RunState

if TYPE_CHECKING:
    from helios.checkpoint.checkpoint_writer import CheckpointWriter

# Events between the last backward of a window and its boundary in which a receiver may still
# request a skip, a checkpoint or the end, or change losses. Each of them may write a log.
_BEFORE_UPDATE = frozenset({"on_optimizer_step_start", "on_log"})
_BEHIND_BACKWARD = frozenset({"on_backward_end"})
_IN_UPDATE = _BEFORE_UPDATE | {"on_before_zero_grad", "on_optimizer_step_end"}
_AFTER_UPDATE = _IN_UPDATE | {
    "on_training_batch_end",
    "on_training_step_end",
    "should_training_stop",
}


class Agreement(ABC):
    """The requests of this process, and those that all processes know.

    Args:
        run: the run, which holds the requests.
        outside: returns why the run is to be interrupted, if the reason came from outside.
        writer: writes checkpoints, and may have failed; ``None`` outside fit.

    Attributes:
        keeps_losses: whether losses cannot change between the last backward of a window and the
            end of its last replica.
        frees_gradients: whether nothing reads the gradients of a single replica after its backward.
        has_own_loops: whether a loop is custom: it may update more often on one process than on
            another.
    """

    keeps_losses: bool = False
    frees_gradients: bool = False
    has_own_loops: bool = False

    def __init__(
        self, run: RunState, outside: Callable[[], str], writer: CheckpointWriter | None
    ) -> None:
        self._run = run
        self._outside = outside
        self._writer = writer

    def _look_around(self) -> bool:
        """Check for a request from outside; returns whether a save of this process has failed."""
        reason, asked = self._outside(), self._run.asked
        if reason:
            asked.interruption = asked.interruption or reason
        return self._writer is not None and self._writer.failure is not None

    def expect_late_requests(self) -> None:
        """Record that loops or an engine are custom: they may make requests anywhere."""

    def begin(self, asking: Set[str]) -> None:
        """Agree on what may be requested late; all processes call this before the first iteration.

        Args:
            asking: the events in which a receiver may make a request.
        """

    def check_open(self, call: str) -> None:
        """Check that a request is possible at this point.

        Args:
            call: name of the requesting call, for the error.

        Raises:
            UsageError: after the gradients of a window, in code that was not expected to make
                requests: it would take effect one boundary later than with one replica.
        """

    def announce(self, *, is_before_update: bool) -> Sequence[bool]:
        """Return the flags that this process sends before the gradients of a window.

        Args:
            is_before_update: whether an update follows, which may be skipped.
        """
        return ()

    def listen(self, flags: Sequence[bool]) -> None:
        """Receive the flags of all processes.

        Args:
            flags: for each flag of :meth:`announce`, whether any process raises it.
        """

    @abstractmethod
    def agree_on_skip(self) -> bool:
        """Return whether any process skips the current update."""

    @abstractmethod
    def settle(self, *, ends_window: bool = False) -> bool:
        """Exchange requests; all processes call this at the same place.

        Requests made later wait until the next call, in all processes.

        Args:
            ends_window: whether an accumulation window ends here: what was exchanged before its
                gradients is not exchanged again, unless a request may have been made since.

        Returns:
            Whether anything is requested.

        Raises:
            Exception: in all processes, the error of a save that has failed since the last call.
        """

    def remember(self) -> Requests:
        """Return a copy of what this process requests now."""
        return replace(self._run.asked)

    def take_back(self, remembered: Requests) -> None:
        """Withdraw requests made since :meth:`remember`."""
        vars(self._run.asked).update(vars(remembered))


@final
class LoneAgreement(Agreement):
    """One replica: a request takes effect at once."""

    def __init__(
        self, run: RunState, outside: Callable[[], str], writer: CheckpointWriter | None
    ) -> None:
        super().__init__(run, outside, writer)
        run.agreed = run.asked

    def agree_on_skip(self) -> bool:
        """Return whether this process, which is the only one, skips the current update."""
        run = self._run
        is_skipped, run.skip_reason = bool(run.skip_reason), ""
        return is_skipped

    def settle(self, *, ends_window: bool = False) -> bool:
        """Return whether this process, which is the only one, has requested anything."""
        agreed = self._run.agreed
        if self._look_around() and self._writer is not None:
            self._writer.raise_failure()
        return bool(agreed.stop_reason or agreed.interruption or agreed.is_checkpoint_wanted)


@final
class SharedAgreement(Agreement):
    """Several replicas: a request waits until all processes have agreed, even if there is only one.

    Args:
        run: as in the base class.
        outside: as in the base class.
        writer: as in the base class.
        replicas: the processes.
    """

    def __init__(
        self,
        run: RunState,
        outside: Callable[[], str],
        writer: CheckpointWriter | None,
        replicas: Replicas,
    ) -> None:
        super().__init__(run, outside, writer)
        self._replicas = replicas
        self._skips_late = self._asks_late = True
        self._is_doubted = False
        self._sends_skip = False
        self._skip: bool | None = None
        self._known: Sequence[bool] = ()
        self._thread: int | None = None

    def expect_late_requests(self) -> None:
        """Inform all processes with the next gradients, or when the run begins."""
        self._is_doubted = True

    def begin(self, asking: Set[str]) -> None:
        """Agree on what may be requested late in any process."""
        late = (_BEFORE_UPDATE, _IN_UPDATE, _AFTER_UPDATE, _BEHIND_BACKWARD)
        late_flags = (self._is_doubted or not asking.isdisjoint(events) for events in late)
        self._skips_late, changes_losses, self._asks_late, looks, self.has_own_loops = (
            self._replicas.agree(*late_flags, self.has_own_loops)
        )
        self._is_doubted = False
        self.keeps_losses, self.frees_gradients = not changes_losses, not looks

    def announce(self, *, is_before_update: bool) -> Sequence[bool]:
        """Return what is requested so far: a skip and, unless more may follow late, the rest."""
        self._sends_skip = is_before_update
        is_skipped = self._sends_skip and bool(self._run.pop_skip_reason())
        if self._asks_late:
            return (self._is_doubted, is_skipped)
        asked = self._ask()
        # Other threads may make requests: these take effect whenever they are noticed.
        self._thread = threading.get_ident()
        return (self._is_doubted, is_skipped, *asked)

    def listen(self, flags: Sequence[bool]) -> None:
        """Keep the flags for the update and the boundary; ask there again for custom loops."""
        is_doubted, is_skipped, *known = flags
        if known:
            self._known = [*map(operator.or_, self._known, known)] if self._known else known
        if self._sends_skip:
            self._skip = is_skipped
        if is_doubted:
            self._skips_late = self._asks_late = True
            self._is_doubted = self.keeps_losses = self.frees_gradients = False
            self._thread = None

    def check_open(self, call: str) -> None:
        """Refuse a request that the other processes would see one boundary later."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"{call} must be called in an event or a step of the model, but was called after "
                "the gradients in code that is not expected to make requests, such as the step of "
                "an optimizer or a scheduler, or a method marked @asks_nothing. Call it in "
                "on_optimizer_step_end, and remove the mark."
            )

    def _ask(self) -> tuple[bool, ...]:
        """Return the requests of this process; a requested checkpoint is cleared."""
        has_failed, asked = self._look_around(), self._run.asked
        is_wanted, asked.is_checkpoint_wanted = asked.is_checkpoint_wanted, False
        return is_wanted, bool(asked.stop_reason), bool(asked.interruption), has_failed

    def agree_on_skip(self) -> bool:
        """Return what was exchanged before the gradients; otherwise, ask now."""
        known, self._skip = self._skip, None
        if known is None or self._skips_late:
            (is_asked,) = self._replicas.agree(bool(self._run.pop_skip_reason()))
            return is_asked or bool(known)
        return known

    def settle(self, *, ends_window: bool = False) -> bool:
        """Merge the requests of all processes."""
        run = self._run
        known, self._known, self._thread = self._known, (), None
        if not known or self._asks_late or not ends_window:
            found = self._replicas.agree(*self._ask())
            known = [*map(operator.or_, known, found)] if known else found
        is_wanted, stops, interrupts, has_failed = known
        asked, agreed = run.asked, run.agreed
        agreed.is_checkpoint_wanted |= is_wanted
        if stops or interrupts:
            texts = self._replicas.gather_objects((asked.stop_reason, asked.interruption))
            stop, interruption = (next(filter(None, said), "") for said in zip(*texts, strict=True))
            asked.stop_reason = agreed.stop_reason = agreed.stop_reason or stop
            asked.interruption = agreed.interruption = agreed.interruption or interruption
        if has_failed and self._writer is not None:
            self._writer.raise_failure()
        return bool(agreed.stop_reason or agreed.interruption or agreed.is_checkpoint_wanted)
