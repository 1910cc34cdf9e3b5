"""What was asked for and waits for the next safe point, and how all processes come to know of it.

A request may be made in any process and at any moment; it counts from the boundary on at which all
processes have agreed on it (DESIGN R4).
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import final

from helios.errors import UsageError
from helios.replicas.replicas import Replicas


@dataclass
class Requests:
    """What was asked for and waits for the next safe point (DESIGN R4)."""

    is_checkpoint_wanted: bool = False
    stop_reason: str = ""
    interruption: str = ""


# What comes between the last backward of a window and its boundary, where somebody may still ask
# for a skip, change losses, or ask for a checkpoint or the end. Any of it may write a log.
_BEFORE_UPDATE = frozenset({"on_optimizer_step_start", "on_log"})
_BEHIND_BACKWARD = frozenset({"on_backward_end"})
_IN_UPDATE = _BEFORE_UPDATE | {"on_before_zero_grad", "on_optimizer_step_end"}
_AFTER_UPDATE = _IN_UPDATE | {
    "on_training_batch_end",
    "on_training_step_end",
    "should_training_stop",
}


class Agreement(ABC):
    """What this process asks for, and what all of them know.

    Args:
        look: asks for what comes from outside; returns whether this process has an error that all
            must hear of.
        take_skip: returns why this process leaves out the present update; empty if it does not.

    Attributes:
        asked: the requests of this process.
        agreed: those that all processes know of.
        keeps_losses: whether nobody changes the losses between the last backward of a window and
            the end of its turns.
        frees_gradients: whether nobody looks at the gradients of one replica behind its backward.
    """

    asked: Requests
    agreed: Requests
    keeps_losses: bool = False
    frees_gradients: bool = False

    def __init__(self, look: Callable[[], bool], take_skip: Callable[[], str]) -> None:
        self._look = look
        self._take_skip = take_skip

    def doubt(self) -> None:
        """Note that loops or an engine are not Helios' own: they may ask at any place."""

    def begin(self, asking: Set[str]) -> None:
        """Learn what may be asked late; all processes call it, before the first iteration.

        Args:
            asking: the events in which somebody may ask for something.
        """

    def check_open(self, call: str) -> None:
        """Check that something may be asked for here.

        Args:
            call: how the error calls what asks.

        Raises:
            UsageError: behind the gradients of a window, where nobody was thought to ask: it would
                count one boundary later than on one replica.
        """

    def announce(self, *, is_before_update: bool) -> Sequence[bool]:
        """Return what this process tells all others in front of the gradients of a window.

        Args:
            is_before_update: whether an update follows, which may be left out.
        """
        return ()

    def listen(self, flags: Sequence[bool]) -> None:
        """Take what any process has told.

        Args:
            flags: for each of :meth:`announce` whether any process raises it.
        """

    def agree_on_skip(self) -> bool:
        """Return whether any process leaves out the present update."""
        return bool(self._take_skip())

    @abstractmethod
    def settle(self, *, ends_window: bool = False) -> bool:
        """Add what any process has asked for; all processes call it at one place.

        Args:
            ends_window: whether a window ends here: what all were told in front of its gradients
                is not asked again, unless somebody could ask for something since.

        Returns:
            Whether any process has an error that all must hear of.
        """

    def remember(self) -> Requests:
        """Return a copy of what this process asks for now."""
        return replace(self.asked)

    def take_back(self, remembered: Requests) -> None:
        """Withdraw what was asked for since :meth:`remember`."""
        vars(self.asked).update(vars(remembered))


@final
class LoneAgreement(Agreement):
    """One replica: a request counts at once."""

    def __init__(self, look: Callable[[], bool], take_skip: Callable[[], str]) -> None:
        super().__init__(look, take_skip)
        self.asked = self.agreed = Requests()

    def settle(self, *, ends_window: bool = False) -> bool:
        """Return the error of this process, which is the only one."""
        return self._look()


