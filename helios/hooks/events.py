"""The events: typed methods of :class:`Hooks`, each with a decorator that names its receivers.

The table of events, ``docs/hooks.md`` and the bus are made from these methods, in the order in
which the events occur.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from helios.counters import TrainingState

if TYPE_CHECKING:
    from helios.hooks.context import Context

Method = TypeVar("Method", bound=Callable[..., object])
Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Verb(Enum):
    """The way in which an event is emitted."""

    EMIT = "call all receivers"
    ASK = "true if any receiver returns True"
    TRANSFORM = "its one owner maps a batch"
    CALL = "a method that does the work itself"


class Receiver(Enum):
    """Receivers of an event; the order of the table's column is the order of the calls."""

    PLUGIN = "plugins, in order of registration"
    DATA = "data module"
    MODEL = "model"
    ENGINE = "engine"
    MONITOR = "plugins with monitor = True"


P, D, M, E, MONITOR = (
    Receiver.PLUGIN,
    Receiver.DATA,
    Receiver.MODEL,
    Receiver.ENGINE,
    Receiver.MONITOR,
)


@dataclass(frozen=True)
class Event:
    """An event, from the decorator, the signature and the docstring of its method.

    Attributes:
        name: name of the method that receives it.
        parameters: names of its arguments after ``self``.
        receivers: who may receive it, in the order of the calls.
        summary: when it occurs, or what it does: the first line of its docstring.
        verb: what happens then.
        optional: names of further arguments, for methods that take them.
        omittable: those of the parameters, at their end, that a method may leave out.
        scope: the channel that it begins or ends, if any.
    """

    name: str
    parameters: tuple[str, ...]
    receivers: tuple[Receiver, ...]
    summary: str
    verb: Verb = Verb.EMIT
    optional: tuple[str, ...] = ()
    omittable: tuple[str, ...] = ()
    scope: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arguments that every method must take."""
        return self.parameters[: len(self.parameters) - len(self.omittable)]


def silent(method: Method) -> Method:
    """Mark the method of a base class as one that does nothing, so that the bus does not call it.

    A method that overrides it is not marked.
    """
    method.__dict__["_helios_silent"] = method
    return method


def may_omit(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, ...], Result]:
    """Let type checkers accept overrides of a method that leave out arguments."""
    return method


def asks_nothing(method: Method) -> Method:
    """Mark a method that requests no checkpoint, end or skip, and changes no losses.

    The processes of a run then need no further exchange after it. A method that overrides it is not
    marked.
    """
    method.__dict__["_helios_asks_nothing"] = method
    return method


def may_ask(method: Callable[..., object]) -> bool:
    """Return whether a method lacks the mark of :func:`asks_nothing`."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_helios_asks_nothing", None) is not function


