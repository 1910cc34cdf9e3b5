"""The process groups of a training: joining them, leaving them, and what may not follow a failure.

A process joins two groups: the default one for the training's own tensors, and one on the CPU for
control traffic, so that neither waits for the other. All of it also works for one process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from helios.errors import RankError, UsageError

DEFAULT_TIMEOUT = timedelta(minutes=30)
# Rank 0 may write a large checkpoint to a slow disk while the others wait; a process that died is
# noticed by its closed connections, not by this limit.
CONTROL_TIMEOUT = timedelta(hours=2)
_DESTROY_SECONDS = 2.0
_TORCHRUN_MEETING, _START_KEY, _POLL_SECONDS = "env://", "helios/start", 0.02


@dataclasses.dataclass(frozen=True)
class DistributedInfo:
    """Where this process stands among all.

    Attributes:
        local_rank: its number on this machine, from 0.
        rank: its number among all processes, from 0.
        local_world_size: processes on this machine.
        world_size: all processes.
    """

    local_rank: int = 0
    rank: int = 0
    local_world_size: int = 1
    world_size: int = 1


@dataclasses.dataclass
class _Membership:
    """What is known of the groups that this process has joined through this module."""

    world: dist.ProcessGroup
    info: DistributedInfo
    control: dist.ProcessGroup | None = None
    failure: BaseException | None = None


class _Process:
    """Holder of the one membership of a process, and of the stores where ranks meet.

    A store is kept until the process ends: rank 0 may be its server, and a training that is
    followed by a test joins twice. The count keeps the keys of both apart.
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
    timeout: timedelta = DEFAULT_TIMEOUT,
    control_timeout: timedelta = CONTROL_TIMEOUT,
    device: torch.device | None = None,
) -> None:
    """Join the default group and the one for control traffic, together with all other ranks.

    Args:
        info: where this process stands.
        backend: ``"nccl"`` for CUDA, ``"gloo"`` for the CPU; the control group is always on gloo.
        meeting: where the ranks find each other: ``"tcp://host:port"`` (a free port of rank 0's
            machine), ``"file:///path"`` of a file that does not exist yet, or ``"env://"`` for
            torchrun's variables. A single process needs none.
        timeout: how long a collective of the default group may take.
        control_timeout: how long one of the control group may take.
        device: the GPU of this process, for NCCL.

    Raises:
        UsageError: when this process is in a group already (a ``RuntimeError``).
    """
    if is_dist_active():
        raise UsageError(
            "join_group(...) must be called outside of a process group, and this process is in one "
            "already. Leave it first, or let Helios join."
        )
    if info.world_size > 1:
        # Optimizers import it at the latest. Where that happens inside of a group, something of it
        # keeps the group, whose threads then abort the process at its end.
        importlib.import_module("torch._dynamo")
    dist.init_process_group(
        backend,
        store=_meet(info, meeting, timeout),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=device,
    )
    try:
        _adopt_group(info, control_timeout)
    except BaseException:
        leave_group(is_failing=True)
        raise


def _adopt_group(info: DistributedInfo, control_timeout: timedelta) -> None:
    control = dist.new_group(backend="gloo", timeout=control_timeout)
    _Process.membership = _Membership(dist.group.WORLD, info, control)  # type: ignore[arg-type]


def _meet(info: DistributedInfo, meeting: str, timeout: timedelta) -> Any:
    if info.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = _Process.stores.get(meeting)
    if store is None:
        found = dist.rendezvous(meeting, info.rank, info.world_size, timeout=timeout)  # type: ignore[attr-defined]
        store, _, _ = next(found)
        if meeting == _TORCHRUN_MEETING:
            store = dist.PrefixStore(_name_start(store, info, timeout), store)  # type: ignore[attr-defined]
        _Process.stores[meeting] = store
    _Process.num_joins += 1
    return dist.PrefixStore(f"helios/{_Process.num_joins}", store)  # type: ignore[attr-defined]


def _name_start(store: Any, info: DistributedInfo, timeout: timedelta) -> str:
    """Agree on a name that only the ranks of this start know.

    torchrun keeps its store when it starts all ranks again, so the addresses of ranks that are gone
    would be taken for those of the present ones. Rank 0 makes a name, and answers under it to those
    who have called; a rank that has read an old name finds no answer to its own call.

    Raises:
        RankError: if the others do not come in time.
    """
    own = uuid.uuid4().hex
    others = range(1, info.world_size)
    if info.rank == 0:
        store.set(_START_KEY, own)
        calls = [f"{own}/{rank}" for rank in others]
        store.wait(calls, timeout)
        store.set(f"{own}/answer", " ".join(store.get(call).decode() for call in calls))
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name: str = store.get(_START_KEY).decode()
        store.set(f"{name}/{info.rank}", own)
        answer = f"{name}/answer"
        if store.check([answer]) and own in store.get(answer).decode().split():
            return name
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"Rank {info.rank} of {info.world_size} has waited for the others for {timeout}, and not "
        "all of them came. Look at what the others say, and start all of them again."
    )