@final
class SharedAgreement(Agreement):
    """Several replicas: a request waits until all processes have agreed, also where there is one.

    Args:
        look: as in the base.
        take_skip: as in the base.
        replicas: the processes.
    """

    def __init__(
        self, look: Callable[[], bool], take_skip: Callable[[], str], replicas: Replicas
    ) -> None:
        super().__init__(look, take_skip)
        self.asked, self.agreed = Requests(), Requests()
        self._replicas = replicas
        self._skips_late = self._asks_late = True
        self._is_doubted = False
        self._tells_skip = False
        self._skip: bool | None = None
        self._told: Sequence[bool] = ()
        self._thread: int | None = None

    def doubt(self) -> None:
        """Let all processes know with the next gradients, or when the run begins."""
        self._is_doubted = True

    def begin(self, asking: Set[str]) -> None:
        """Agree on what may be asked late in any process."""
        late = (_BEFORE_UPDATE, _IN_UPDATE, _AFTER_UPDATE, _BEHIND_BACKWARD)
        self._skips_late, changes_losses, self._asks_late, looks = self._replicas.agree(
            *(self._is_doubted or not asking.isdisjoint(events) for events in late)
        )
        self._is_doubted = False
        self.keeps_losses, self.frees_gradients = not changes_losses, not looks

    def announce(self, *, is_before_update: bool) -> Sequence[bool]:
        """Return what cannot be asked for any more: a skip, and at the boundary all the rest."""
        self._tells_skip = is_before_update
        is_skipped = self._tells_skip and bool(self._take_skip())
        if self._asks_late:
            return (self._is_doubted, is_skipped)
        asked = self._ask()
        # Others may ask in threads of their own: that counts whenever it is heard.
        self._thread = threading.get_ident()
        return (self._is_doubted, is_skipped, *asked)

    def listen(self, flags: Sequence[bool]) -> None:
        """Keep it for the update and for the boundary; ask there again where loops are new."""
        is_doubted, is_skipped, *told = flags
        if told:
            self._told = [*map(operator.or_, self._told, told)] if self._told else told
        if self._tells_skip:
            self._skip = is_skipped
        if is_doubted:
            self._skips_late = self._asks_late = True
            self._is_doubted = self.keeps_losses = self.frees_gradients = False
            self._thread = None

    def check_open(self, call: str) -> None:
        """Refuse what the other processes would hear of one boundary later."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"{call} must be called in an event or a step of the model, but was called behind "
                "the gradients in code that nobody expects to ask: in the step of an optimizer or "
                "a scheduler, say, or in a method that is marked @asks_nothing. Call it in "
                "on_optimizer_step_end, and take the mark away."
            )

    def _ask(self) -> tuple[bool, ...]:
        """Return what this process asks for; a wish for a checkpoint is taken from it."""
        is_alarm, asked = self._look(), self.asked
        is_wanted, asked.is_checkpoint_wanted = asked.is_checkpoint_wanted, False
        return is_wanted, bool(asked.stop_reason), bool(asked.interruption), is_alarm

    def agree_on_skip(self) -> bool:
        """Return what all know from in front of the gradients; else ask."""
        known, self._skip = self._skip, None
        if known is None or self._skips_late:
            (is_asked,) = self._replicas.agree(bool(self._take_skip()))
            return is_asked or bool(known)
        return known

    def settle(self, *, ends_window: bool = False) -> bool:
        """Add what any process has asked for."""
        told, self._told, self._thread = self._told, (), None
        if not told or self._asks_late or not ends_window:
            found = self._replicas.agree(*self._ask())
            told = [*map(operator.or_, told, found)] if told else found
        is_wanted, stops, interrupts, is_alarm = told
        asked, agreed = self.asked, self.agreed
        agreed.is_checkpoint_wanted |= is_wanted
        if stops or interrupts:
            texts = self._replicas.gather_objects((asked.stop_reason, asked.interruption))
            stop, interruption = (next(filter(None, said), "") for said in zip(*texts, strict=True))
            asked.stop_reason = agreed.stop_reason = agreed.stop_reason or stop
            asked.interruption = agreed.interruption = agreed.interruption or interruption
        return is_alarm


def make_agreement(
    replicas: Replicas, look: Callable[[], bool], take_skip: Callable[[], str]
) -> Agreement:
    """Return how the processes of a run agree; chosen once, at its start.

    Args:
        replicas: the replicas of the run.
        look: as in :class:`Agreement`.
        take_skip: as in :class:`Agreement`.
    """
    if replicas.is_lone:
        return LoneAgreement(look, take_skip)
    return SharedAgreement(look, take_skip, replicas)
