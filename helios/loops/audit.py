"""``StepAudit``: computes a gradient a second time in some steps, and compares it on bytes.

All processes take part at one place: after the last backward of the audited iteration, before its
gradients are summed. The first computation is never changed, and training continues with it.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, final

import torch
from torch import Tensor

from helios.core.parameters import parameters_of
from helios.distributed import pickling
from helios.distributed.process_groups import count_collectives
from helios.errors import AuditError
from helios.loops.audit_report import Finding, describe, judge
from helios.loops.audit_trace import (
    StepInputs,
    StepTrace,
    leaves_of,
    read_generators,
    set_generators,
)
from helios.loops.step import begin_forward, loss_of, run_step
from helios.model.snapshot import Snapshot
from helios.replicas.audit_turns import AuditTurn, find_turn
from helios.replicas.gradient_copies import GradientCopy
from helios.run_state.replica_watch import TurnWatch, find_lazy
from helios.session import Session

_LOGGER = logging.getLogger(__name__)
_MAX_KEPT = 10


@dataclass
class _Turn:
    """What a process keeps of its watched turn in an audited iteration.

    Attributes:
        inputs: what the step started from; empty if this turn is not the audited one.
        old: the gradients before the step, by name of the parameter, if there were any.
        generators: their states when backward began.
        gradients: those after it.
        version: counts changes of the loss in place.
        before: what the model and the plugins held before the step, if it changes that.
        changed: paths of what the step has changed besides gradients and buffers.
        reason: why this step cannot be audited.
    """

    inputs: bytes = b""
    old: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    gradients: GradientCopy = field(default_factory=lambda: GradientCopy({}))
    version: int = 0
    before: Snapshot | None = None
    changed: set[str] = field(default_factory=set)
    reason: str = ""


@dataclass(frozen=True)
class _Note:
    """What each process tells all others before the second computation.

    Attributes:
        changed: see :class:`_Turn`.
        reason: likewise.
        is_kept: whether the owner can put back what its step has changed.
        sizes: bytes of the inputs and of the gradients that the owner sends.
        place: host and device.
    """

    changed: list[str]
    reason: str
    is_kept: bool
    sizes: tuple[int, int]
    place: str


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
        self._own: _Turn | None = None
        self._parcel: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_due(self) -> bool:
        """Whether the current iteration is audited; the same on all processes."""
        if self._session.turns.is_first:
            self._is_due = self._begin_iteration()
        return self._is_due

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
        place = session.engine.open_micro_batches
        # The window may end early, at the end of an epoch.
        is_last = session.state.is_step_boundary and place < turn.micro_batch
        return place == turn.micro_batch or is_last

    def take_step(self, batch: Any) -> Any:
        """Run the step of a replica in an audited iteration, as :func:`take_step` does."""
        session, turn = self._session, self._rotation
        batch = begin_forward(session, batch)
        is_owner = session.replicas.rank == turn.owner
        is_audited = is_owner and session.turns.replica == turn.replica
        # Any other process watches one of its turns: plugins may differ between processes.
        if not is_audited and (is_owner or not session.turns.is_last):
            return run_step(session, "train_step", batch, session.state)
        self._own = own = _Turn(reason=self._find_hindrance())
        if is_audited and not own.reason:
            self._keep(own, batch)
        with self._watching(own):
            result = run_step(session, "train_step", batch, session.state)
        own.version = _version_of(result)
        return result

    def _find_hindrance(self) -> str:
        session = self._session
        if lazy := find_lazy(session):
            return f"the network {lazy[0]!r} has lazy layers, which draw their weights in this step"
        names = [name for name, x in vars(session.model).items() if isinstance(x, Iterator)]
        return f"the position of the iterator {names[0]!r} cannot be put back" if names else ""

    def _keep(self, own: _Turn, batch: Any) -> None:
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

    def _take_snapshot(self) -> Snapshot:
        session = self._session
        return Snapshot([session.model, session.engine, *session.plugins.values()])

    @contextmanager
    def _watching(self, own: _Turn) -> Iterator[None]:
        """Record what a block changes besides gradients and buffers, and if it communicates."""
        if own.reason:
            yield
            return
        count = count_collectives()
        watch = self._watch(own.changed)
        yield
        watch.conclude(is_manual=False)
        if count_collectives() != count:
            own.reason = "the step communicates with other processes"

    def _watch(self, changed: set[str]) -> TurnWatch:
        return TurnWatch(
            self._session,
            lambda found, **_: changed.update(found),
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
            own.generators = read_generators(session.engine.device)
        with self._watching(own):
            session.engine.backward_loss(loss, inputs)
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
        for path, optimizer in self._session.find_optimizers().items():
            for place, parameter in enumerate(parameters_of(optimizer)):
                found.setdefault(id(parameter), (f"parameter {place} of {path}", parameter))
        return {name: parameter for name, parameter in found.values() if parameter.requires_grad}

    def conclude(self) -> None:
        """Compute the gradient again; all processes call this after their last backward.

        Raises:
            AuditError: in all processes, if it differs and the audit is strict.
        """
        own, self._own = self._own or _Turn(), None
        notes = self._session.replicas.gather_objects(self._note_of(own))
        turn = self._settle(notes)
        if turn is not None:
            self._audit(turn, own, notes)
        self._parcel = None

    def _note_of(self, own: _Turn) -> _Note:
        session = self._session
        if own.inputs and not own.reason and not session.replicas.is_whole:
            rest = (own.inputs, own.generators, own.old, own.gradients.forms())
            head = torch.frombuffer(bytearray(pickling.dumps(rest)), dtype=torch.uint8)
            self._parcel = head, own.gradients.content()
        sizes = (0, 0) if self._parcel is None else tuple(x.numel() for x in self._parcel)
        place = f"{platform.node()}, {session.engine.device}"
        is_kept = own.before is not None
        return _Note(sorted(own.changed), own.reason, is_kept, (sizes[0], sizes[1]), place)

    def _settle(self, notes: list[_Note]) -> AuditTurn | None:
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
            "hook, or make it a buffer of a network, so that other processes can do it"
        )
        return None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            name = type(self._session.model).__name__
            _LOGGER.warning("Audit: %s.train_step %s.", name, text)

    def _audit(self, turn: AuditTurn, own: _Turn, notes: list[_Note]) -> None:
        replicas = self._session.replicas
        finding = self._repeat_on(turn.auditor, turn, own, notes)
        found: Finding = replicas.gather_objects(finding)[turn.auditor]
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
        text = describe(
            found.difference,
            turn,
            iteration=self._session.state.global_iteration,
            step=self._session.state.global_step + 1,
            places=places,
            verdict=judge(turn, (first, found.digest), third, places),
        )
        self._report(text)

    def _report(self, text: str) -> None:
        mismatches = self._session.mismatches
        if len(mismatches) < _MAX_KEPT:
            mismatches.append(text)
        if self._is_strict:
            raise AuditError(
                f"{text} Check the hardware that is named. If the arithmetic is not deterministic "
                "there, pass Trainer(enable_deterministic=True). To continue after a mismatch, "
                'pass Audit(on_mismatch="warn").'
            )
        _LOGGER.warning("Audit: %s Training continues with the first gradient.", text)

    def _repeat_on(
        self,
        rank: int,
        turn: AuditTurn,
        own: _Turn,
        notes: list[_Note],
    ) -> Finding | None:
        """Compute the gradient again on one rank, which gets what it needs from the owner."""
        replicas = self._session.replicas
        if rank != turn.owner and replicas.rank in (rank, turn.owner):
            head, gradients = self._parcel or map(_make_room, notes[turn.owner].sizes)
            replicas.hand_over(head, turn.owner, rank)
            replicas.hand_over(gradients, turn.owner, rank)
            if replicas.rank == rank:
                own = _open(head, gradients, self._session.engine.device)
        return self._repeat(own) if replicas.rank == rank else None

    def _repeat(self, own: _Turn) -> Finding:
        """Compute a gradient again and compare it, without a trace."""
        session = self._session
        parameters = self._parameters()
        trace = StepTrace(session, parameters.values())
        left = set[str]()
        watch = self._watch(left)
        after = None if own.before is None else self._take_snapshot()
        with trace.erased():
            if own.before is not None:
                own.before.erase()
            for name, parameter in parameters.items():
                parameter.grad = own.old.get(name)
            StepInputs.read(own.inputs, session.engine.device).put(session)
            loss = self._forward(session.context.batch)
            trace.hold_gradients(leaves_of(loss))
            set_generators(own.generators)
            session.engine.backward_loss(loss, None)
            second = GradientCopy.take(parameters)
        if after is not None:
            after.erase()
        watch.conclude(is_manual=False)
        return Finding.of(own.gradients, second, sorted(left))

    def _forward(self, batch: Any) -> Tensor:
        loss = loss_of(run_step(self._session, "train_step", batch, self._session.state))
        assert loss is not None, "a step is automatic or manual, never both"
        return loss


def _version_of(result: Any) -> int:
    loss = None if type(result) is GeneratorType else loss_of(result)
    return 0 if loss is None else loss._version  # noqa: SLF001 - torch has no public counter


def _make_room(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _open(head: Tensor, gradients: Tensor, device: torch.device) -> _Turn:
    """Return what the owner keeps of its turn, in another process."""
    inputs, generators, old, forms = pickling.loads(head.numpy().tobytes(), device)
    return _Turn(inputs, old, generators, GradientCopy.read(forms, gradients))
