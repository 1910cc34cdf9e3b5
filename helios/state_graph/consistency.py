"""Checks what would diverge unnoticed: weights of processes, and what turns of replicas change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import chain, zip_longest
from typing import Any, final

from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.findings import Finding, FindingKind, Findings
from helios.state_graph.discovery import Discovery
from helios.state_graph.owner_states import Owners
from helios.storage.checksums import bit_sum


def check_alike(
    discovery: Discovery,
    gather: Callable[[Any], list[Any]],
    *,
    ignored: Collection[str] = (),
    marks: Mapping[str, Any] | None = None,
) -> None:
    """Check that weights, buffers, learning rates and orders are the same on all processes.

    Gradients are added by the position of their parameter in its optimizer.

    Args:
        discovery: finds the networks, loose parameters and optimizers of the model.
        gather: returns the values of all processes, in the order of ranks.
        ignored: paths that are known to differ.
        marks: of tensors that are sharded by now, by name, from when they were whole.

    Raises:
        UsageError: on all processes, if something differs, or if a network has lazy layers.
    """
    refuse_lazy_layers(discovery)
    loose, members = discovery.moved()
    orders = {path: list(chain.from_iterable(groups)) for path, groups in members.items()}
    own = {**(marks or {}), **_marks_of(discovery, loose)}
    gathered = gather((orders, own))
    first, *others = gathered
    for rank, found in enumerate(others, 1):
        _compare_orders(rank, found[0], first[0])
        _compare_marks(rank, found[1], first[1], ignored)


def find_lazy(discovery: Discovery) -> list[str]:
    """Return the paths of networks with lazy layers, which draw their weights in the first step."""
    return [
        path
        for path, network in discovery.modules().items()
        if any(map(is_lazy, (*network.parameters(), *network.buffers())))
    ]


def refuse_lazy_layers(discovery: Discovery) -> None:
    """Refuse lazy layers, whose initial weights would differ between processes.

    Raises:
        UsageError: for the first network that has any.
    """
    for path in find_lazy(discovery):
        raise UsageError(
            f"The network {path!r} has lazy layers, which draw their weights in the first step: "
            "with several replicas these would differ between processes. Run a batch through it "
            "in Model.setup()."
        )


def _compare_orders(
    rank: int, found: Mapping[str, list[str]], first: Mapping[str, list[str]]
) -> None:
    for path in [path for path in first if path in found]:
        for here, there in zip_longest(found[path], first[path], fillvalue="nothing"):
            if here != there:
                raise UsageError(
                    f"All processes must pass parameters to {path} in the same order, but rank "
                    f"{rank} has {here} where rank 0 has {there}. Build optimizers in setup() in "
                    "a fixed order: sort what comes from a set, whose order differs between "
                    "processes."
                )


def _compare_marks(
    rank: int, found: dict[str, Any], first: dict[str, Any], ignored: Collection[str]
) -> None:
    names = [
        name for name in first | found if first.get(name) != found.get(name) and name not in ignored
    ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(
            f"All processes must have the same weights, but {', '.join(names[:3])}{more} "
            f"of rank {rank} differ from rank 0's. Load weights on every rank, do the same in "
            "hooks on all ranks, and in manual steps wrap networks with engine.wrap(...)."
        )


def _marks_of(discovery: Discovery, loose: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return marks by name that differ if the numbers differ."""
    tensors = dict(loose)
    for path, network in discovery.modules().items():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            tensors[f"{path}.{name}"] = tensor
    # Processes have different shards; they were compared before they were cut.
    sums = {name: bit_sum(part) for name, part in tensors.items() if not is_sharded(part)}
    marks: dict[str, Any] = {name: int(total) for name, total in sums.items()}
    for path, optimizer in discovery.optimizers().items():
        for number, group in enumerate(optimizer.param_groups):
            marks[f"the learning rate of {path}, group {number},"] = float(group.get("lr", 0.0))
    return marks


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
                "number of processes, and the run must keep that number. Change it in "
                "on_training_batch_end, which runs once: what a step puts into self._loss_items is "
                "the mean over replicas there. Draw random numbers from the default generators. To "
                "divide gradients by a count, such as tokens, return a helios.WeightedLoss.",
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
