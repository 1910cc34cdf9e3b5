"""The events that plugins and models receive, as methods that editors and type checkers know.

Override what you need. A method that is not overridden is not called, so it costs nothing. The
table in ``helios.hooks.events`` defines the order of receivers; a test keeps the two in sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from helios.counters import TrainingState
from helios.hooks.context import Context
from helios.hooks.events import silent


class Hooks:
    """Base of ``Plugin`` and ``Model``: one method for each event that both receive.

    ``state`` is the live :class:`~helios.state.TrainingState`: copy what you keep. Losses, batches
    and optimizers belong to the run: change them only where a method says that you may.
    """

    @silent
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called when ``fit`` resumes, with the checkpoint that was read, before it is applied.

        Args:
            checkpoint: the content of the file. What an override adds under keys of its own in
                :meth:`on_save_checkpoint` is found here.
        """

    @silent
    def on_checkpoint_loaded(self) -> None:
        """Called when ``fit`` resumes and all state but that of the random generators is back."""

    @silent
    def on_fit_start(self) -> None:
        """Called once by ``fit`` when everything is set up and loaded."""

    @silent
    def on_fit_end(self) -> None:
        """Called when ``fit`` returns, finished or interrupted, but not after an exception."""

    @silent
    def on_training_start(self) -> None:
        """Called when the training starts or resumes, before ``model.train()``."""

    @silent
    def on_training_resume(self, state: TrainingState) -> None:
        """Called after :meth:`on_training_start` when the training resumes from a checkpoint.

        Args:
            state: the counters, as the checkpoint had them.
        """

    @silent
    def on_training_end(self) -> None:
        """Called when the run is finished; not after an interruption or an exception."""

    @silent
    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Called when an epoch starts; not again after a resume inside the epoch.

        Args:
            current_epoch: number of the epoch, from 1.
        """

    @silent
    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Called when an epoch has ended, before its checkpoint where epochs are counted.

        Args:
            current_epoch: number of the epoch, from 1.
        """

    @silent
    def on_training_step_start(self, state: TrainingState) -> None:
        """Called before the first batch of an accumulation window.

        Raise ``StopIteration`` to end the epoch here.

        Args:
            state: the counters.
        """

    @silent
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Called after the last batch of an accumulation window.

        Args:
            state: the counters.
            committed: whether the optimizer step was made; False if it was skipped.
        """

    @silent
    def on_training_batch_start(self, state: TrainingState) -> None:
        """Called when a batch was fetched, before it is moved to the device.

        Raise ``StopIteration`` to end the epoch here.

        Args:
            state: the counters, which include this batch.
        """

    @silent
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Called when a training batch is done.

        Args:
            state: the counters.
            should_log: whether ``print_frequency`` is due.
        """

    @silent
    def on_forward_start(self, context: Context) -> None:
        """Called right before a training, validation, test or prediction step.

        With several replicas it is called once for each replica of the process.

        Args:
            context: the run, with the batch on the device.
        """

    @silent
    def on_forward_end(self, context: Context) -> None:
        """Called right after a step, with its outputs and its loss in the context.

        Args:
            context: the run.
        """

    @silent
    def on_backward_start(self, loss: Tensor) -> None:
        """Called before the backward pass of a step that returns its loss.

        Args:
            loss: the scalar loss, already divided by ``accumulation_steps``.
        """

    @silent
    def on_backward_end(self) -> None:
        """Called after the backward pass of a step that returns its loss."""

    @silent
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Called before an optimizer step: gradients are averaged, and not yet clipped.

        This is the last place to call ``context.skip_step``. Not called where ``train_step``
        makes the step itself.

        Args:
            optimizer: the optimizer that steps.
        """

    @silent
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called right after the optimizer and its schedulers have moved.

        Args:
            optimizer: the optimizer, whose gradients are still there.
        """

    @silent
    def on_optimizer_step_end(self, optimizer: Optimizer, committed: bool) -> None:
        """Called after an optimizer step, when its gradients have been cleared.

        Args:
            optimizer: the optimizer.
            committed: whether the step was made; False if it was skipped.
        """

    @silent
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Called with every set of numbers that is logged: losses, scores, ``context.log``.

        Args:
            scalars: the numbers by name. Losses are means, over micro-batches, replicas and the
                iterations since they were logged before.
            state: the counters.
        """

    @silent
    def should_training_stop(self) -> bool:
        """Return whether training should end regularly after the current window.

        Called after each batch, after each validation and at the end of each epoch; it is enough
        if one receiver returns True.
        """
        return False

    @silent
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the content of a checkpoint that is written next.

        Args:
            checkpoint: the content; an override may add keys of its own.
        """

    @silent
    def on_validation_start(self, validation_cycle: int) -> None:
        """Called when a validation starts, after ``model.eval()``.

        Args:
            validation_cycle: number of the validation, from 0.
        """

    @silent
    def on_validation_batch_start(self, step: int) -> None:
        """Called when a validation batch was fetched.

        Args:
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
        """

    @silent
    def on_validation_batch_end(self, step: int) -> None:
        """Called when a validation batch is done; arguments as in the start event."""

    @silent
    def on_validation_end(self, validation_cycle: int) -> None:
        """Called when a validation has ended and the modes of the networks are restored.

        Args:
            validation_cycle: number of the validation, from 0.
        """

    @silent
    def on_testing_start(self) -> None:
        """Called when a test starts, after ``model.eval()``."""

    @silent
    def on_testing_batch_start(self, step: int) -> None:
        """Called when a test batch was fetched; ``step`` as in validations."""

    @silent
    def on_testing_batch_end(self, step: int) -> None:
        """Called when a test batch is done; ``step`` as in validations."""

    @silent
    def on_testing_end(self) -> None:
        """Called when a test has ended."""

    @silent
    def on_predicting_start(self) -> None:
        """Called when a prediction starts, after ``model.eval()``."""

    @silent
    def on_predicting_batch_start(self, step: int) -> None:
        """Called when a batch to predict was fetched; ``step`` as in validations."""

    @silent
    def on_predicting_batch_end(self, step: int, prediction: Any) -> None:
        """Called when a batch was predicted.

        Args:
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
            prediction: what ``predict_step`` returned.
        """

    @silent
    def on_predicting_end(self) -> None:
        """Called when a prediction has ended."""

    @silent
    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception leaves the call, before anything is torn down.

        Args:
            exception: the exception, which is raised again afterwards.
        """

    @silent
    def teardown(self) -> None:
        """Called at the end of every call, also after an exception: release what you took."""
