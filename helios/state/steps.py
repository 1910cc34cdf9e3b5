"""Finds what a step changes separately in each replica, and what differs between processes.

Gradients and buffers are summed and exchanged. Any other change depends on the number of replicas
in a process: digests of all values are compared at the first step, and at powers of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.sharded_tensors import is_sharded
from helios.core.utils import version_of
from helios.errors import UsageError
from helios.findings import Finding, FindingKind, Findings
from helios.state.anchors import above, path_of
from helios.state.named import class_marks
from helios.state.networks import leaves_of, state_of
from helios.state.walk import PARTS
from helios.storage.content_hash import bit_sum
from helios.text import some_text

if TYPE_CHECKING:
    from helios.model.model import Model
    from helios.state.discovery import Discovery
    from helios.state.owners import Owners

# BatchNorm counts and averages in every forward, also in one whose loss is forgotten.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@final
class StepWatch:
    """Compares the content of an owner before and after a step.

    Args:
        look: returns what it holds now.
        reads_weights: whether to notice writes to ``parameter.data`` too, which reads all weights.
        classes: classes of the user, whose attributes count.
    """

    def __init__(
        self, look: Callable[[], Any], *, reads_weights: bool, classes: list[type]
    ) -> None:
        self._look, self._reads_weights, self._classes = look, reads_weights, classes
        self._before = self._take()

    def changed(self, *, counts_parameters: bool = True) -> list[str]:
        """Return the paths of values that changed since the last call, or since creation.

        Args:
            counts_parameters: whether to include parameters that were written to.
        """
        now = self._take()
        pairs = list(zip(self._before, now, strict=True))
        self._before = now
        found = {
            path
            for before, after in (pairs if counts_parameters else pairs[:1])
            for path in before | after
            if before.get(path) != after.get(path)
        }
        # The path of an attribute is more precise than that of its object.
        return sorted(found - {holder for path in found for holder in above(path)})

    def _take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return marks of values, and of what updates move, by path."""
        look = self._look()
        anchors, walk = look.anchors, look.walk
        marks: dict[str, Any] = dict(class_marks(self._classes, look))
        moved: dict[str, Any] = {
            name: mark_of_tensor(part, reads_bits=self._reads_weights)
            for name, part in leaves_of(anchors).items()
        }
        for path, part in look.objects.items():
            # The state of an optimizer results from its updates.
            if not isinstance(part, nn.Module | Optimizer):
                table = moved if isinstance(part, LRScheduler) else marks
                table[path] = look.mark(_try_state(part))
        for name, table in look.digests().items():
            holder = walk.holders[name]
            buffers = vars(holder).get("_buffers", ()) if isinstance(holder, nn.Module) else ()
            target = moved if isinstance(holder, Optimizer | LRScheduler) else marks
            for key, (digest, _) in table.items():
                # A replica has buffers of its own.
                if key not in buffers and key != PARTS:
                    target[path_of(name, key)] = digest
                elif key == PARTS:
                    target[name or PARTS] = repr(walk.codes[name][PARTS][:2])
        for name, (part, _) in walk.opaque.items():
            # The position of an iterator is unknown: it would differ at every comparison.
            if not isinstance(part, Iterator):
                marks[name] = look.mark(part)
        return marks, moved


def _try_state(part: Any) -> dict[str, Any]:
    try:
        return state_of(part)
    except Exception:  # user code, which may need a first step
        return {}


def mark_of_tensor(parameter: Tensor, *, reads_bits: bool) -> bytes:
    """Return a mark that differs after a write; writes to ``.data`` do not change the version."""
    is_dense = parameter.layout is torch.strided
    return b"%d %d %d" % (
        version_of(parameter),
        parameter.data_ptr() if is_dense else 0,
        int(bit_sum(parameter)) if reads_bits and is_dense else 0,
    )


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
    first, *others = gather((orders, {**(marks or {}), **_marks_of(discovery, loose)}))
    for rank, found in enumerate(others, 1):
        _compare_orders(rank, found[0], first[0])
        names = [
            name
            for name in first[1] | found[1]
            if first[1].get(name) != found[1].get(name) and name not in ignored
        ]
        if names:
            raise UsageError(
                f"All processes must have the same weights, but {some_text(names, 3)} "
                f"of rank {rank} differ from rank 0's. Load weights on every rank, do the same in "
                "hooks on all ranks, and in manual steps wrap networks with engine.wrap(...)."
            )


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


