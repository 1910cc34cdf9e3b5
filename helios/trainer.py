"""The ``Trainer``: train, validate, test and predict."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from helios.best import Scores
from helios.checkpoint.file_names import find_last_checkpoint
from helios.checkpoint.loading import (
    get_trainer_safe_types_for_load,
    register_trainer_types_for_safe_load,
)
from helios.checkpoint.store import CheckpointStore
from helios.core.loss_means import as_numbers
from helios.counters import Phase, TrainingState, TrainingUnit
from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import Interrupted, UsageError
from helios.launch.rank import refuse_nested_start
from helios.ledger.compare import Replay
from helios.loops.fit import FitLoop
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.run_parts import RunParts
from helios.start.launch import perform
from helios.start.objects import EvaluationRoot, PluginTable, Roots, check_subjects
from helios.start.options import NO_LENGTH, Options, with_known_arguments
from helios.start.origin import Choice
from helios.start.replay import ReplayOptions, find_replay
from helios.start.run import Run, only_call
from helios.start.signals import Signals, find_swallowed, raise_interrupted
from helios.start.trained_model import TrainedModel

if TYPE_CHECKING:
    from helios.find_lr import LearningRates

__all__ = [
    "Trainer",
    "TrainingState",
    "TrainingUnit",
    "find_last_checkpoint",
    "get_trainer_safe_types_for_load",
    "register_trainer_types_for_safe_load",
]


class Trainer:
    """Train, validate, test and predict; resume automatically.

    Pass arguments by name. The historical ones may also be passed by position.

    Args:
        run_name: name of logs and checkpoints; by default the model's ``save_name``.
        train_unit: unit of ``total_steps`` and the frequencies: epochs or optimizer steps, which
            ``"iteration"`` and ``"step"`` both mean.
        total_steps: length of the run in that unit; ``float("inf")`` for no limit. New scripts pass
            ``max_epochs`` or ``max_steps``; with ``total_steps``, ``"auto"`` means never.
        valid_frequency: validate every N epochs or steps; ``None`` for never. ``"auto"`` is every
            epoch, or every 1,000 steps of a stream without a length; never with ``total_steps``.
        chkpt_frequency: write a checkpoint every N epochs or steps, or every ``"10min"``; needs
            ``chkpt_root``. ``"auto"`` is after each epoch and validation, and at least every ten
            minutes.
        print_frequency: log losses every N iterations, as ``current_iteration`` counts them.
            ``"auto"`` is every 50 for TensorBoard and loggers, and about every 30 seconds on the
            screen.
        accumulation_steps: micro-batches per optimizer step.
        enable_cudnn_benchmark: let cuDNN benchmark its algorithms, in training only.
        enable_deterministic: require deterministic algorithms, on the CPU too.
        early_stop_cycles: patience in validations: stop after N in a row without a better score.
        use_cpu: True for the CPU; False requires a GPU; ``None`` uses a GPU if there is one.
        gpus: ids of the GPUs to use.
        random_seed: seed of the run; ``None`` for 6691.
        enable_tensorboard: write scalars to ``run_path`` for TensorBoard.
        enable_file_logging: write a log file to ``log_path``.
        capture_warnings: write Python's warnings to the log.
        enable_progress_bar: show progress bars, with losses, speed, time left and peak memory.
        chkpt_root: folder of all runs; checkpoints are written to ``chkpt_root/<save_name>``.
        log_path: folder of log files.
        run_path: folder of TensorBoard runs.
        src_root: package to import at the start: its modules fill the registries.
        import_prefix: prefix of its modules.
        print_banner: log versions, device, plan, model and data at the first start.
        max_epochs: length of the run in epochs, which frequencies count then.
        max_steps: length in optimizer steps; with ``max_epochs``, whichever comes first ends the
            run.
        engine: your own engine, with its device.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: the type of the parameters, autocast, or
            autocast with loss scaling.
        plugins: plugins to register, in this order.
        store: how checkpoints are written and kept. With ``max_epochs`` or ``max_steps``, ``None``
            keeps the newest three, and the best by ``EarlyStopping``.
        signals: signals on which ``fit`` saves and ends, and how; ``None`` for ``Signals()``.
        num_replicas: data-parallel replicas, which define the run; ``None`` for the number of
            processes. Fixed at the first start.
        nproc: processes that run the replicas, at most ``num_replicas``: on the CPU, or one per
            GPU (``None``: all selected GPUs). Under torchrun and srun, these set the number.
        sharding: ``"full"`` shards parameters, gradients and optimizer state over the processes.
        init: ``"keyed"`` initializes module by module, so that no process holds the whole model.
        clip_norm: maximum 2-norm of the gradients of a step, in automatic mode.
        clip_value: maximum magnitude of a gradient, element by element, in automatic mode.
        resume: ``"auto"`` continues the run, from its newest checkpoint; ``"never"`` starts a new
            run at every call and moves existing files to ``before-<date>/``; a path continues from
            that file.
        allow_changes: names of settings that may have changed since the checkpoint.
        on_incomplete: ``"raise"`` for errors: a ``StateError`` instead of a checkpoint that lacks
            state, and a ``RunMismatchError`` if the data is not that of the run, or if a resumed
            run has a lower level of reproducibility than before.
        ledger: ``"steps"`` for one line per iteration, in ``ledger.jsonl``, if checkpoints are
            written; ``"off"`` writes neither that nor ``run.jsonl``.
        skip_batches: numbers of batches to skip, counted from 1 over all epochs.
        sanity_steps: batches to validate before training, of each loader, at the start of a new
            run, without side effects; 0 for none.
        batch_limits: maximum number of batches, by phase: ``{Phase.TRAINING: 10}``, or
            ``{"training": 10}``.
        params: values that also define the run, such as ``{"lr": 0.1}``: a mapping, a dataclass or
            a namespace of plain values. Another value stops a resume.
        max_restarts: restarts from the newest checkpoint after one of the ``nproc`` processes has
            failed. An interruption or a time limit is not a failure.
        hang_timeout: end after N seconds without progress: every process writes its stacks to the
            run's folder and exits with 75. ``None`` for never.

    Attributes:
        model: the model of the last call of fit, validate, test or predict.
        datamodule: the data module of the last call.
        plugins: the plugins by id; ``trainer.plugins[id] = plugin`` registers one.
        train_exceptions: exception types that :meth:`fit` does not log.
        test_exceptions: exception types that the other calls do not log.
        validate_loop, test_loop, predict_loop: the loops of these calls; you may replace them.

    Raises:
        ArgumentError: if a value is invalid (a ``ValueError``).
        UsageError: if ``use_cpu=False`` finds no GPU (a ``RuntimeError``).
    """

    validate_loop = EvaluationRoot(Phase.VALIDATION)
    test_loop = EvaluationRoot(Phase.TESTING)
    predict_loop = EvaluationRoot(Phase.PREDICTION)
    _exit_code = 0

    @with_known_arguments
    def __init__(
        self,
        run_name: str = "",
        train_unit: TrainingUnit | Literal["epoch", "iteration", "step"] = TrainingUnit.EPOCH,
        total_steps: int | float = NO_LENGTH,
        valid_frequency: int | Literal["auto"] | None = "auto",
        chkpt_frequency: int | str | None = "auto",
        print_frequency: int | Literal["auto"] | None = "auto",
        accumulation_steps: int = 1,
        enable_cudnn_benchmark: bool = False,
        enable_deterministic: bool = False,
        early_stop_cycles: int | None = None,
        use_cpu: bool | None = None,
        gpus: list[int] | None = None,
        random_seed: int | None = None,
        enable_tensorboard: bool = False,
        enable_file_logging: bool = False,
        capture_warnings: bool = False,
        enable_progress_bar: bool = False,
        chkpt_root: str | Path | None = None,
        log_path: str | Path | None = None,
        run_path: str | Path | None = None,
        src_root: str | Path | None = None,
        import_prefix: str = "",
        print_banner: bool = True,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        engine: Engine | None = None,
        precision: Precision | Literal["fp32", "bf16", "fp16"] | None = None,
        plugins: Sequence[Plugin] = (),
        store: CheckpointStore | None = None,
        signals: Signals | None = None,
        num_replicas: int | None = None,
        nproc: int | None = None,
        sharding: Literal["none", "full"] = "none",
        init: Literal["setup", "keyed"] = "setup",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        resume: str | Path = "auto",
        allow_changes: Sequence[str] = (),
        on_incomplete: Literal["warn", "raise"] = "warn",
        ledger: Literal["steps", "off"] = "steps",
        skip_batches: Sequence[int] = (),
        sanity_steps: int = 0,
        batch_limits: Mapping[Phase, int] | Mapping[str, int] | None = None,
        params: Any = None,
        max_restarts: int = 0,
        hang_timeout: float | None = None,
    ) -> None:
        self._options = Options.of(locals())
        self.train_exceptions: list[type[BaseException]] = []
        self.test_exceptions: list[type[BaseException]] = []
        self.plugins = PluginTable()
        self._run: Run | None = None
        self._trained: TrainedModel | None = None
        self.model: Model | None = None
        self.datamodule: DataModule | None = None
        self.roots = Roots()
        for plugin in self._options.plugins:
            self.register_plugin(plugin)

    @property
    def gpu_ids(self) -> list[int]:
        """Ids of the GPUs in use; empty on the CPU."""
        return self._options.gpu_ids

    @property
    def global_rank(self) -> int:
        """Rank of this process among all, from 0; also 0 in the process that starts ranks."""
        return 0 if self._run is None else self._run.info.rank

    rank = global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, from 0."""
        return 0 if self._run is None else self._run.info.local_rank

    @property
    def queue(self) -> Any:
        """Queue that sends items from ranks to the process that started them.

        Ranks put items into it. Read them from another thread while the ranks run, or afterwards.
        ``None`` before any ranks were started, and under torchrun and srun.
        """
        return None if self._run is None else self._run.queue

    @property
    def _parts(self) -> RunParts | None:
        return self._run.parts if self._run is not None and self._run.is_live else None

    @property
    def exit_code(self) -> int:
        """Exit code for the script after ``fit``; ``helios.Interrupted`` has it, too.

        0 if the run is finished, 1 after an error. After an interruption 75 ("try again") if the
        same command would resume from a checkpoint; otherwise that of the signal, such as 130.
        """
        return self._exit_code

    @property
    def fit_loop(self) -> FitLoop:
        """The loop over all epochs; assign your own, or ``connect`` other loops below it."""
        return self.roots.fit

    @fit_loop.setter
    def fit_loop(self, loop: FitLoop) -> None:
        self.roots.replace_fit(loop)

    def register_plugin(self, plugin: Plugin) -> None:
        """Register a plugin under its id, as ``trainer.plugins[id] = plugin`` does.

        Raises:
            DuplicateError: if the id is taken (a ``KeyError``).
            ArgumentTypeError: if the parameters of a method differ from those of its event.
            ArgumentError: if another plugin overrides the same ``process_*_batch``.
        """
        self.plugins[plugin.plug_id] = plugin

    def request_checkpoint(self) -> None:
        """Request a checkpoint at the next safe point.

        Raises:
            UsageError: if ``fit`` is not running.
        """
        self._require_run("request_checkpoint").context.request_checkpoint()

    def request_stop(self, reason: str = "request_stop was called") -> None:
        """Request to finish the run at the next safe point.

        Raises:
            UsageError: if ``fit`` is not running.
        """
        self._require_run("request_stop").context.request_stop(reason)

    def _require_run(self, method: str) -> RunParts:
        if self._parts is None:
            raise UsageError(
                f"Trainer.{method}() must be called while fit runs: in a hook, a step or a plugin."
            )
        return self._parts

    def fit(self, model: Model, datamodule: DataModule) -> bool:
        """Train a model from the start, or from the newest checkpoint of its run.

        These hooks and methods are called, in this order. The page on hooks lists the receivers of
        each event, and :meth:`validate` shows a validation pass::

            prepare_data()
            setup()
            if the run has ended before: return
            if the run resumes:
                on_load_checkpoint(checkpoint)
                on_checkpoint_loaded()
            on_fit_start()
            if sanity_steps is set and the run is new:
                on_sanity_check_start()
                a validation pass
                on_sanity_check_end()
            on_training_start()
            model.train()
            if the run resumes:
                on_training_resume(state)
                if a last poll followed the checkpoint: a last poll
            for each epoch:
                if the run does not resume inside it: on_training_epoch_start(current_epoch)
                for each batch:
                    if a window begins: on_training_step_start(state)
                    if StopIteration is raised: break
                    on_training_batch_start(state)
                    if StopIteration is raised: break
                    for each replica that the process runs:
                        process_training_batch(batch, state)
                        on_forward_start(context)
                        train_step(batch, state)
                        on_forward_end(context)
                        if train_step returns a loss:
                            on_backward_start(loss)
                            engine.backward_loss(loss)
                            on_backward_end()
                    if train_step returns a loss and the window ends:
                        on_optimizer_step_start(optimizer)
                        if the step is not skipped:
                            engine.clip_gradients(optimizer)
                            engine.optimizer_step(optimizer)
                        on_before_zero_grad(optimizer)
                        engine.zero_grad(optimizer)
                        on_optimizer_step_end(optimizer, committed)
                    on_training_batch_end(state, should_log)
                    if the window ends: on_training_step_end(state, committed)
                    if should_log: on_log(scalars, state)
                    should_training_stop()
                    if the window ends:
                        if steps are counted and a validation is due:
                            a validation cycle:
                                a validation pass
                                if there are scores: on_log(scalars, state)
                                have_metrics_improved()
                        if a checkpoint is due: on_save_checkpoint(checkpoint)
                        if steps are counted and a validation was due: a last poll
                        if the run is interrupted: return
                if epochs are counted and a validation is due: a validation cycle
                on_training_epoch_end(current_epoch)
                if epochs are counted and the epoch is complete:
                    if a checkpoint is due: on_save_checkpoint(checkpoint)
                    a last poll:
                        should_training_stop()
                        if that ends the run: on_save_checkpoint(checkpoint)
                    if the run is interrupted: return
            on_training_end()
            finally:
                if an exception was raised: on_exception(exception)
                if a validation pass was cut off: model.train()
                engine.teardown()
                if on_fit_start was called and nothing was raised: on_fit_end()
                teardown()

        Args:
            model: the model; its ``save_name`` names the folder of the run.
            datamodule: its data.

        Returns:
            True if the run is finished, now or earlier; False only after an interruption with
            ``Signals(on_interrupt="return")``.

        Raises:
            Interrupted: after a signal or a time limit; the script ends with :attr:`exit_code`. In
                an interactive session, a ``KeyboardInterrupt``.
            HeliosError: see ``helios.errors``.
            Exception: any exception of user code, after the teardown.
        """
        self._exit_code = 0
        try:
            is_finished: bool = self._call(Phase.TRAINING, model, datamodule)
        except BaseException:
            self._exit_code = self._exit_code or 1
            raise
        return is_finished

    def validate(
        self, model: Model, datamodule: DataModule, *, checkpoint: Choice = "auto"
    ) -> Scores:
        """Validate a checkpoint once; returns its scores, which are in ``model.metrics``, too.

        ``checkpoint`` is as in :meth:`test`. These hooks and methods are called, in this order::

            prepare_data()
            setup()
            if there is data:
                a validation pass:
                    model.eval()
                    on_validation_start(validation_cycle)
                    for each batch of each loader:
                        on_validation_batch_start(step)
                        for each replica of the process that has a batch:
                            process_validation_batch(batch, step)
                            on_forward_start(context)
                            valid_step(batch, step)
                            on_forward_end(context)
                        on_validation_batch_end(step)
                    model.train()
                    on_validation_end(validation_cycle)
            finally:
                if an exception was raised: on_exception(exception)
                if a validation pass was cut off: model.train()
                engine.teardown()
                teardown()
        """
        self._call(Phase.VALIDATION, model, datamodule, checkpoint=checkpoint)
        return Scores(as_numbers(model.metrics))

    def test(self, model: Model, datamodule: DataModule, *, checkpoint: Choice = "auto") -> Scores:
        """Test a checkpoint; returns its scores, which are in ``model.test_scores``, too.

        ``checkpoint`` is ``"newest"``, ``"best"`` (by the score of ``KeepBest``, or else of
        ``EarlyStopping``), a file, or ``None`` for no checkpoint. If it is omitted after
        :meth:`fit` has finished this model in this process, the model is tested as it is: nothing
        is set up or loaded. Otherwise it is the newest one, or the file of ``resume`` if this
        trainer has not trained. Without a checkpoint, a model that this trainer has trained is
        tested as it is. Any other model needs its own ``load_for_testing``, or ``checkpoint=None``:
        then it is tested as ``setup`` and ``load_for_testing`` make it. The log says which weights
        are tested.

        Everything that hooks can reach, such as optimizers and attributes, is as it was when the
        checkpoint was written. What cannot be restored, such as an optimizer that ``setup`` does
        not create, is removed from the model, with a warning.

        Raises:
            CheckpointError: if there is no checkpoint; it lists the runs below ``chkpt_root``.

        The order is that of :meth:`validate`, with ``testing`` for ``validation`` and ``test_step``
        for ``valid_step``.
        """
        self._call(Phase.TESTING, model, datamodule, checkpoint=checkpoint)
        return Scores(as_numbers(model.test_scores))

    def predict(
        self, model: Model, datamodule: DataModule, *, checkpoint: Choice = "auto"
    ) -> list[Any]:
        """Return what ``predict_step`` returns for each batch, in the order of the data.

        With several loaders, the result is a list of such lists, one for each loader.

        The order is that of :meth:`validate`, with ``predicting`` for ``validation`` and
        ``predict_step`` for ``valid_step``; ``checkpoint`` is as in :meth:`test`.
        """
        found = self._call(Phase.PREDICTION, model, datamodule, checkpoint=checkpoint)
        predictions: list[Any] | None = found
        return [] if predictions is None else predictions

    def replay(
        self,
        model: Model,
        datamodule: DataModule,
        *,
        start: int | None = None,
        stop: int | None = None,
    ) -> Replay:
        """Repeat a part of a run, and compare each iteration with the run's ledger.

        Pass the model, the data and the options of the run. It is trained as after a resume, with
        the events of :meth:`fit`, until a line differs or ``stop`` is reached. Nothing is written:
        no checkpoint, log or ledger. The run may continue meanwhile. Your own loggers can check
        ``context.is_replay``.

        Args:
            model: the model of the run.
            datamodule: its data.
            start: begin at the newest checkpoint at or before this iteration; 0 for the beginning
                of the run. By default, the oldest checkpoint, or the beginning without one.
            stop: the last iteration to compare; by default, the last one in the ledger.

        Raises:
            ArgumentError: for iterations that the ledger does not hold (a ``ValueError``).
            LedgerError: if the run has no ledger, or one that cannot be used.
            CheckpointError: if there is no usable checkpoint to begin with.
            UsageError: below the level ``restart``, or after an interruption.
            Exception: any exception of user code.
        """
        asked = ReplayOptions(start, stop)
        found: Replay = self._call(Phase.TRAINING, model, datamodule, asked=asked)
        return found

    def find_lr(
        self,
        model: Model,
        datamodule: DataModule,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        num_steps: int = 100,
        loss: str = "loss",
    ) -> LearningRates:
        """Search for a learning rate: train a few steps while it grows, then restore everything.

        The rate of the first group of each optimizer grows exponentially; other groups keep their
        ratio to it. Schedulers have no effect, and the search ends early once the loss diverges.

        Model, data, generators and folders are restored, also after an error; data sets and
        networks in memory are copied for that. Of the plugins, only the one that maps batches takes
        part. It runs in this process, with the replicas of the run, or in all processes of a
        launcher. ``setup`` and the events of training are called, except those of validations and
        checkpoints; files that your own hooks write stay.

        Args:
            model: the model, whose ``setup`` builds the optimizers.
            datamodule: its data.
            lowest: the first rate.
            highest: the last rate.
            num_steps: the maximum number of steps.
            loss: the name of the loss, for a model with several.

        Returns:
            The rates and losses, ``suggestion``, and ``plot()``.

        Raises:
            ArgumentError: if a value is invalid, or the model has no such loss (a ``ValueError``).
            Interrupted: after a signal.
            Exception: any exception of user code.
        """
        from helios.find_lr import RangeTest, find_rates

        def train(options: Options, plugins: PluginTable) -> None:
            before = {name: each for name, each in vars(self).items() if name != "_exit_code"}
            try:
                self._call(Phase.TRAINING, model, datamodule, trial=(options, plugins))
            finally:
                vars(self).update(before)

        return find_rates(
            model,
            datamodule,
            RangeTest(lowest, highest, num_steps, loss),
            train,
            options=self._options,
            plugins=[*self.plugins.values()],
            loop=self.roots.fit,
        )

    def _call(
        self,
        phase: Phase,
        model: Model,
        datamodule: DataModule,
        *,
        checkpoint: Choice = "auto",
        asked: ReplayOptions | None = None,
        trial: tuple[Options, PluginTable] | None = None,
    ) -> Any:
        refuse_nested_start()
        result: Any = find_swallowed(self._options.signals)
        if result is None:
            with only_call():
                check_subjects(model, datamodule)
                self.model, self.datamodule = model, datamodule
                options, plugins = trial or (self._options, self.plugins)
                run = self._make_run(phase, checkpoint, options, plugins)
                result = self._perform(run, asked)
        if isinstance(result, Interrupted):
            self._exit_code = result.code
            is_fit, signals = phase is Phase.TRAINING, self._options.signals
            if not (is_fit and signals.on_interrupt == "return"):
                raise_interrupted(result, signals)
            result = False
        return result

    def _make_run(
        self, phase: Phase, checkpoint: Choice, options: Options, plugins: PluginTable
    ) -> Run:
        assert self.model is not None
        assert self.datamodule is not None
        is_fit = phase is Phase.TRAINING
        if is_fit:
            options.require_length()
        self._trained = None if is_fit else self._trained
        self._run = Run(
            phase,
            options,
            plugins,
            self.roots,
            self.model,
            self.datamodule,
            passed_through=tuple(self.train_exceptions if is_fit else self.test_exceptions),
            checkpoint=checkpoint,
            last=self._trained,
            before=self._run,
        )
        for owner in self._run.objects:
            owner.trainer = self
        return self._run

    def _perform(self, run: Run, asked: ReplayOptions | None) -> Any:
        """Return the result of a call, or what has interrupted it."""
        try:
            if asked is not None:
                find_replay(run, asked)
            result = perform(run)
        except Interrupted as error:
            return error
        except KeyboardInterrupt:
            self._exit_code = run.find_code(signal.SIGINT)
            raise
        if run.phase is Phase.TRAINING:
            self._trained = run.trained
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a rank: what ``fit`` has left belongs to this process."""
        return {**vars(self), "_trained": None}
