"""The log of a run, and the places of its logs: files, events for TensorBoard, the screen."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.best import BestRule, BestValidation
from helios.checkpoint import file_names
from helios.checkpoint.record import Record
from helios.checkpoint.retention import KeepBest
from helios.core.environment import get_env_info_str
from helios.core.utils import parameters_of
from helios.core.wrappers import class_of
from helios.counters import Phase, TrainingState
from helios.data.source import Source
from helios.data.steps import StepsSource
from helios.listeners import RunListener, Validated
from helios.model.model import Model, is_own
from helios.model.schedulers import Schedulers, find_epoch_like
from helios.schedule import Schedule
from helios.start.objects import own_methods
from helios.start.options import Options
from helios.terminal import root_logger as log
from helios.text import count_text, number_text, size_text, with_step

if TYPE_CHECKING:
    from helios.start.level import Reproducibility
    from helios.start.origin import Origin
    from helios.start.run import Run
    from helios.start.training import Training

_LOGGER = logging.getLogger(__name__)


def show_banner(run: Run, origin: Origin, level: Reproducibility, schedule: Schedule) -> None:
    """Log the banner, with what the model appends to it; at a resume, one line of it.

    The line of a resume is logged whether a banner is wanted or not.
    """
    options, replicas, loaded = run.options, run.replicas, origin.loaded
    if loaded is None and not options.print_banner:
        return
    lines = {
        "run": run.name,
        "seed": f"{options.seed}{'' if options.random_seed is not None else ' (the default)'}",
    }
    if loaded is None:
        # A resume does not repeat it: it is that of the first start, or named where it differs.
        lines |= {
            "plan": _describe_plan(run, schedule),
            "model": describe_model(run.model),
            "data": _describe_data(run.sources),
        }
    count = count_text(replicas.num_processes, "process")
    lines["processes"] = f"{count}, {count_text(replicas.num_replicas, 'replica')}"
    lines |= level.describe_shortfall()
    rows = [f"{label}: {fact}" for label, fact in lines.items()]
    if loaded is None:
        text = "\n".join([get_env_info_str(), "start: from the beginning", *rows])
    else:
        text = f"Resumed from {loaded.path.name}; {'; '.join(rows)}."
    _LOGGER.info("%s", run.model.append_to_banner(text) if options.print_banner else text)


_MAX_ROWS = 8


def _describe_plan(run: Run, schedule: Schedule) -> str:
    """Return in a line how long the run is, how large its steps are, and what is due when."""
    options, replicas, source = run.options, run.replicas, run.sources[Phase.TRAINING][0]
    total, unit = schedule.total_steps, "epoch" if schedule.is_by_epoch else "step"
    length = f"unlimited {unit}s" if total == math.inf else count_text(int(total), unit)
    num_batches = source.num_batches()
    if schedule.is_by_epoch and num_batches is not None:
        num_steps = math.ceil(num_batches / schedule.accumulation_steps)
        length = f"{length} of {count_text(num_steps, 'step')}"
    # A loader of the user's knows it by itself.
    size = source.description.get("batch_size") or getattr(source.loader, "batch_size", None)
    factors = [f"batch {size}" if size else "batches"]
    if schedule.accumulation_steps > 1:
        factors.append(f"{schedule.accumulation_steps}")
    if not replicas.has_single_replica:
        factors.append(count_text(replicas.num_replicas, "replica"))
    if size or len(factors) > 1:
        length = f"{length} ({' x '.join(factors)})"
    if schedule.max_steps is not None:
        length = f"{length}, at most {count_text(schedule.max_steps, 'step')}"
    validated = schedule.valid_frequency if Phase.VALIDATION in run.sources else None
    missing = "chkpt_root" if options.chkpt_root is None else "chkpt_frequency"
    saved = _describe_saves(schedule, unit) if options.can_save else ""
    return ", ".join(
        [
            length,
            run.engine.precision.value,
            f"validated {_every(validated, unit)}" if validated else "not validated",
            f"saved {saved}" if saved else f"nothing is saved ({missing})",
        ]
    )


def _every(frequency: int | None, unit: str) -> str:
    return f"every {unit}" if frequency == 1 else f"every {frequency} {unit}s"


def _describe_saves(schedule: Schedule, unit: str) -> str:
    parts = []
    if schedule.chkpt_frequency is not None:
        parts.append(_every(schedule.chkpt_frequency, unit))
    if schedule.save_seconds is not None:
        parts.append(f"at least every {_interval(schedule.save_seconds)}")
    return " and ".join(parts)


def _interval(seconds: float) -> str:
    """Return a time as it is passed, such as ``10 min``."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def describe_model(model: Model) -> str:
    """Return the parameters by module, at most eight rows under a line of totals.

    A row is a network, or a part of it if the model has only one; it says so if none of the
    parameters that it counts and that require gradients is in an optimizer. A parameter that
    several modules share counts once; lazy ones have no size yet.

    Args:
        model: the model, after its setup.
    """
    optimized = {
        id(x) for each in model.discovery.optimizers().values() for x in parameters_of(each)
    }
    seen: dict[int, Tensor] = {}
    rows: list[tuple[str, str, str, str]] = []
    for name, kind, tensors in _parts(model):
        new = {id(each): each for each in tensors if not is_lazy(each) and id(each) not in seen}
        seen |= new
        if new:
            trained = {key for key, each in new.items() if each.requires_grad}
            is_left_out = trained and optimized and trained.isdisjoint(optimized)
            note = "  in no optimizer" if is_left_out else ""
            rows.append((name, kind, f"{_count(new.values()):,}", note))
    if not rows:
        return "no parameters"
    count, trainable = _count(seen.values()), _count(x for x in seen.values() if x.requires_grad)
    size = size_text(sum(each.numel() * each.element_size() for each in seen.values()))
    how = f"{trainable:,} trainable" if trainable < count else "all trainable"
    untrained = [seen[key] for key in seen.keys() - optimized if seen[key].requires_grad]
    if untrained and optimized:
        how = f"{how}, {_count(untrained):,} in no optimizer"
    first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{count:,} parameters ({size}), {how}"]
    for name, kind, number, note in rows[:_MAX_ROWS]:
        lines.append(f"  {name:<{first}}  {kind:<{second}}  {number:>{third}}{note}")
    if len(rows) > _MAX_ROWS:
        lines.append(f"  and {len(rows) - _MAX_ROWS} more")
    return "\n".join(lines)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _parts(model: Model) -> Iterator[tuple[str, str, Iterable[Tensor]]]:
    """Yield the name, the class and the parameters of each module in the table."""
    networks = model.discovery.modules()
    for path, network in networks.items():
        if len(networks) == 1:
            for name, part in network.named_children():
                yield f"{path}.{name}", class_of(part).__name__, part.parameters()
        # What its parts do not hold, or all of it.
        yield path, class_of(network).__name__, network.parameters()
    for name, tensor in model.discovery.moved()[0].items():
        yield name, "Parameter", [tensor]