def _marks_of(discovery: Discovery, loose: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return marks by name that differ if the numbers differ."""
    tensors = dict(loose)
    for path, network in discovery.modules().items():
        for name, part in (*network.named_parameters(), *network.named_buffers()):
            tensors[f"{path}.{name}"] = part
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
    """Watches the steps of a start's first iteration, and of iterations at powers of two.

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
        self._watches: list[tuple[str, StepWatch]] = []

    def is_due(self, iteration: int) -> bool:
        """Return whether the steps of an iteration are watched."""
        return not (self._has_reported and iteration & (iteration - 1))

    def begin(self, iteration: int) -> ReplicaWatch:
        """Begin to watch the step of a replica."""
        refuse_lazy_layers(self._discovery)
        model = self._discovery.watch(reads_weights=iteration == 1)
        self._watches = [("", model), *self._owners.watch()]
        return self

    def conclude(self, hook: str = STEP, *, is_manual: bool = False) -> None:
        """Record the changes since the last call, and their cause.

        Args:
            hook: what has run since then.
            is_manual: whether the step makes its updates itself, so that changed weights are
                intended.
        """
        self._is_manual |= is_manual
        for name, watch in self._watches:
            found = watch.changed(counts_parameters=bool(name) or not is_manual)
            self._found.update((hook, f"{name}: {path}" if name else path) for path in found)

    def report(self) -> None:
        """Report once what the steps of an iteration have changed; the same on all processes."""
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
class IdleWatch:
    """Detects that the steps of a new run learn nothing, as with a forgotten ``return loss``.

    A step that returns ``None`` may collect data, or update tables as k-means and EM do, so all
    state is compared with that before the first step.

    Args:
        model: the model.
        owners: the attributes of all others.
        gather: returns the values of all processes, in the order of ranks.
    """

    def __init__(self, model: Model, owners: Owners, gather: Callable[[Any], list[Any]]) -> None:
        self._model = model
        self._owners = owners
        self._gather = gather
        self._watches: list[StepWatch] = []
        self._buffers: dict[str, bytes] = {}

    def begin(self) -> None:
        """Begin to watch before the first step of a new run, if anything can be watched."""
        processor = self._model.batch_processor
        if processor is not None and not processor.need_backward:
            return
        discovery = self._model.discovery
        networks = discovery.modules().values()
        tensors = [each for net in networks for each in (*net.parameters(), *net.buffers())]
        # Lazy ones get their values in the first step; sharded ones need a loss that is returned.
        if any(is_lazy(each) or is_sharded(each) for each in tensors):
            return
        others = self._owners.watch(sees_unsaved=True, sees_data=True)
        self._watches = [discovery.watch(sees_unsaved=True), *(watch for _, watch in others)]
        self._buffers = self._mark_buffers()

    def conclude(self, iteration: int, *, is_manual: bool | None) -> None:
        """Refuse a run that has learned nothing so far, and stop watching.

        Args:
            iteration: the number of its iterations.
            is_manual: whether its steps return no loss; ``None`` before the first one.

        Raises:
            UsageError: in all processes, if nothing has changed in any of them.
        """
        watches, self._watches = self._watches, []
        if not watches or is_manual is False:
            return
        found = [path for watch in watches for path in watch.changed()]
        marks = self._mark_buffers()
        found += [name for name in marks if marks[name] != self._buffers.get(name)]
        for network in self._model.discovery.modules().values():
            found += [name for name, each in network.named_parameters() if each.grad is not None]
        changed = [path for paths in self._gather(found) for path in paths]
        if all(path.endswith(_STATISTICS) for path in changed):
            raise UsageError(
                f"{type(self._model).__name__}.train_step has returned None in all {iteration} "
                "batches, and nothing was learned: no optimizer has stepped, and no parameter has "
                "a gradient or has changed. Did you forget `return loss`? If it collects data, "
                "keep it in an attribute of the model, which is saved."
            )

    def _mark_buffers(self) -> dict[str, bytes]:
        return {
            f"{path}.{name}": mark_of_tensor(buffer, reads_bits=True)
            for path, network in self._model.discovery.modules().items()
            for name, buffer in network.named_buffers()
        }
