"""Joins and leaves the process groups of a run, and guards its collectives.

A process joins two groups: the default one for tensors of the run, and one on the CPU for control
messages, so that neither waits for the other; a third one if threads save together. This also works
for a single process. A rank learns that another one has failed by an error, or from their common
store.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from helios.errors import RankError, UsageError

_LOGGER = logging.getLogger(__name__)
TIMEOUT = timedelta(minutes=30)
# Rank 0 may write a large checkpoint to a slow disk while the others wait; a process that died is
# detected by its closed connections, and by its launcher, not by this timeout.
CONTROL_TIMEOUT = timedelta(hours=2)
_DESTROY_SECONDS, _STORE_SECONDS, _POLL_SECONDS = 2.0, 2.0, 0.02
_TORCHRUN = "env://"
_START_KEY, _FAILED_KEY = "helios/start", "failed"


@dataclasses.dataclass(frozen=True)
class DistributedInfo:
    """The ranks of this process and the number of processes.

    Attributes:
        local_rank: the rank on this machine, from 0.
        rank: the global rank, from 0.
        local_world_size: the number of processes on this machine.
        world_size: the number of all processes.
    """

    local_rank: int = 0
    rank: int = 0
    local_world_size: int = 1
    world_size: int = 1


@dataclasses.dataclass
class _Membership:
    """The groups that this process has joined through this module.

    The store is that of the rendezvous; a group of the user has none.
    """

    world: dist.ProcessGroup
    info: DistributedInfo
    control: dist.ProcessGroup
    store: Any = None
    saves: dist.ProcessGroup | None = None
    failure: BaseException | None = None


class _Process:
    """Holder of the membership of this process, and of the rendezvous stores.

    A store is kept until the process ends, because rank 0 may be its server, and a training
    followed by a test joins twice. The count separates the keys of both.
    """

    membership: ClassVar[_Membership | None] = None
    stores: ClassVar[dict[str, Any]] = {}
    num_joins: ClassVar[int] = 0


def is_dist_active() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def join_group(
    info: DistributedInfo,
    *,
    backend: str,
    meeting: str = "",
    store: Any = None,
    device: torch.device | None = None,
) -> None:
    """Join the default group and the control group, together with all other ranks.

    Args:
        info: the ranks of this process and the number of processes.
        backend: ``"nccl"`` for CUDA, ``"gloo"`` for the CPU; the control group always uses gloo.
        meeting: URL of the rendezvous: ``"tcp://host:port/name"`` (a free port on the machine of
            rank 0; ranks with another name on the same port are rejected), ``"file:///path"`` of a
            file that does not exist yet, or ``"env://"`` for torchrun's variables. A single process
            needs none.
        store: a store that only these ranks know, in place of a meeting.
        device: the GPU of this process, for NCCL.

    Raises:
        RuntimeError: if this process is in a group, the port of rank 0 is in use, or other ranks do
            not join.
    """
    if info.world_size > 1:
        # The first optimizer imports PyTorch's compiler. If that is done inside a group, it keeps a
        # reference to the group, whose threads then abort the process when it exits.
        torch.optim.SGD([torch.zeros(1)])
    if store is None:
        store = _meet(info, meeting)
    dist.init_process_group(
        backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=TIMEOUT,
        device_id=device,
    )
    try:
        _adopt_group(info, store)
    except BaseException:
        leave_group(is_failing=True)
        raise


def _adopt_group(info: DistributedInfo, store: Any = None) -> None:
    control: Any = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    world: Any = dist.group.WORLD
    _Process.membership = _Membership(world, info, control, store)


def _meet(info: DistributedInfo, meeting: str) -> Any:
    if info.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = _Process.stores.get(meeting)
    if store is None:
        found = dist.rendezvous(meeting, info.rank, info.world_size, timeout=TIMEOUT)  # type: ignore[attr-defined]
        store, _, _ = next(found)
        name = _name_start(store, info) if meeting == _TORCHRUN else urlsplit(meeting).path
        store = _Process.stores[meeting] = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    _Process.num_joins += 1
    return dist.PrefixStore(f"helios/{_Process.num_joins}", store)  # type: ignore[attr-defined]


def _name_start(store: Any, info: DistributedInfo) -> str:
    """Agree on a name that only the ranks of this start know.

    torchrun keeps its store when it restarts all ranks, so addresses of previous ranks could be
    mistaken for current ones. Rank 0 creates a name, and confirms all ranks that registered under
    it; a rank that read a previous name finds no confirmation.

    Raises:
        RankError: if the others do not register in time.
    """
    own = uuid.uuid4().hex
    others = range(1, info.world_size)
    if info.rank == 0:
        store.set(_START_KEY, own)
        calls = [f"{own}/{rank}" for rank in others]
        store.wait(calls, TIMEOUT)
        store.set(f"{own}/answer", " ".join(store.get(call).decode() for call in calls))
        return own
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        name: str = store.get(_START_KEY).decode()
        store.set(f"{name}/{info.rank}", own)
        answer = f"{name}/answer"
        if store.check([answer]) and own in store.get(answer).decode().split():
            return name
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"Rank {info.rank} of {info.world_size} has waited {TIMEOUT} for the other ranks, but not "
        "all of them joined. Check their logs, and start all of them again."
    )


def leave_group(*, is_failing: bool = False) -> None:
    """Leave the groups; does nothing outside a group.

    Normally all ranks wait for each other, so that none closes a connection that another one still
    reads from. A failing rank does not wait; collectives of the others fail when its process ends,
    which closes its connections.

    Args:
        is_failing: whether an exception is being raised.
    """
    if not is_dist_active():
        return
    if dist.get_world_size() == 1 or own_membership() is None:
        destroy_group()
    elif is_failing or has_failed():
        _abandon_group()
    else:
        try:
            with collective("leave_group"):
                dist.barrier(group=control_group())
        except BaseException:
            _abandon_group()
            raise
        # Otherwise, a reference cycle could keep the group and its threads.
        gc.collect()
        destroy_group()


def _abandon_group() -> None:
    """Leave without waiting for pending collectives, now or when the process exits.

    The destructor of a gloo group waits for them until the timeout, even at interpreter shutdown,
    so a reference is leaked on purpose. Closing NCCL may block, too, so it happens in a thread,
    which is abandoned if it takes too long.
    """
    known = own_membership()
    groups = [] if known is None else [known.control, known.saves]
    if known is not None and dist.get_backend() == "gloo":
        groups.append(known.world)
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    in_time(destroy_group, _DESTROY_SECONDS)


def destroy_group() -> None:
    """Close the connections of the groups; may wait for pending collectives."""
    _Process.membership = None
    dist.destroy_process_group()


@contextmanager
def membership(info: DistributedInfo, **options: Any) -> Iterator[None]:
    """Join the groups for a block; after an error, leave without waiting for other ranks.

    An existing group of the user is used, and kept afterwards.

    Args:
        info: the ranks of this process and the number of processes.
        **options: further arguments of :func:`join_group`.
    """
    if is_dist_active():
        if own_membership() is None:
            _adopt_group(info)
        yield
        return
    join_group(info, **options)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and (store := _find_store()) is not None:
            note_failure(store)
        leave_group(is_failing=True)
        raise
    leave_group()


def own_membership() -> _Membership | None:
    """Return the membership of this process; None if Helios has not joined the current group."""
    known = _Process.membership
    if known is None or not is_dist_active() or known.world is not dist.group.WORLD:
        return None
    return known


def _find_store() -> Any:
    known = own_membership()
    return None if known is None else known.store


def control_group() -> dist.ProcessGroup:
    """Return the control group, for flags, barriers and small CPU tensors."""
    known = own_membership()
    assert known is not None
    return known.control


def saving_group() -> dist.ProcessGroup:
    """Return a group on the CPU for a thread that saves; the first call is a collective one."""
    known = own_membership()
    assert known is not None
    if known.saves is None:
        with collective("saving_group"):
            # A rank that is gone is noticed here at once, and not while a group forms.
            dist.barrier(group=known.control)
            known.saves = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return known.saves


def has_failed() -> bool:
    """Return whether a collective of this process has failed; its groups cannot be used again."""
    known = own_membership()
    return known is not None and known.failure is not None


def has_lost_rank() -> bool:
    """Return whether another rank has failed, as far as this one can tell, within seconds.

    Unlike a collective, it may be called in any thread, at any time.
    """
    store = _find_store()

    def look() -> bool:
        try:
            return bool(store.check([_FAILED_KEY]))
        except RuntimeError:
            # Rank 0 may be the server of the store, and be the rank that has failed.
            return True

    return store is not None and bool(in_time(look, _STORE_SECONDS))


def open_store() -> Any:
    """Return another connection to the store of the group, without its prefixes.

    A waiting call blocks every user of the same connection.

    Returns:
        The store; ``None`` in a group of the user, and for another kind of store than TCP.
    """
    store = _find_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return dist.TCPStore(store.host, store.port, wait_for_workers=False)  # type: ignore[attr-defined]
    return None


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Guard a block that runs a collective.

    After a collective has failed, ranks may be at different ones: another collective would hang or
    mix up their data.

    Args:
        name: name of the caller, for messages.

    Raises:
        UsageError: without a process group, or after a collective has failed (a ``RuntimeError``).
    """
    if not is_dist_active():
        raise UsageError(
            f"{name}(...) needs a process group, but this process is in none. Train on several "
            "processes, call init_dist(...) first, or check is_dist_active()."
        )
    known = own_membership()
    if known is not None and known.failure is not None:
        raise UsageError(
            f"{name}(...) must not be called after a collective has failed, because the other "
            "processes may have ended or be in another collective. Let the error end this process, "
            "and start the run again."
        ) from known.failure
    try:
        yield
    except BaseException as error:
        if known is not None:
            known.failure = error
        raise


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is the consequence of another rank's failure.

    An error of a collective means that a rank has exited or is late; a ``RankError``, that another
    rank has failed.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        is_gloo = isinstance(link, RuntimeError) and "gloo" in str(link).lower()
        if is_gloo or isinstance(link, RankError | dist.DistError):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def note_failure(store: Any) -> None:
    """Tell the ranks that share a store that this one ends with an error."""
    in_time(lambda: store.set(_FAILED_KEY, ""), _STORE_SECONDS)


def in_time(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of some work; ``None`` if it takes longer, or if disk or network fail.

    Args:
        work: done in a thread, which is abandoned if it waits forever.
        seconds: how long this waits.
    """
    found = []

    def run() -> None:
        try:
            found.append(work())
        except (OSError, RuntimeError) as error:
            _LOGGER.debug("It failed.", exc_info=error)

    thread = threading.Thread(target=run, name="helios-in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