def _describe_data(sources: Mapping[Phase, Sequence[Source]]) -> str:
    """Return how many samples and batches an epoch and a validation have."""
    return "; ".join(
        " ".join(filter(None, ("" if phase is Phase.TRAINING else phase.value, source.name, size)))
        for phase, found in sources.items()
        for source in found
        for size in [_size(source, "per epoch" if phase is Phase.TRAINING else "")]
    )


def _size(source: Source, unit: str) -> str:
    samples, batches = source.length, source.num_batches()
    if isinstance(source, StepsSource):
        return "none" if batches is None else f"none, {batches:,} iterations {unit}"
    counts = [
        "an unknown number of samples" if samples is None else f"{samples:,} samples",
        "" if batches is None else f"{batches:,} batches {unit}".rstrip(),
    ]
    return " in ".join(filter(None, counts))


def say_how_schedulers_step(model: Model, schedulers: Schedulers, schedule: Schedule) -> None:
    """Log when schedulers step, and what to set for one that seems to count epochs.

    Args:
        model: has ``scheduler_interval``.
        schedulers: those of the model.
        schedule: the length of the run, and its unit.
    """
    if schedulers.is_empty:
        return
    units = {"step": "optimizer step"}
    steps = ", ".join(
        f"{name} after every {units.get(interval, interval)}"
        for name, interval in schedulers.intervals.items()
    )
    remedy = ""
    if schedule.is_by_epoch:
        own = model.scheduler_interval
        found = find_epoch_like(schedulers.outermost, own, schedule.total_steps)
        intervals = {**own, **dict.fromkeys(found, "epoch")}
        remedy = f" For epochs, set Model.scheduler_interval = {intervals}." if found else ""
    _LOGGER.info("Helios steps the schedulers, unless train_step does: %s.%s", steps, remedy)