def is_silent(method: Callable[..., object]) -> bool:
    """Return whether a method has the mark of :func:`silent`."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_helios_silent", None) is function


def event(
    *receivers: Receiver,
    verb: Verb = Verb.EMIT,
    optional: tuple[str, ...] = (),
    omittable: tuple[str, ...] = (),
    scope: str = "",
) -> Callable[[Method], Method]:
    """Declare a method as an event; the base's own method is not called, except for ``CALL``.

    Args:
        *receivers: as in :class:`Event`, like the others.
        verb: what happens.
        optional: further arguments.
        omittable: arguments that an override may leave out.
        scope: a channel.
    """

    def declare(method: Method) -> Method:
        _, *parameters = inspect.signature(method).parameters
        summary = (method.__doc__ or "").partition("\n")[0]
        name = method.__name__
        names = tuple(parameters)
        found = Event(name, names, receivers, summary, verb, optional, omittable, scope)
        declared = method if verb is Verb.CALL else silent(method)
        declared.__dict__["_helios_event"] = found
        return declared

    return declare


_INDEX = ("dataloader_idx",)


class Hooks:
    """Base of ``Plugin`` and ``Model``: one method for each event.

    Override what you need. A method that is not overridden is not called, so it costs nothing; nor
    is one that the class does not receive. ``state`` is the live
    :class:`~helios.state.TrainingState`: copy values that you keep. Losses, batches and optimizers
    belong to the run: change them only where a method says that you may.
    """

    @event(D, verb=Verb.CALL)
    def prepare_data(self) -> None:
        """Download and prepare files; called once, before everything else."""

    @event(P, D, M, verb=Verb.CALL)
    def setup(self) -> None:
        """Build networks, data sets and the like."""

    @event(P, D, M, E)
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called when ``fit`` resumes, with the checkpoint that was read, before it is applied.

        Args:
            checkpoint: the content of the file, with keys that :meth:`on_save_checkpoint` added.
        """

    @event(P, D, M, E)
    def on_checkpoint_loaded(self) -> None:
        """Called when ``fit`` resumes and all state except random generators is restored."""

    @event(P, M)
    def on_fit_start(self) -> None:
        """Called once by ``fit`` when everything is set up and loaded."""

    @event(P)
    def on_sanity_check_start(self) -> None:
        """Called before the sanity check of a new run; see ``Trainer(sanity_steps=...)``."""

    @event(P)
    def on_sanity_check_end(self) -> None:
        """Called after the sanity check, when everything that it changed is restored."""

    @event(P, M, E, scope="on_loop")
    def on_training_start(self) -> None:
        """Called when training starts or resumes, before ``model.train()``."""

    @event(P, M)
    def on_training_resume(self, state: TrainingState) -> None:
        """Called after :meth:`on_training_start` when training resumes from a checkpoint.

        Args:
            state: the counters, as the checkpoint had them.
        """

    @event(P, M, E, scope="on_epoch")
    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Called when an epoch starts; not again after a resume inside the epoch.

        Args:
            current_epoch: number of the epoch, from 1.
        """

    @event(P, M, scope="on_step")
    def on_training_step_start(self, state: TrainingState) -> None:
        """Called before the first batch of an accumulation window.

        Raise ``StopIteration`` to end the epoch here.

        Args:
            state: the counters.
        """

    @event(P, M, E, scope="on_batch")
    def on_training_batch_start(self, state: TrainingState) -> None:
        """Called when a batch was fetched, before it is moved to the device.

        Raise ``StopIteration`` to end the epoch here.

        Args:
            state: the counters, which include this batch.
        """

    @event(P, verb=Verb.TRANSFORM)
    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        """Return the training batch that the model gets; only one plugin may override this.

        Args:
            batch: the batch of one replica, on the device.
            state: the counters.
        """
        return batch

    @event(P, M, scope="on_model_forward")
    def on_forward_start(self, context: Context) -> None:
        """Called right before a training, validation, test or prediction step.

        With several replicas it is called once for each replica of the process.

        Args:
            context: the run, with the batch on the device.
        """

    @may_omit
    @event(M, verb=Verb.CALL, omittable=("state",))
    def train_step(self, batch: Any, state: TrainingState) -> Any:
        """Train on one batch."""

    @event(P, M, scope="on_model_forward")
    def on_forward_end(self, context: Context) -> None:
        """Called right after a step, with its outputs and its loss in the context.

        Args:
            context: the run.
        """

    @event(P, M, scope="on_model_backward")
    def on_backward_start(self, loss: Tensor) -> None:
        """Called before the backward pass of a step that returns its loss.

        Args:
            loss: the scalar loss, already divided by ``accumulation_steps``.
        """

    @event(P, M, scope="on_model_backward")
    def on_backward_end(self) -> None:
        """Called after the backward pass of a step that returns its loss."""

    @event(P, M, scope="on_optimizer_step")
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Called before an optimizer step, with averaged gradients that are not yet clipped.

        This is the last place to call ``context.skip_step``. Not called if ``train_step`` makes
        the step itself.

        Args:
            optimizer: the optimizer that steps.
        """

    @event(P, M)
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called right after the optimizer and its schedulers have stepped.

        Args:
            optimizer: the optimizer, before its gradients are cleared.
        """

    @event(P, M, scope="on_optimizer_step")
    def on_optimizer_step_end(self, optimizer: Optimizer, committed: bool) -> None:
        """Called after an optimizer step, when its gradients have been cleared.

        Args:
            optimizer: the optimizer.
            committed: whether the step was made; False if it was skipped.
        """

    @event(P, M, E, scope="on_batch")
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Called when a training batch is done.

        Args:
            state: the counters.
            should_log: whether ``print_frequency`` is due.
        """

    @event(P, M, scope="on_step")
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Called after the last batch of an accumulation window.

        Args:
            state: the counters.
            committed: whether the optimizer step was made; False if it was skipped.
        """

    @event(P, M)
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Called with every set of logged numbers: losses, scores, ``context.log``.

        Args:
            scalars: the numbers by name. Losses are means over micro-batches, replicas and the
                iterations since the last log.
            state: the counters.
        """

    @event(P, M, verb=Verb.ASK)
    def should_training_stop(self) -> bool:
        """Return whether training should end after the current window; the run is then finished.

        Called after each batch, after each validation and at the end of each epoch; one receiver
        that returns True is enough.
        """
        return False

    @event(P, M, MONITOR, E, scope="on_epoch")
    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Called when an epoch has ended; before its checkpoint, if the run counts epochs.

        Args:
            current_epoch: number of the epoch, from 1.
        """

    @event(P, D, M, E)
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the content of the checkpoint that is about to be written.

        Args:
            checkpoint: the content; an override may add keys.
        """

    @event(P, M, E, scope="on_loop")
    def on_training_end(self) -> None:
        """Called when the run is finished; not after an interruption or an exception."""

    @event(P, M, E)
    def on_validation_start(self, validation_cycle: int) -> None:
        """Called when a validation starts, after ``model.eval()``.

        Args:
            validation_cycle: number of the validation, from 0.
        """

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_validation_batch_start(self, step: int) -> None:
        """Called when a validation batch was fetched.

        Args:
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
        """

    @event(P, verb=Verb.TRANSFORM, optional=_INDEX)
    def process_validation_batch(self, batch: Any, step: int) -> Any:
        """Return the validation batch that the model gets; only one plugin may override this.

        Args:
            batch: the batch of one replica, on the device.
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
        """
        return batch

    @may_omit
    @event(M, verb=Verb.CALL, optional=_INDEX, omittable=("step",))
    def valid_step(self, batch: Any, step: int) -> Any:
        """Validate one batch, without gradients."""

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_validation_batch_end(self, step: int) -> None:
        """Called when a validation batch is done; arguments as in the start event."""

    @event(P, M, MONITOR, E)
    def on_validation_end(self, validation_cycle: int) -> None:
        """Called when a validation has ended and the modes of the networks are restored.

        Args:
            validation_cycle: number of the validation, from 0.
        """

    @event(M, verb=Verb.CALL)
    def have_metrics_improved(self) -> bool:
        """Return whether the last validation improved on earlier ones; called after each."""
        return True

    @event(P, M, E, scope="on_loop")
    def on_testing_start(self) -> None:
        """Called when a test starts, after ``model.eval()``."""

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_testing_batch_start(self, step: int) -> None:
        """Called when a test batch was fetched; ``step`` as in validations."""

    @event(P, verb=Verb.TRANSFORM, optional=_INDEX)
    def process_testing_batch(self, batch: Any, step: int) -> Any:
        """Return the test batch that the model gets; arguments as in validations."""
        return batch

    @may_omit
    @event(M, verb=Verb.CALL, optional=_INDEX, omittable=("step",))
    def test_step(self, batch: Any, step: int) -> Any:
        """Test one batch, without gradients."""

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_testing_batch_end(self, step: int) -> None:
        """Called when a test batch is done; ``step`` as in validations."""

    @event(P, M, E, scope="on_loop")
    def on_testing_end(self) -> None:
        """Called when a test has ended."""

    @event(P, M, E, scope="on_loop")
    def on_predicting_start(self) -> None:
        """Called when a prediction starts, after ``model.eval()``."""

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_predicting_batch_start(self, step: int) -> None:
        """Called when a batch to predict was fetched; ``step`` as in validations."""

    @event(P, verb=Verb.TRANSFORM, optional=_INDEX)
    def process_predicting_batch(self, batch: Any, step: int) -> Any:
        """Return the batch to predict that the model gets; arguments as in validations."""
        return batch

    @may_omit
    @event(M, verb=Verb.CALL, optional=_INDEX, omittable=("step",))
    def predict_step(self, batch: Any, step: int) -> Any:
        """Return the prediction for one batch, without gradients."""

    @event(P, M, E, optional=_INDEX, scope="on_batch")
    def on_predicting_batch_end(self, step: int, prediction: Any) -> None:
        """Called when a batch was predicted.

        Args:
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
            prediction: what ``predict_step`` returned.
        """

    @event(P, M, E, scope="on_loop")
    def on_predicting_end(self) -> None:
        """Called when a prediction has ended."""

    @event(P, D, M, E)
    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception leaves the call, before anything is torn down.

        Args:
            exception: the exception, which is raised again afterwards.
        """

    @event(P, M)
    def on_fit_end(self) -> None:
        """Called when ``fit`` returns, finished or interrupted, but not after an exception."""

    @event(D, P, M)
    def teardown(self) -> None:
        """Called at the end of every call, also after an exception: release resources."""


EVENTS: dict[str, Event] = {
    name: method.__dict__["_helios_event"]
    for name, method in vars(Hooks).items()
    if inspect.isfunction(method)
}
"""The events by name, in their order."""

CHANNELS = tuple(dict.fromkeys(event.scope for event in EVENTS.values() if event.scope))
"""The scopes that events begin and end, from the outermost one."""
