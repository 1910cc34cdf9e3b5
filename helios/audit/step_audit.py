"""``StepAudit``: computes a gradient a second time in some steps, and compares it on bytes.

All processes take part at one place: after the last backward of the audited iteration, before its
gradients are summed. The first computation is never changed, and training continues with it.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from types import GeneratorType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from helios.audit.gradient_copies import GradientCopy, GradientMismatch
from helios.core.utils import parameters_of
from helios.distributed import pickling
from helios.distributed.process_groups import count_collectives
from helios.errors import AuditError
from helios.findings import FindingKind
from helios.loops.repeated_steps import (
    StepInputs,
    StepTrace,
    leaves_of,
    read_generators,
    set_generators,
)
from helios.loops.step import begin_forward, loss_of, take_step
from helios.replicas.reduction_tree import blocks
from helios.session import Session
from helios.state import TrainingState
from helios.state_graph.consistency import TurnWatch, find_lazy
from helios.state_graph.rollback import Rollback

_LOGGER = logging.getLogger(__name__)
_MAX_KEPT = 10
_BETWEEN = frozenset({"on_forward_end", "on_backward_start"})
"""Events between a step and its backward."""


@final
class StepAudit:
    """Audits every n-th optimizer step of a run.

    Args:
        session: the run.
        every: n.
        is_strict: whether a mismatch raises an error.
    """

    def __init__(self, session: Session, *, every: int, is_strict: bool) -> None:
        self._session = session
        self._every = every
        self._is_strict = is_strict
        self._is_due = False
        self._is_off = False
        self._keeps_attributes = False
        self._said: set[str] = set()
        self._rotation = AuditTurn(0, 0, 0, 0, None)
        self._own: WatchedTurn | None = None
        self._parcel: Parcel | None = None

    def if_due(self) -> StepAudit | None:
        """Return this object in an audited iteration, else ``None``; on all processes alike."""
        if self._session.turns.is_first:
            self._is_due = self._begin_iteration()
        return self if self._is_due else None

    def _begin_iteration(self) -> bool:
        session = self._session
        number, rest = divmod(session.state.global_step + 1, self._every)
        if rest or self._is_off or session.is_manual:
            return False
        replicas = session.replicas
        turn = self._rotation = find_turn(
            number - 1,
            num_replicas=replicas.num_replicas,
            num_processes=replicas.num_processes,
            accumulation_steps=session.schedule.accumulation_steps,
        )
        self._own = None
        place = session.engine._open_micro_batches
        # The window may end early, at the end of an epoch.
        is_last = session.state.is_step_boundary and place < turn.micro_batch
        return place == turn.micro_batch or is_last

    def take_step(self, session: Session, step: str, batch: Any, state: TrainingState) -> Any:
        """Run the step of a replica in an audited iteration, as :func:`take_step` does."""
        turn = self._rotation
        batch = begin_forward(session, batch)
        is_owner = session.replicas.rank == turn.owner
        is_audited = is_owner and session.turns.replica == turn.replica
        # Any other process watches one of its turns: plugins may differ between processes.
        if not is_audited and (is_owner or not session.turns.is_last):
            return take_step(session, step, batch, state, has_begun=True)
        self._own = own = WatchedTurn(reason=self._find_hindrance())
        if is_audited and not own.reason:
            self._keep(own, batch)
        self._begin_watch(own)
        result = take_step(session, step, batch, state, has_begun=True)
        if not _BETWEEN.isdisjoint(session.hooks.active):
            # What hooks change there is not repeated.
            self._end_watch(own)
        own.version, own.num_writes = _version_of(result), self._count_writes()
        return result

    def _find_hindrance(self) -> str:
        session = self._session
        if lazy := find_lazy(session.model.discovery):
            return f"the network {lazy[0]!r} has lazy layers, which draw their weights in this step"
        names = [name for name, x in vars(session.model).items() if isinstance(x, Iterator)]
        return f"the position of the iterator {names[0]!r} cannot be put back" if names else ""

    def _keep(self, own: WatchedTurn, batch: Any) -> None:
        session = self._session
        try:
            own.inputs = StepInputs.copy(session, batch)
        except Exception as error:  # objects of the user, of any kind
            own.reason = f"the batch cannot be pickled ({error!r})"
            return
        own.old = {
            name: parameter.grad.clone()
            for name, parameter in self._parameters().items()
            if parameter.grad is not None
        }
        if self._keeps_attributes:
            own.before = self._take_snapshot()

    def _take_snapshot(self) -> Rollback:
        session = self._session
        return Rollback([session.model, session.engine, *session.plugins.values()])

    def _begin_watch(self, own: WatchedTurn) -> None:
        """Watch what is changed besides gradients and buffers, and whether it communicates."""
        if not own.reason and own.watch is None:
            own.watch, own.num_collectives = self._watch(own.changed), count_collectives()

    def _end_watch(self, own: WatchedTurn) -> None:
        if own.watch is not None:
            own.watch.conclude(is_manual=False)
            own.watch = None
            if count_collectives() != own.num_collectives:
                own.reason = "the step communicates with other processes"

    def _watch(self, changed: set[str]) -> TurnWatch:
        return TurnWatch(
            self._session.model.discovery,
            self._session.owner_states,
            lambda found, *_, **__: changed.update(found),
            reads_weights=True,
            sees_unsaved=True,
        )

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None) -> None:
        """Do backward of a replica in an audited iteration; keeps the gradients of the audited one.

        Args:
            loss: the loss.
            inputs: as for :meth:`Engine.backward_loss`.
        """
        session, own = self._session, self._own
        if own is None or own.reason or not self._is_own_turn:
            session.engine.backward_loss(loss, inputs)
            return
        if loss._version != own.version:  # noqa: SLF001 - torch has no public counter
            own.reason = "a hook changes the loss in place"
        if own.inputs:
            own.generators = read_generators(session.model, session.engine.device)
        self._begin_watch(own)
        session.engine.backward_loss(loss, inputs)
        self._end_watch(own)
        if own.inputs:
            own.gradients = GradientCopy.take(self._parameters())

    @property
    def _is_own_turn(self) -> bool:
        turns, turn = self._session.turns, self._rotation
        is_owner = self._session.replicas.rank == turn.owner
        return turns.replica == turn.replica if is_owner else turns.is_last

    def _parameters(self) -> dict[str, Tensor]:
        """Return all trained parameters by name, the same on all processes."""
        networks = self._session.model.discovery.modules().items()
        found: dict[int, tuple[str, Tensor]] = {
            id(parameter): (f"{path}.{name}", parameter)
            for path, network in networks
            for name, parameter in network.named_parameters()
        }
        for path, optimizer in self._session.model.discovery.optimizers().items():
            for place, parameter in enumerate(parameters_of(optimizer)):
                found.setdefault(id(parameter), (f"parameter {place} of {path}", parameter))
        return {name: parameter for name, parameter in found.values() if parameter.requires_grad}

    def end_backward(self) -> None:
        """Compute a gradient again; all processes do after their last backward of the iteration.

        Raises:
            AuditError: in all processes, if it differs and the audit is strict.
        """
        if not self._session.turns.is_last:
            return
        own, self._own = self._own, None
        assert own is not None, "each process watches one of its turns"
        notes = self._session.replicas.gather_objects(self._note_of(own))
        turn = self._settle(notes)
        if turn is not None:
            self._audit(turn, own, notes)
        self._parcel = None

    def _count_writes(self) -> int:
        counts = (parameter._version for parameter in self._parameters().values())  # noqa: SLF001
        return sum(counts)

    def _note_of(self, own: WatchedTurn) -> TurnNote:
        session = self._session
        if self._count_writes() != own.num_writes:
            own.reason = own.reason or "a hook changes the weights before the update"
        if own.inputs and not own.reason and not session.replicas.has_single_process:
            self._parcel = own.pack()
        sizes = tuple(part.numel() for part in self._parcel or ())
        is_kept, device = own.before is not None, str(session.engine.device)
        return TurnNote(sorted(own.changed), own.reason, is_kept, sizes, platform.node(), device)

    def _settle(self, notes: list[TurnNote]) -> AuditTurn | None:
        """Return who audits whom; ``None`` if this step cannot be audited, which is said once."""
        turn = self._rotation
        for note in notes:
            if note.reason:
                self._say(f"is not audited: {note.reason}")
                return None
        changed = sorted({name for note in notes for name in note.changed})
        if not changed:
            return turn
        if notes[turn.owner].is_kept:
            # Attributes may differ between processes, so no other one can do it.
            return replace(turn, auditor=turn.owner, third=None)
        self._keeps_attributes = True
        self._say(
            f"changes {', '.join(changed)}. From now on each gradient is computed again by its "
            "own process only, and model and plugins are copied to put that back. Change it in a "
            "hook, so that other processes can do it"
        )
        return None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            name = type(self._session.model).__name__
            _LOGGER.warning("Audit: %s.train_step %s.", name, text)

    def _audit(self, turn: AuditTurn, own: WatchedTurn, notes: list[TurnNote]) -> None:
        replicas = self._session.replicas
        finding = self._repeat_on(turn.auditor, turn, own, notes)
        found: RepeatedTurn = replicas.gather_objects(finding)[turn.auditor]
        if found.left:
            self._is_off = True
            self._say(
                f"has changed {', '.join(found.left)} when it was computed a second time, which "
                "cannot be put back. No further step is audited"
            )
        if found.difference is None:
            return
        finding, third, first = None, None, ""
        if turn.third is not None:
            finding = self._repeat_on(turn.third, turn, own, notes)
        if replicas.rank == turn.owner:
            first = own.gradients.digest()
        answers = replicas.gather_objects((finding, first))
        first = answers[turn.owner][1]
        if turn.third is not None:
            third = answers[turn.third][0].digest or first
        places = [note.place for note in notes]
        text = describe_mismatch(
            found.difference,
            turn,
            iteration=self._session.state.global_iteration,
            step=self._session.state.global_step + 1,
            places=places,
            verdict=describe_verdict(turn, (first, found.digest), third, places),
        )
        ranks = (turn.owner, turn.auditor, turn.third)
        self._report(text, [notes[rank].host for rank in ranks if rank is not None])

    def _report(self, text: str, hosts: Sequence[str]) -> None:
        if len(self._session.findings.names(FindingKind.MISMATCH)) < _MAX_KEPT:
            self._session.add_mismatch(text, hosts)
        if self._is_strict:
            raise AuditError(
                f"{text} Check the hardware that is named. If the arithmetic is not deterministic "
                "there, pass Trainer(enable_deterministic=True). If train_step changes a variable "
                "outside of the model and depends on it, move the variable into the model. "
                'To continue after a mismatch, pass Audit(on_mismatch="warn").'
            )
        _LOGGER.warning("Audit: %s Training continues with the first gradient.", text)

    def _repeat_on(
        self,
        rank: int,
        turn: AuditTurn,
        own: WatchedTurn,
        notes: list[TurnNote],
    ) -> RepeatedTurn | None:
        """Compute the gradient again on one rank, which gets what it needs from the owner."""
        replicas = self._session.replicas
        if rank != turn.owner and replicas.rank in (rank, turn.owner):
            head, gradients = self._parcel or map(_make_room, notes[turn.owner].sizes)
            replicas.hand_over(head, turn.owner, rank)
            replicas.hand_over(gradients, turn.owner, rank)
            if replicas.rank == rank:
                own = WatchedTurn.unpack((head, gradients), self._session.engine.device)
        return self._repeat(own) if replicas.rank == rank else None

    def _repeat(self, own: WatchedTurn) -> RepeatedTurn:
        """Compute a gradient again and compare it, without a trace."""
        session = self._session
        parameters = self._parameters()
        trace = StepTrace(session, parameters.values())
        left = set[str]()
        watch = self._watch(left)
        after = None if own.before is None else self._take_snapshot()
        with trace.erased():
            if own.before is not None:
                own.before.put_back()
            for name, parameter in parameters.items():
                parameter.grad = own.old.get(name)
            StepInputs.read(own.inputs, session.engine.device).put(session)
            loss = self._forward(session.batch)
            trace.hold_gradients(leaves_of(loss))
            set_generators(session.model, own.generators)
            session.engine.backward_loss(loss, None)
            second = GradientCopy.take(parameters)
        if after is not None:
            after.put_back()
        watch.conclude(is_manual=False)
        return RepeatedTurn.of(own.gradients, second, sorted(left))

    def _forward(self, batch: Any) -> Tensor:
        session = self._session
        loss = loss_of(take_step(session, "train_step", batch, session.state, has_begun=True))
        assert loss is not None, "a step is automatic or manual, never both"
        return loss


@dataclass(frozen=True)
class AuditTurn:
    """What is audited in one step.

    Attributes:
        replica: the replica whose gradient is computed again.
        micro_batch: its micro-batch in the accumulation window, from 0.
        owner: the rank that trains the replica.
        auditor: the rank that computes the gradient again; the owner if there is one process.
        third: the rank that decides if the two differ; ``None`` with fewer than three processes.
    """

    replica: int
    micro_batch: int
    owner: int
    auditor: int
    third: int | None


def find_turn(
    number: int, *, num_replicas: int, num_processes: int, accumulation_steps: int
) -> AuditTurn:
    """Return what is audited in a step: a function of its number, the same on all processes.

    Replica and micro-batch do not depend on the number of processes.

    Args:
        number: number of the audit in the run, from 0.
        num_replicas: replicas of the run.
        num_processes: processes that run them.
        accumulation_steps: micro-batches of a window.

    >>> turn = find_turn(5, num_replicas=4, num_processes=3, accumulation_steps=1)
    >>> turn.replica, turn.owner, turn.auditor, turn.third
    (1, 0, 2, 1)
    """
    lap, replica = divmod(number, num_replicas)
    block = blocks(num_processes, num_replicas)
    owner = next(rank for rank, replicas in enumerate(block) if replica in replicas)
    num_others = num_processes - 1
    micro_batch = lap % accumulation_steps
    if not num_others:
        return AuditTurn(replica, micro_batch, owner, owner, None)
    # The second term shifts the order, so that each pair of micro-batch and auditor occurs.
    place = (lap + lap // lcm(accumulation_steps, num_others)) % num_others
    auditor, third = ((owner + 1 + (place + step) % num_others) % num_processes for step in (0, 1))
    return AuditTurn(replica, micro_batch, owner, auditor, third if num_others > 1 else None)


Parcel: TypeAlias = tuple[Tensor, Tensor]
"""Two rows of bytes: what a step starts from, and its gradients."""


@dataclass
class WatchedTurn:
    """One turn of this process in an audited iteration.

    Attributes:
        inputs: what the step started from; empty if another turn is audited.
        old: the gradients before the step, by name of the parameter, if there were any.
        generators: their states when backward began.
        gradients: those after it.
        version: counts changes of the loss in place.
        num_writes: counts changes of the weights, when the step has ended.
        before: what the model and the plugins held before the step, if it changes that.
        watch: notices what is changed, while the step or its backward run.
        num_collectives: exchanges of this process when that began.
        changed: paths of what the step has changed besides gradients and buffers.
        reason: why this step cannot be audited.
    """

    inputs: bytes = b""
    old: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    gradients: GradientCopy = field(default_factory=lambda: GradientCopy({}))
    version: int = 0
    num_writes: int = 0
    before: Rollback | None = None
    watch: TurnWatch | None = None
    num_collectives: int = 0
    changed: set[str] = field(default_factory=set)
    reason: str = ""

    def pack(self) -> Parcel:
        """Return what another process needs to compute the gradients again."""
        rest = (self.inputs, self.old, self.generators, self.gradients.forms())
        head = torch.frombuffer(bytearray(pickling.dumps(rest)), dtype=torch.uint8)
        return head, self.gradients.content()

    @classmethod
    def unpack(cls, parcel: Parcel, device: torch.device) -> WatchedTurn:
        """Return the turn of another process.

        Args:
            parcel: what :meth:`pack` has returned there.
            device: the device of this process.
        """
        head, gradients = parcel
        inputs, old, generators, forms = pickling.loads(head.numpy().tobytes(), device)
        return cls(inputs, old, generators, GradientCopy.read(forms, gradients))


@dataclass(frozen=True)
class TurnNote:
    """What each process sends to all others before a gradient is computed again.

    Attributes:
        changed: see :class:`WatchedTurn`.
        reason: likewise.
        is_kept: whether this process can put back what its step has changed.
        sizes: bytes of the rows of its parcel.
        host: the name of its machine.
        device: its device.
    """

    changed: list[str]
    reason: str
    is_kept: bool
    sizes: tuple[int, ...]
    host: str
    device: str

    @property
    def place(self) -> str:
        """Host and device, for messages."""
        return f"{self.host}, {self.device}"


def _version_of(result: Any) -> int:
    loss = None if type(result) is GeneratorType else loss_of(result)
    return 0 if loss is None else loss._version  # noqa: SLF001 - torch has no public counter


def _make_room(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class RepeatedTurn:
    """What the process that has computed a gradient again has found.

    Attributes:
        difference: where the gradients differ; ``None`` if they do not.
        digest: of the gradients that it has computed, if they differ.
        left: what the second computation has changed and could not be put back.
    """

    difference: GradientMismatch | None
    digest: str
    left: Sequence[str]

    @classmethod
    def of(cls, first: GradientCopy, second: GradientCopy, left: Sequence[str]) -> RepeatedTurn:
        """Compare the gradients of two computations."""
        difference = first.difference(second)
        return cls(difference, "" if difference is None else second.digest(), left)


def describe_mismatch(
    difference: GradientMismatch,
    turn: AuditTurn,
    *,
    iteration: int,
    step: int,
    places: Sequence[str],
    verdict: str,
) -> str:
    """Return what is said of a mismatch.

    Args:
        difference: where the gradients differ.
        turn: who has computed them.
        iteration: the iteration, from 1.
        step: the optimizer step, from 1.
        places: host and device of each process, by rank.
        verdict: what a third computation says.
    """
    name = difference.parameter
    where = name if not difference.place else f"{name}{list(difference.place)}"
    first, second = (f"rank {rank} ({places[rank]})" for rank in (turn.owner, turn.auditor))
    return (
        f"Iteration {iteration}, step {step}: the gradient of replica {turn.replica} differs when "
        f"it is computed a second time from the same weights, batch and random numbers. {where}: "
        f"{difference.values[0]} on {first}, then {difference.values[1]} on {second}; "
        f"{_count(difference)}. {verdict}"
    )


def _count(difference: GradientMismatch) -> str:
    elements, parameters = difference.num_elements, difference.num_parameters
    texts = []
    if elements:
        texts.append("1 element differs" if elements == 1 else f"{elements} elements differ")
    if parameters > 1:
        texts.append(f"{parameters} parameters are affected")
    return ", ".join(texts) or "the forms differ"


def describe_verdict(
    turn: AuditTurn, digests: tuple[str, str], third: str | None, places: Sequence[str]
) -> str:
    """Return what a third computation says.

    Args:
        turn: who has computed what.
        digests: of the first two gradients.
        third: digest of the third gradient; ``None`` if there is none.
        places: host and device of each process, by rank.
    """
    if turn.owner == turn.auditor:
        return "The same process has computed both."
    if third is None or turn.third is None:
        return "There is no third process to decide which one is right."
    who = f"A third computation, on rank {turn.third} ({places[turn.third]}),"
    if third not in digests:
        return f"{who} differs from both."
    wrong = turn.owner if third == digests[1] else turn.auditor
    order = "second" if third == digests[1] else "first"
    return f"{who} equals the {order}: rank {wrong} ({places[wrong]}) has computed wrongly."
