"""Reports, once, state that steps of several replicas change and that replicas do not share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from helios.run_state.consistency import refuse_lazy_layers
from helios.run_state.discovery import Discovery
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


class _Model(Protocol):
    @property
    def discovery(self) -> Discovery: ...


class _Watch(Protocol):
    def changed(self) -> list[str]: ...


class _Others(Protocol):
    def watch(self, *, sees_unsaved: bool = False) -> Sequence[tuple[str, _Watch]]: ...


class WatchedRun(Protocol):
    """The run to watch, which also receives the findings.

    Attributes:
        state: the counters.
        unshared: paths of what each replica changes in the model independently.
    """

    state: TrainingState
    unshared: list[str]

    @property
    def model(self) -> _Model: ...
    @property
    def owner_states(self) -> _Others: ...
    def add_obstacle(self, text: str) -> bool: ...


@final
class ReplicaWatch:
    """Watches the steps of a start's first iteration, and of iterations at powers of two.

    The latter find changes that begin later, at little cost.

    Args:
        run: the run.
        gather: returns the values of all processes, in the order of ranks.
    """

    def __init__(self, run: WatchedRun, gather: Callable[[Any], list[Any]]) -> None:
        self._run = run
        self._gather = gather
        self._has_reported = False
        self._found: set[str] = set()
        self._is_manual = False

    def begin(self) -> TurnWatch | None:
        """Begin to watch the step of a replica, or return ``None`` for an unwatched iteration."""
        number = self._run.state.global_iteration
        if self._has_reported and number & (number - 1):
            return None
        refuse_lazy_layers(self._run.model.discovery)
        return TurnWatch(self._run, self._note, reads_weights=number == 1)

    def _note(self, found: list[str], *, is_manual: bool) -> None:
        self._found.update(found)
        self._is_manual |= is_manual

    def report(self) -> None:
        """Report once what the steps of this iteration have changed; the same on all processes."""
        number = self._run.state.global_iteration
        if self._has_reported and number & (number - 1):
            return
        self._has_reported = True
        run = self._run
        parts = self._gather(sorted(self._found))
        self._found.clear()
        names = sorted({name for part in parts for name in part} - set(run.unshared))
        run.unshared = sorted({*run.unshared, *names})
        # With manual steps and yields each replica has its own process in any case.
        if not names or self._is_manual:
            return
        run.add_obstacle(f"train_step changes {', '.join(names)}")
        _LOGGER.warning(
            "%s.train_step changes %s. Each replica changes it independently, so its value depends "
            "on the number of processes, and the run must keep that number. Change it in a hook "
            "(on_training_batch_end), or make it a buffer of a network.",
            type(run.model).__name__,
            ", ".join(names),
        )


@final
class TurnWatch:
    """Watches what the step of one replica changes besides gradients and buffers.

    Args:
        run: the run, before the step.
        note: receives the findings.
        reads_weights: whether to notice writes to ``parameter.data`` too.
        sees_unsaved: whether to notice changes of what is declared as unsaved.
    """

    def __init__(
        self,
        run: WatchedRun,
        note: Callable[..., None],
        *,
        reads_weights: bool,
        sees_unsaved: bool = False,
    ) -> None:
        self._note = note
        self._watch = run.model.discovery.watch(
            reads_weights=reads_weights, sees_unsaved=sees_unsaved
        )
        self._others = run.owner_states.watch(sees_unsaved=sees_unsaved)

    def conclude(self, *, is_manual: bool) -> None:
        """Record what has changed.

        Args:
            is_manual: whether the step makes its updates itself, so that changed weights are
                intended.
        """
        found = list(self._watch.changed(counts_parameters=not is_manual))
        for name, watch in self._others:
            found += (f"{name}: {path}" for path in watch.changed())
        self._note(found, is_manual=is_manual)