def leave_group(*, is_failing: bool = False) -> None:
    """Leave the groups; nothing where there is none.

    On the regular path all ranks wait for each other, so that nobody closes a connection that
    another one still reads from. A rank that fails waits for nobody; what the others wait for ends
    with an error when its process ends, which closes its connections.

    Args:
        is_failing: whether an error is on its way.
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
        # A circle of references that nobody needs any more would keep the group, and its threads.
        gc.collect()
        destroy_group()


def _abandon_group() -> None:
    """Leave without waiting for a collective that is under way, now and at the process's end.

    The destructor of a gloo group waits for it until the timeout, also while the interpreter shuts
    down. A reference that nobody gives back prevents that. Closing NCCL may wait as well; a thread
    does it, and is left alone where that takes long.
    """
    known = own_membership()
    groups = [] if known is None else [known.control]
    if known is not None and dist.get_backend() == "gloo":
        groups.append(known.world)
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    closing = threading.Thread(target=destroy_group, name="helios-leave", daemon=True)
    closing.start()
    closing.join(_DESTROY_SECONDS)


def destroy_group() -> None:
    """Close the connections of the groups; may wait for a collective that is under way."""
    _Process.membership = None
    dist.destroy_process_group()


@contextmanager
def membership(info: DistributedInfo, **options: Any) -> Iterator[None]:
    """Be in the groups for a block; an error inside leaves without waiting for anybody.

    A group that the user has made before is used as it is, and is there afterwards.

    Args:
        info: where this process stands.
        **options: further arguments of :func:`join_group`.

    Raises:
        UsageError: when this process has another place in the user's group (a ``RuntimeError``).
    """
    if is_dist_active():
        _take_over(info)
        yield
        return
    join_group(info, **options)
    try:
        yield
    except BaseException:
        leave_group(is_failing=True)
        raise
    leave_group()


def _take_over(info: DistributedInfo) -> None:
    found, expected = (dist.get_rank(), dist.get_world_size()), (info.rank, info.world_size)
    if found != expected:
        raise UsageError(
            "The process group of this process must be the one that its launcher describes, rank "
            f"{expected[0]} of {expected[1]}, got rank {found[0]} of {found[1]}. Leave it before "
            "the training starts, or do not make one: Helios joins by itself."
        )
    if own_membership() is None:
        _adopt_group(info, CONTROL_TIMEOUT)


def own_membership() -> _Membership | None:
    """Return what is known of the present group; None where somebody else has made it."""
    known = _Process.membership
    if known is None or not is_dist_active() or known.world is not dist.group.WORLD:
        return None
    return known


def control_group() -> dist.ProcessGroup:
    """Return the group for control traffic: flags, waits and small CPU tensors.

    Raises:
        UsageError: outside of :func:`join_group` (a ``RuntimeError``).
    """
    known = own_membership()
    if known is None or known.control is None:
        raise UsageError(
            "control_group() needs a process group that Helios has joined, and this process is in "
            "none; call join_group(...) or init_dist(...) first."
        )
    return known.control


def has_failed() -> bool:
    """Return whether a collective of this process has failed; its groups cannot be used again."""
    known = own_membership()
    return known is not None and known.failure is not None


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Guard the block that runs a collective.

    After one has failed, ranks no longer wait for the same thing: another collective would hang or
    mix up their data.

    Args:
        name: of the caller, for messages.

    Raises:
        UsageError: without a process group, or after a collective has failed (a ``RuntimeError``).
    """
    _require_group(name)
    known = own_membership()
    if known is not None and known.failure is not None:
        raise UsageError(
            f"{name}(...) must not be called after a collective has failed: the other processes "
            "may be gone, or wait for something else. Let the error end this process, and start "
            "the run again."
        ) from known.failure
    try:
        yield
    except BaseException as error:
        if known is not None:
            known.failure = error
        raise


def _require_group(caller: str) -> None:
    if not is_dist_active():
        raise UsageError(
            f"{caller}(...) needs a process group, and this process is in none; train on several "
            "processes, call init_dist(...) first, or ask is_dist_active() before."
        )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, comes from another rank.

    That of a collective says that a rank is gone or late, not why; a ``RankError`` says that
    another one has failed.
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
