"""Reports, once, state that the turns of several replicas change and that they do not share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from helios.findings import Finding, FindingKind, Findings
from helios.state_graph.consistency import refuse_lazy_layers
from helios.state_graph.discovery import Discovery
from helios.state_graph.owner_states import Owners

_LOGGER = logging.getLogger(__name__)

STEP = "train_step"


@final
class ReplicaWatch:
    """Watches the turns of a start's first iteration, and of iterations at powers of two.

    The latter find changes that begin later, at little cost.

    Args:
        name: the name of the model's class, for messages.
        discovery: finds the model's state.
        owners: the attributes of all others.
        findings: receives what each replica changes in the model independently.
        gather: returns the values of all processes, in the order of ranks.
    """

    def __init__(
        self,
        name: str,
        discovery: Discovery,
        owners: Owners,
        *,
        findings: Findings,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._name = name
        self._discovery = discovery
        self._owners = owners
        self._findings = findings
        self._gather = gather
        self._has_reported = False
        self._found: set[tuple[str, str]] = set()
        self._is_manual = False

    def begin(self, iteration: int) -> TurnWatch | None:
        """Begin to watch the turn of a replica; returns ``None`` for an unwatched iteration."""
        if self._has_reported and iteration & (iteration - 1):
            return None
        refuse_lazy_layers(self._discovery)
        return TurnWatch(self._discovery, self._owners, self._note, reads_weights=iteration == 1)

    def _note(self, found: list[str], hook: str, *, is_manual: bool) -> None:
        self._found.update((hook, path) for path in found)
        self._is_manual |= is_manual

    def report(self, iteration: int) -> None:
        """Report once what the turns of an iteration have changed; the same on all processes."""
        if self._has_reported and iteration & (iteration - 1):
            return
        self._has_reported = True
        parts = self._gather(sorted(self._found))
        self._found.clear()
        known = {*self._findings.names(FindingKind.UNSHARED)}
        found = sorted({each for part in parts for each in part if each[1] not in known})
        self._findings.extend(Finding(FindingKind.UNSHARED, path) for _, path in found)
        # With manual steps and yields each replica has its own process in any case.
        if self._is_manual:
            return
        for hook in dict.fromkeys(hook for hook, _ in found):
            names = ", ".join(path for each, path in found if each == hook)
            self._findings.add(FindingKind.OBSTACLE, text=f"{hook} changes {names}")
            _LOGGER.warning(
                "%s changes %s. Each replica changes it independently, so its value depends on the "
                "number of processes, and the run must keep that number. Change it in a hook that "
                "runs once (on_training_batch_end), or make it a buffer of a network.",
                f"{self._name}.{hook}" if hook == STEP else hook,
                names,
            )


@final
class TurnWatch:
    """Watches what the turn of one replica changes besides gradients and buffers.

    Args:
        discovery: finds the model's state, before the turn.
        owners: the attributes of all others.
        note: receives the findings and the hook that made them.
        reads_weights: whether to notice writes to ``parameter.data`` too.
        sees_unsaved: whether to notice changes of what is declared as unsaved.
    """

    def __init__(
        self,
        discovery: Discovery,
        owners: Owners,
        note: Callable[..., None],
        *,
        reads_weights: bool,
        sees_unsaved: bool = False,
    ) -> None:
        self._note = note
        self._watch = discovery.watch(reads_weights=reads_weights, sees_unsaved=sees_unsaved)
        self._others = owners.watch(sees_unsaved=sees_unsaved)

    def conclude(self, hook: str = STEP, *, is_manual: bool = False) -> None:
        """Record what has changed since the last call, and who did it.

        Args:
            hook: what has run since then.
            is_manual: whether the step makes its updates itself, so that changed weights are
                intended.
        """
        found = list(self._watch.changed(counts_parameters=not is_manual))
        for name, watch in self._others:
            found += (f"{name}: {path}" for path in watch.changed())
        self._note(found, hook, is_manual=is_manual)