_STEP = "valid_step"
_CALLED = (
    *(_STEP, "on_validation_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_end",
)


def warn_of_idle_options(
    schedule: Schedule, rule: BestRule | None, model: Model, *, has_validation: bool
) -> None:
    """Warn of a run without a step, and of validations that compute nothing.

    Args:
        schedule: what is due when.
        rule: which score decides on the best validation; ``None`` if none does.
        model: the model, after its setup.
        has_validation: whether there is validation data.
    """
    if schedule.total_steps == 0:
        _LOGGER.warning(
            "Trainer(total_steps=0) trains nothing: fit makes no step. Pass max_epochs or "
            "max_steps."
        )
    validates = schedule.valid_frequency is not None
    waits = validates or schedule.early_stop_cycles is not None
    is_called = model.batch_processor is not None or any(is_own(model, name) for name in _CALLED)
    if rule is not None and not (validates and has_validation):
        _LOGGER.warning(
            "There is no validation that computes the score %r, so KeepBest and EarlyStopping "
            "have no effect. Assign self.valid_dataset in the data module's setup(), or set "
            "valid_frequency.",
            rule.metric,
        )
    elif waits and not has_validation:
        _LOGGER.warning(
            "There is no validation data, so valid_frequency and early_stop_cycles have no "
            "effect. Assign self.valid_dataset in the data module's setup()."
        )
    elif validates and not is_called:
        _LOGGER.warning(
            "%s has no valid_step, so validations compute no scores. %s",
            type(model).__name__,
            _suggest(model),
        )


def _suggest(model: Model) -> str:
    close = difflib.get_close_matches(_STEP, own_methods(model), n=1, cutoff=0.5)
    if close:
        return f"Rename {close[0]} to valid_step if it is meant to be that."
    return "Write valid_step(self, batch), and log scores in it: self.log(name, value)."


def format_scores(scores: Mapping[str, float]) -> str:
    """Return scores as text, in the order of the table."""
    return ", ".join(f"{name} {number_text(score, 4)}" for name, score in scores.items())


def format_seconds(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``; below a minute, in seconds.

    Example:
        >>> format_seconds(3.21), format_seconds(3723)
        ('3.2 s', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class ScoreLog(RunListener):
    """Logs the scores of validations, and remembers the last ones; ranks but 0 log errors only.

    Args:
        keep_best: the score that decides which checkpoints are kept; ``None`` without one.
    """

    def __init__(self, keep_best: KeepBest | None = None) -> None:
        self._keep_best = keep_best
        self._last = ""

    def validated(self, validated: Validated) -> None:
        """Log the scores.

        Raises:
            UsageError: if the score that decides is not among them.
        """
        if self._keep_best is not None:
            self._keep_best.check_scores(validated.scores)
        scores, state, best = validated.scores, validated.state, validated.best
        text, rank = format_scores(scores), ""
        if best is not None:
            is_new = best.iteration == state.global_iteration
            rank = "the best so far" if is_new else _describe_best(best)
        losses = {f"training {name}": loss for name, loss in validated.losses.items()}
        place = _describe_position(state)
        if scores:
            self._last = f"{text} ({place})"
        line = "; ".join(filter(None, (text or "no scores", rank, format_scores(losses))))
        _LOGGER.info("Validation %d (%s): %s.", state.validation_cycles, place, line)

    def summarize(
        self, best: BestValidation | None, file_name: str | None = None
    ) -> dict[str, str]:
        """Return the last and the best scores of the run, by label.

        Args:
            best: the best validation; ``None`` if there is none.
            file_name: its checkpoint; empty if it has none, ``None`` if nothing was saved.
        """
        found = {"last scores": self._last} if self._last else {}
        if best is not None:
            since = f", since iteration {best.since}" if best.since else ""
            name = "" if file_name is None else f"; {file_name or 'without a checkpoint'}"
            place = f"iteration {with_step(best.iteration, best.step)}{since}{name}"
            scores = format_scores(best.deciding)
            found["best scores"] = f"{scores} ({place})" if scores else place
        return found


def _describe_position(state: TrainingState) -> str:
    """Return epoch and iteration, which files are named after."""
    iteration = with_step(state.global_iteration, state.global_step)
    return f"epoch {state.global_epoch}, iteration {iteration}"


def _describe_best(best: BestValidation) -> str:
    since = f" since iteration {best.since}" if best.since else ""
    place = f"iteration {with_step(best.iteration, best.step)}"
    # A model that judges itself may have no scores.
    scores = format_scores(best.deciding)
    return f"best{since}: {f'{scores} ({place})' if scores else place}"


def describe_end(training: Training) -> str:
    """Return how far a run has come, as lines below a message of the log; waits for saves."""
    parts, newest = training.parts, training.saves.writer.wait()
    state, best, file_name = parts.run.state, parts.run.best.best, None
    if best is not None and newest is not None:
        paths = file_names.find_checkpoints(newest.parent)
        names = {file_names.iteration_of(path): path.name for path in paths}
        file_name = names.get(best.iteration, "")
    count = state.global_iteration - training.begun_at
    part = f"; this start: {count} iterations" if training.begun_at else ""
    place = f"until {_describe_position(state)}{part} in {format_seconds(training.seconds)}"
    facts = {"trained": place, **training.scores.summarize(best, file_name)}
    if nonfinite := parts.loss_means.nonfinite:
        facts["not finite"] = f"the first loss: {nonfinite}"
    if newest is not None:
        facts["checkpoints"] = f"{newest.parent} (newest: {newest.name})"
        if parts.recorders:
            facts["report"] = f"helios report {newest.parent}"
    width = max(map(len, facts))
    return "".join(f"\n  {label:<{width}}  {fact}" for label, fact in facts.items())


def _find_again(root: Path | None, stored: str | None) -> Path | None:
    """Return a file of a run, which may have been moved or copied to the given root."""
    # A migrated run may come from another system, where its files still are.
    windows = PureWindowsPath(stored or "")
    moved = None if stored is None or root is None else root / windows.name
    if moved is not None and moved.exists():
        return moved
    return None if stored is None or (os.name != "nt" and windows.drive) else Path(stored)


def open_logs(options: Options, name: str, record: Record | None, *, is_training: bool) -> None:
    """Open the log file and the event files, or continue those of a checkpoint.

    Args:
        options: which logs, and where.
        name: the name of the run.
        record: the checkpoint; ``None`` for new files.
        is_training: whether events after the checkpoint will be removed: training repeats them.
    """
    log_path = run_path = None
    if record is not None:
        log_path = _find_again(options.log_path, record.log_path)
        run_path = _find_again(options.run_path, record.run_path)
    log.setup_default_loggers(
        name,
        log_root=options.log_path if options.enable_file_logging and log_path is None else None,
        runs_root=options.run_path if options.enable_tensorboard and run_path is None else None,
    )
    if record is not None:
        log.restore_default_loggers(
            log_path=log_path if options.enable_file_logging else None,
            run_path=run_path if options.enable_tensorboard else None,
            marks=record.events if is_training else None,
        )


def log_places() -> dict[str, Any]:
    """Return where the logs of this process are, as a checkpoint records it."""
    places: dict[str, Any] = {}
    log_file = log.get_root_logger().log_file
    if log_file is not None:
        places["log_path"] = str(log_file)
    writer = log.get_tensorboard_writer()
    if writer is not None:
        places |= {"run_path": str(writer.run_path), "events": writer.mark()}
    return places
