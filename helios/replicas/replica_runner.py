"""Runs the replicas of a process one after another, each with its own random numbers and buffers.

The random numbers of a replica's step depend on the seed, the iteration and the replica. What runs
before and after the steps is the same on all processes, so it does not depend on which process runs
which replica. A single replica has one key per iteration; nothing is copied or exchanged.

Before its first gradients, a window exchanges one message between processes: the losses of all
replicas, the buffers of replica 0, and flags of the run. What may still change after the gradients
is not in it and is exchanged later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.optim import Optimizer

from helios.core import rng
from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.listeners import Iteration
from helios.replicas.gradients import Gradients
from helios.replicas.module_buffers import ReplicaBuffers
from helios.replicas.replicas import NOTHING, Replicas
from helios.requests import Agreement
from helios.state.steps import ReplicaWatch

if TYPE_CHECKING:
    from helios.model.model import Model

Seed = Callable[[int | None], None]


class ReplicaRunner:
    """Runs a single replica, which is the whole iteration: nothing is exchanged.

    Args:
        seed: seed of the training steps.
        iteration: gets the losses of an iteration.
        before: what keys of an iteration end with, before its first replica.

    Attributes:
        replica: the replica that is running, or ran last.
        is_first: whether it is the first replica of this process.
        is_last: whether it is the last replica of this process.
        begins_window: whether this is the first step of an accumulation window whose gradients are
            collected.
        has_collected: whether gradients of the replica were handed over; the loops set it.
        keeps_batches: whether this process may have to repeat a step of an evaluation.
        watch: watches what a step changes; ``None`` in most iterations.
    """

    replica: int = 0
    is_first: bool = True
    is_last: bool = True
    begins_window: bool = False
    has_collected: bool = False
    keeps_batches: bool = False
    watch: ReplicaWatch | None = None

    def __init__(self, seed: int, iteration: Iteration, before: int | str = 0) -> None:
        self._iteration = iteration
        self._before = rng.KeySeries(seed, "train", suffix=(before,))

    def add_with_losses(self, numbers: Sequence[float]) -> None:
        """Add whole numbers over all processes, together with the losses of this iteration.

        Args:
            numbers: those of this process; as many on all processes.
        """
        self._iteration.totals = numbers

    def begin_iteration(self, iteration: int) -> None:
        """Set the random numbers for what runs before the replicas of an iteration."""
        rng.reseed(self._before.at(iteration))

    def check_stop(self, error: StopIteration) -> str:
        """Check that a hook may end the epoch.

        Args:
            error: what the hook raised.

        Returns:
            Why the run is now bound to its number of processes, or an empty string.

        Raises:
            UsageError: if other processes would wait for this one.
        """
        return ""

    def begin_share(self, replica: int, seed: Seed) -> None:
        """Begin the part of a replica in an iteration of an evaluation.

        Args:
            replica: its number.
            seed: sets the random numbers of a replica, or those of the hooks if it gets ``None``.
        """

    def count_idle(self, num_shares: int) -> int:
        """Return how often this process must compute along in an iteration of an evaluation.

        Args:
            num_shares: its replicas that have a batch.
        """
        return 0

    def end_shares(self, seed: Seed) -> None:
        """End the replicas' parts of an iteration of an evaluation, or of the whole evaluation.

        Args:
            seed: as in :meth:`begin_share`.
        """


@final
class SharedReplicaRunner(ReplicaRunner):
    """Runs a block of several replicas in this process.

    Args:
        replicas: the replicas of the run.
        seed: seed of the training steps.
        model: the model.
        gradients: the gradients of the replicas.
        iteration: gets the losses of an iteration, as means over all replicas.
        watch: watches what steps change.
        agreement: sends and receives the flags of the window's message.

    Attributes:
        has_message: whether a message is pending that :meth:`receive` reads.
        has_stepped: whether the current replica has begun a step; the loops set it.
    """

    def __init__(
        self,
        replicas: Replicas,
        seed: int,
        model: Model,
        gradients: Gradients,
        iteration: Iteration,
        watch: ReplicaWatch,
        agreement: Agreement,
    ) -> None:
        super().__init__(seed, iteration, "before")
        self.has_message = False
        self._replicas = replicas
        self._gradients = gradients
        self._first, self._last = replicas.local_replicas[0], replicas.local_replicas[-1]
        self._model = model
        self._find_networks = model.discovery.modules
        self._watch = watch
        self._agreement = agreement
        self._exchange = WindowExchange(replicas, agreement)
        self._buffers = self._exchange.buffers
        self._knows_buffers = False
        self._seed = seed
        self._number = 0
        self._num_reopened = 0
        self.has_stepped = False
        # Whether the last replica has finished this iteration.
        self._is_over = False
        self._is_watched = False
        self.keeps_batches = replicas.is_sharded_over_processes
        self._after = rng.KeySeries(seed, "train", suffix=("after",))
        self._own = {r: rng.KeySeries(seed, "train", suffix=(r,)) for r in replicas.local_replicas}
        self.replica, self.is_first, self.is_last = self._first, True, self._first == self._last

    def add_with_losses(self, numbers: Sequence[float]) -> None:
        """Send numbers with the losses."""
        self._replicas.add_with_losses(numbers)

    def begin_epoch(self) -> None:
        """Search for buffers again when the next window opens: hooks may have changed networks."""
        self._knows_buffers = False

    def begin_iteration(self, iteration: int) -> None:
        """Set the random numbers of the hooks that run before the replicas."""
        self._number = iteration
        self._num_reopened = 0
        self._is_over = False
        self._is_watched = self._watch.is_due(iteration)
        rng.reseed(self._before.at(iteration))

    def begin(self, replica: int, *, opens_window: bool) -> None:
        """Begin a replica with its own random numbers and buffers and an empty table of losses.

        Args:
            replica: its number.
            opens_window: whether this iteration is the first of an accumulation window.
        """
        self.replica = replica
        self.is_first, self.is_last = replica == self._first, replica == self._last
        self.has_stepped = False
        self.begins_window = opens_window and self.is_first
        if self.begins_window:
            if not self._knows_buffers:
                self._buffers.find(self._find_networks().values())
                self._knows_buffers = True
            if self._buffers.is_exchanged:
                self._buffers.begin_window()
        if self._buffers.is_exchanged:
            self._buffers.enter(replica)
        rng.reseed(self._own[replica].at(self._number))
        self._model._loss_items.clear()
        self.watch = self._watch.begin(self._number) if self._is_watched else None

    def begin_again(self) -> None:
        """Begin a further step of the current replica, on the same batch.

        It gets a seed of its own: it must not repeat what the last one has drawn.

        Raises:
            UsageError: if other replicas of this process are still to run.
        """
        if self._first != self._last:
            raise UsageError(
                "A batch loop that runs its optimizer loop several times per batch needs one "
                f"process per replica, but this one runs "
                f"{len(self._replicas.local_replicas)}. Start {self._replicas.num_replicas} "
                "processes."
            )
        if self._is_over:
            self._is_over = False
            self._exchange.reopen()
            self._num_reopened += 1
            fields = ("train", self._number, self.replica, self._num_reopened)
            rng.reseed(rng.key(self._seed, *fields))

    def _compare_updates(self, *, is_update: bool) -> None:
        """Check that all processes make the same number of updates, with loops of the user's.

        Args:
            is_update: whether this process makes an update now, or has made all of the iteration.

        Raises:
            UsageError: in all processes, if some make one and others do not.
        """
        makes_one, has_ended = self._replicas.agree(is_update, not is_update)
        if makes_one and has_ended:
            raise UsageError(
                f"All processes must make the same number of updates, but in iteration "
                f"{self._number} some make one more than others. The number of rounds of a loop "
                "must not depend on the batch or the loss of one replica: let all decide together "
                "with self.session.replicas.agree(flag)."
            )

    def sending(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager that sends gradients during the last backward of a window.

        Args:
            optimizer: the optimizer of the parameters.
        """
        return self._gradients.sending(optimizer, self.replica, self._find_networks)

    def end_backward(
        self,
        optimizers: Sequence[Optimizer],
        shown: Mapping[str, Any],
        *,
        ends_window: bool,
        updates: bool = False,
    ) -> None:
        """Collect what a backward has produced, before another replica or an update.

        The model's own losses, which an update could change, are copied. If the window's only
        update follows, all processes run the same code from here on, and the window's message is
        sent with the gradients. :meth:`receive` reads it.

        Args:
            optimizers: the optimizers of the parameters, which have got gradients together.
            shown: the losses that Helios has put into the model's table, which are its own copies.
            ends_window: whether the iteration is the last of its window.
            updates: whether the window's only update follows.
        """
        if ends_window and self.is_last and self._agreement.has_own_loops:
            self._compare_updates(is_update=True)
        table = self._model._loss_items
        for name, loss in table.items():
            if type(loss) is not Tensor and is_sharded(loss):
                # A copy of a sum of shards would wait for processes that make none.
                raise make_loss_error(name, loss)
            if isinstance(loss, Tensor) and loss is not shown.get(name):
                table[name] = loss.detach().clone()
        # Where models are sharded over processes, that ends the step for all optimizers.
        for optimizer in optimizers[:1] if self.keeps_batches else optimizers:
            self._gradients.collect(
                optimizer, self.replica, self._find_networks, ends_window=ends_window
            )
        if updates:
            self._end_last(table, ends_window=True, is_before_update=True)

    def receive(self) -> None:
        """Read the messages and put the buffers of replica 0 in place."""
        self.has_message = False
        self._exchange.receive()

    def end(self, *, ends_window: bool) -> None:
        """Keep the losses and buffers of a replica. After the last one put the means in place.

        Args:
            ends_window: whether the iteration is the last of its window.

        Raises:
            UsageError: if the losses in the model's table cannot be averaged.
        """
        table = self._model._loss_items
        self.watch = None
        if not self.is_last:
            self._exchange.keep_losses(
                self._with_sums(table) if self._iteration.weighted else table
            )
            if self._buffers.is_exchanged:
                self._buffers.leave(self.replica)
            return
        if ends_window and self._agreement.has_own_loops:
            self._compare_updates(is_update=False)
        if not self._is_over:
            self._end_last(table, ends_window=ends_window, is_before_update=False)
        if self.has_message:
            self.receive()
        if self._is_watched:
            self._watch.report()
        iteration, weighted = self._iteration, self._iteration.weighted
        means = self._exchange.pop_means(self._with_sums(table) if weighted else table)
        added = self._replicas.losses
        iteration.totals, iteration.means = added.totals, added.means
        if weighted:
            iteration.weighted = {
                name: (means[name], *added.sums[name]) for name in weighted if name in means
            }
        table.clear()
        table.update(means)

    def _with_sums(self, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a table of losses in which weighted means are replaced by their sums."""
        weighted = self._iteration.weighted
        return {
            name: weighted[name] if name in weighted and weighted[name][0] is loss else loss
            for name, loss in table.items()
        }

    def _end_last(
        self, table: Mapping[str, Any], *, ends_window: bool, is_before_update: bool
    ) -> None:
        self._is_over = True
        if self._buffers.is_exchanged:
            self._buffers.leave(self.replica)
        table = self._with_sums(table) if self._iteration.weighted else table
        if ends_window:
            self._exchange.send(table, is_before_update=is_before_update)
            self.has_message = True
        else:
            self._exchange.keep_losses(table)
            if self._buffers.is_exchanged:
                self._buffers.enter(self._first)
        rng.reseed(self._after.at(self._number))

    def drop_window(self) -> None:
        """End a window without an update: commit the buffers of replica 0."""
        self._exchange.drop_window()

    def check_stop(self, error: StopIteration) -> str:
        """Refuse it with several processes, because the others would not stop."""
        if self._replicas.has_single_process:
            return "a hook ends epochs by StopIteration"
        raise UsageError(
            "A hook must not raise StopIteration when several processes train: the others would "
            "wait for this one. End the run with Context.request_stop(...), which takes effect on "
            "all processes, or train in one process."
        ) from error

    def count_idle(self, num_shares: int) -> int:
        """With a sharded model, return how many more replicas another process has."""
        if not self.keeps_batches:
            return 0
        return self._replicas.find_largest(num_shares) - num_shares

    def begin_share(self, replica: int, seed: Seed) -> None:
        self.replica = replica
        self.is_first, self.is_last = replica == self._first, replica == self._last
        seed(replica)

    def end_shares(self, seed: Seed) -> None:
        """Restore the random numbers of the hooks: other processes may have run more replicas."""
        seed(None)


@final
class WindowExchange:
    """Sends and receives the message of a window.

    Args:
        replicas: the replicas of the run.
        agreement: sends and receives the flags of the run.

    Attributes:
        buffers: the buffers of the replicas.
    """

    def __init__(self, replicas: Replicas, agreement: Agreement) -> None:
        self.buffers = ReplicaBuffers(replicas)
        self._replicas = replicas
        self._agreement = agreement
        self._tables: list[dict[str, Any]] = []
        self._means: dict[str, Tensor] | None = None
        self._is_final = False
        self._shown: dict[str, Any] = {}

    def keep_losses(self, table: Mapping[str, Any]) -> None:
        """Keep a copy of the losses of a turn.

        Raises:
            UsageError: if they cannot be averaged.
        """
        # Another turn or a commit may change a tensor that the table holds.
        kept: dict[str, Any] = {}
        for name, loss in table.items():
            if isinstance(loss, tuple):
                kept[name] = loss
                continue
            is_tensor = isinstance(loss, Tensor)
            is_number = loss.numel() == 1 if is_tensor else isinstance(loss, int | float)
            if not is_number or (type(loss) is not Tensor and is_sharded(loss)):
                raise make_loss_error(name, loss)
            kept[name] = loss.detach().clone() if is_tensor else loss
        self._tables.append(kept)

    def reopen(self) -> None:
        """Begin the last turn of an iteration again: its losses differ from those sent."""
        del self._tables[len(self._replicas.local_replicas) - 1 :]
        self._means = None

    def send(self, table: Mapping[str, Any], *, is_before_update: bool) -> None:
        """End a window and send its message with the next sum of gradients.

        Args:
            table: the losses of the last turn.
            is_before_update: whether an update follows, with hooks that could change the losses.
        """
        # Losses arrive late from an accelerator, and the gradients must not wait for them.
        is_near = self._replicas.device.type == "cpu"
        has_losses = not is_before_update or self._agreement.keeps_losses
        if has_losses:
            self.keep_losses(table)
            self._is_final, self._shown = not is_before_update, dict(table)
        if self.buffers.is_exchanged:
            self.buffers.commit()
        is_alone = self._replicas.has_single_process
        has_changed, content = (False, NOTHING) if is_alone else self.buffers.write()
        flags = self._agreement.announce(is_before_update=is_before_update)
        losses = self._tables if has_losses and is_near else None
        self._replicas.send((has_changed, *flags), losses, content)

    def receive(self) -> None:
        """Receive the messages of all processes and put the buffers of replica 0 in place."""
        received = self._replicas.receive()
        has_changed, *flags = received.flags
        if not self._replicas.has_single_process:
            self.buffers.read(received.content, has_changed=has_changed)
        self._agreement.listen(flags)
        self._means = received.means
        if not self._is_final and not self._agreement.keeps_losses:
            # A new loop may change the losses: they are exchanged at the end.
            self.reopen()

    def drop_window(self) -> None:
        """End a window without an update, after its last iteration."""
        self.buffers.commit()
        self.buffers.exchange()

    def pop_means(self, table: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the mean losses of an iteration, and begin the next one.

        Args:
            table: the losses of the last turn, unless they were kept.

        Raises:
            UsageError: if the losses have changed since they were sent.
        """
        means, shown = self._means, self._shown
        if means is not None:
            is_same = [*map(id, table.values())] == [*map(id, shown.values())]
            if not is_same or [*table] != [*shown]:
                raise _make_change_error(table, shown)
        else:
            if len(self._tables) < len(self._replicas.local_replicas):
                self.keep_losses(table)
            means = self._replicas.mean_losses(self._tables)
        self._tables, self._means = [], None
        return means


def _make_change_error(table: Mapping[str, Any], shown: Mapping[str, Any]) -> UsageError:
    names = sorted(x for x in {**table, **shown} if table.get(x) is not shown.get(x))
    return UsageError(
        f"{names} in Model.loss_items changed after the losses of the window were sent with its "
        "gradients, outside of an event: in the step of an optimizer or a scheduler, or in a "
        "method marked with @asks_nothing. Change them in on_optimizer_step_end, and remove the "
        "@asks_nothing mark."
    )


def make_loss_error(name: str, loss: Any) -> UsageError:
    """Return the error for a loss of the model's table that cannot be averaged."""
    shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    remedy = "Keep it in an attribute of another name"
    if is_sharded(loss):
        shown = "one that was computed of shards, in an order that depends on the processes"
        remedy = "Compute it in the forward of the module that holds the parameters"
    return UsageError(
        f"Model.loss_items[{name!r}] must be a number or a tensor of one element, because it is "
        f"averaged over replicas, got {shown}. {remedy}."
    )
