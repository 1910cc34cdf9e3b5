"""Compares this start with its checkpoint: what defines the run, and what ends it.

``Trainer(params=...)`` declares; another value stops a start. Found is what both have made, read
right after ``setup`` and before anything is loaded: plain values (attributes of the model and the
data module, settings of optimizers and schedulers) and digests of the methods that a training
calls. It is the entry ``found`` in the options of a checkpoint; see docs/reproducibility.md. A
difference is found before the first step, and what defines the run must be allowed by the user;
this is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded
from helios.core.code_digest import digest_functions, digest_methods, own_classes, python_version
from helios.core.plain_values import (
    ValueChange,
    compare_values,
    plain_values,
    qualified_name,
    stored_params,
)
from helios.core.utils import as_names
from helios.counters import Cursor, TrainingState
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import RunMismatchError
from helios.ledger.run_file import without_secrets
from helios.model.model import Model
from helios.model.schedulers import members_of, setting_names
from helios.replicas.replicas import Replicas
from helios.schedule import find_limit, is_limit
from helios.start.options import OF_DATA, PARAMS, ROWS, Options, Scope, allows
from helios.start.signals import is_interactive
from helios.state.owners import internals_of
from helios.text import tuple_text

if TYPE_CHECKING:
    from helios.start.origin import Origin
    from helios.start.run import Run

_LOGGER = logging.getLogger(__name__)

_RESTARTING = (
    *("dataset", "length", "shuffle", "seed", "sampler", "is_distributed", "mixture"),
    "random_seed",
)

_UNCOUNTED = ("length", None)
"""Stored length of a loader with an unknown number of samples."""

_DEFAULTS: Mapping[str, Any] = {
    "accumulation_order": "replicas",
    "norm": "whole",
    "init": "setup",
    "skip_batches": (),
}
"""What holds where the description of a run does not name it."""

ORDERING = (*OF_DATA, "mixture", "random_seed")
"""Names of what the order of the samples, and their distribution over batches, depend on."""


def describe_identity(
    options: Options, description: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return what defines a run, in the names of ``allow_changes``.

    What few runs have is in it only for those; ``sharding="full"`` only where it changes bits, in
    accumulation and in clipping.
    """
    found = {name: description.get(name) for name in OF_DATA}
    found |= {name: options.plain(name) for name, row in ROWS.items() if row.scope is Scope.RUN}
    # The engine may be the user's.
    found["precision"] = engine.precision.value
    if description.get("mixture"):
        found["mixture"] = description["mixture"]
    if engine.replicas.is_sharded and options.accumulation_steps > 1:
        found["accumulation_order"] = "micro-batches"
    if engine._clips_by_rows:
        found["norm"] = "rows"
    return {name: x for name, x in found.items() if name not in _DEFAULTS or x != _DEFAULTS[name]}


def limits(options: Options) -> dict[str, float | None]:
    """Return the options that end a run; raising one lets a finished run continue."""
    return {name: options.plain(name) for name, row in ROWS.items() if row.scope is Scope.END}


def is_extended(options: Options, stored: Mapping[str, Any]) -> bool:
    """Return whether this run is longer than the one that wrote the checkpoint."""
    return any(now > before for now, before in _pair_limits(options, stored))


def is_shortened(options: Options, stored: Mapping[str, Any]) -> bool:
    """Return whether this run is shorter than the one that wrote the checkpoint."""
    return any(now < before for now, before in _pair_limits(options, stored))


def _pair_limits(options: Options, stored: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [(now, stored.get(name)) for name, now in limits(options).items()]
    infinite = float("inf")
    return [
        (infinite if now is None else now, infinite if before is None else before)
        for now, before in pairs
    ]


def find_end(options: Options, loaded: Loaded | None) -> str:
    """Return why the run has ended before, with nothing left to train; else an empty string.

    Args:
        options: the current ones.
        loaded: the checkpoint, which may be marked as the end of the run.
    """
    reason = None if loaded is None or loaded.sidecar is None else loaded.sidecar.finished
    if loaded is None or not reason:
        return ""
    return reason if _is_still_finished(options, loaded.record, reason) else ""


def _is_still_finished(options: Options, record: Record, reason: str) -> bool:
    stored = record.options
    if stored.get("train_unit") != options.plain("train_unit"):
        return False
    cursor = Cursor(**record.cursor)
    if is_limit(reason) and not cursor.stop_reason:
        # The mark may have been made with a smaller total than that of the checkpoint.
        state = TrainingState(**record.training_state)
        return bool(find_limit(options.limits, state, cursor))
    return not is_extended(options, stored)


def has_ended(options: Options, record: Record) -> bool:
    """Return whether nothing is left to train, even if a kill came before the end was recorded."""
    state, cursor = TrainingState(**record.training_state), Cursor(**record.cursor)
    is_stopped = cursor.stop_reason and not is_extended(options, record.options)
    return bool(is_stopped or find_limit(options.limits, state, cursor))


def note_limits(options: Options, stored: Mapping[str, Any]) -> list[str]:
    """Log which limits differ from the checkpoint's; returns them as text, to be recorded."""
    changes = [
        f"{options.limit if name == 'total_steps' else name}: {stored[name]} -> {now}"
        for name, now in limits(options).items()
        if name in stored and stored[name] != now
    ]
    for text in changes:
        _LOGGER.info("Changed since the checkpoint: %s.", text)
    return changes


def note_fingerprint(description: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Warn if the fingerprint of the data set has changed; returns the change as text.

    The user defines the fingerprint, so only the user can judge what a difference means.
    """
    before, now = stored.get("fingerprint"), description.get("fingerprint")
    if before is None or before == now:
        return []
    text = f"fingerprint: {before!r} -> {now!r}"
    _LOGGER.warning(
        "The fingerprint of the training data set has changed since the checkpoint (%s). The run "
        "continues with the new data, so its results differ from here on.",
        text,
    )
    return [text]


def report_finished(
    name: str, loaded: Loaded, reason: str, options: Options, *, is_passed: bool
) -> None:
    """Log that the run is finished, and how to continue it.

    If the run has passed this total, as in the earlier stages of a script that is started again,
    this is not a warning.

    Args:
        name: the name of the run.
        loaded: its newest checkpoint.
        reason: why it has ended.
        options: the current ones.
        is_passed: whether the run has passed the end of this start.
    """
    option = options.limit  # where a plugin has ended the run
    if is_limit(reason):
        option = reason.removesuffix(" reached") if " reached" in reason else "early_stop_cycles"
    _LOGGER.log(
        logging.INFO if is_passed else logging.WARNING,
        "Nothing to do: the run %r in %s is finished (%s; %s). Raise %s to continue it, pass "
        "resume='never' to start a new run, or give another model its own save_name.",
        name,
        loaded.path.parent,
        reason,
        loaded.path.name,
        option,
    )


def reconcile(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    options: Options,
    *,
    state: TrainingState,
    cursor: Cursor,
    keeps_settings: bool,
) -> list[str]:
    """Compare what defines the run with the checkpoint; returns changes as ``name: old -> new``.

    After an allowed change of data set, length, shuffle, sampler or seed, the current epoch starts
    over; with another batch size it continues at the stored sample.

    Args:
        stored: the definition in the checkpoint.
        present: that of this start.
        options: the options.
        state: the counters.
        cursor: the position in the data.
        keeps_settings: whether ``setup`` has made other settings of optimizers, which the run does
            not take.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    stored, present = {**_DEFAULTS, **stored}, {**_DEFAULTS, **present}
    changed = {
        each.name: f"{each.name}: {each.before!r} -> {each.after!r}"
        for each in compare_values(stored, present)
        if each.is_contradiction and each[:2] != _UNCOUNTED
    }
    if "train_unit" in changed and options.has_new_length:
        # That is what follows from the argument that was passed.
        units = {"epoch": "epochs", "iteration": "steps"}
        now, before = units[present["train_unit"]], units.get(stored["train_unit"])
        changed["train_unit"] = f"{options.limit} counts {now}, but the run has counted {before}"
    allowed = options.allow_changes
    refused = [name for name in changed if not any(allows(known, name) for known in allowed)]
    if refused:
        wanted = list(refused)
        if keeps_settings and any(name.startswith("params.") for name in refused):
            # A declared rate is the optimizer's, too, which would keep its own.
            wanted.append(_OPTIMIZER)
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{'; '.join(changed[name] for name in refused)}. Undo the change, allow it with "
            f"Trainer(allow_changes={tuple_text(wanted)}) to continue with it, or pass another "
            "save_name to start a new run."
        )
    if any(name in _RESTARTING for name in changed):
        cursor.restart_epoch()
        state.end_epoch()
    for text in changed.values():
        _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
    return list(changed.values())


def check_skipped(
    stored: Sequence[int], present: Sequence[int], source: Source, cursor: Cursor
) -> None:
    """Refuse to skip, or to train on, batches that the run has passed already.

    Raises:
        RunMismatchError: if ``skip_batches`` was changed for any of these.
    """
    place = (cursor.epoch, cursor.batch)
    passed = sorted(n for n in {*stored} ^ {*present} if source.place_of(n) < place)
    if passed:
        raise RunMismatchError(
            f"skip_batches must not change for batches that the run has passed, but changed for "
            f"{', '.join(map(str, passed))}. Go back first, with Trainer(resume=<path of a "
            "checkpoint before them>), or undo the change."
        )


def find_cursor(record: Record, description: Mapping[str, Any], replicas: Replicas) -> Cursor:
    """Return the position of the next batch.

    A migrated checkpoint holds only the number of that batch. Its first sample follows from the
    current batch size, and the consequences are logged.

    Args:
        record: the content of the checkpoint.
        description: description of the current data.
        replicas: the current replicas, each of which gets a batch.
    """
    cursor = Cursor(**record.cursor)
    if record.migrated_from is None:
        return cursor
    size = description.get("batch_size") or 1
    cursor = replace(cursor, sample=cursor.batch * size * replicas.num_replicas)
    _LOGGER.warning(
        "The run resumes from a checkpoint of helios-ml %s, with its weights, optimizers and "
        "counters, at batch %d of epoch %d. The order of samples, and so the losses, differ from "
        "those of the old package; from here on, both are exactly reproducible. The old file does "
        "not say how many processes trained it: the run now has %d %s.",
        record.migrated_from or "before 0.3",
        cursor.batch + 1,
        cursor.epoch + 1,
        replicas.num_replicas,
        "replica" if replicas.has_single_replica else "replicas",
    )
    return cursor


KEY = "found"
"""The entry of the options of a checkpoint that holds what was found."""

_OPTIMIZER = "optimizer"
_ALLOW_SETTINGS = f'(allow_changes=("{_OPTIMIZER}",) takes the new one)'
_SCRIPT = "__main__."
# The guarantee says that they change no bit.
_HARMLESS = {"num_workers", "pin_memory", "prefetch_factor", "persistent_workers"}
# What a scheduler computes from the groups of its optimizer, and where it is.
_POSITION = {"base_lrs", "last_lr", "last_epoch", "step_count"}


def read_fresh(run: Run) -> dict[str, Any]:
    """Return what ``setup`` has made, as the options of a checkpoint hold it."""
    model = run.model
    settings = dict(_settings(model))
    values = dict([*_values("model", model), *_values("data", run.datamodule)])
    code: dict[str, dict[str, str]] = {}
    for kind in map(type, (model, model.batch_processor, *run.owners.parts.values())):
        if methods := digest_methods(kind):
            code[qualified_name(kind)] = methods
    for path, scheduler in _schedulers(model):
        # Such as the functions of a LambdaLR.
        code[path] = {
            name: digest_functions(each)
            for name, each in vars(scheduler).items()
            if isinstance(each, list | partial | FunctionType)
        }
    found = {"settings": without_secrets(settings), "values": without_secrets(values)}
    return found | {"code": code, "python": python_version()}


def _values(prefix: str, part: Any) -> Iterator[tuple[str, Any]]:
    chosen = {"scheduler_interval", "train_mode"}
    left_out = (internals_of(part) - chosen) | {"unsaved"} | _HARMLESS
    declared = as_names(part.unsaved)
    members: dict[str, Any] = {}
    for kind in reversed([*own_classes(type(part))]):
        members |= vars(kind)
    for name, value in (members | vars(part)).items():
        is_method = isinstance(value, FunctionType) and name not in vars(part)
        if name not in left_out and not name.startswith("__") and not is_method:
            for path, each in plain_values(name, value):
                is_declared = any(f"{path}.".startswith(f"{other}.") for other in declared)
                # A folder may be elsewhere on another machine.
                if not is_declared and not (isinstance(each, str) and Path(each).is_absolute()):
                    yield f"{prefix}.{path}", each


def _settings(model: Model) -> Iterator[tuple[str, Any]]:
    for path, optimizer in model.discovery.optimizers().items():
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            prefix = path if len(groups) == 1 else f"{path}.param_groups.{number}"
            for name in setting_names(optimizer, group):
                # A scheduler has changed the rate already.
                value = group.get("initial_lr", group["lr"]) if name == "lr" else group[name]
                if isinstance(value, Tensor) and not value.is_meta:
                    value = value.tolist()
                if name != "initial_lr":
                    yield from plain_values(f"{prefix}.{name}", value)
    for path, scheduler in _schedulers(model):
        for name, value in vars(scheduler).items():
            if (bare := name.strip("_")) not in _POSITION:
                yield from plain_values(f"{path}.{bare}", value)


def _schedulers(model: Model) -> Iterator[tuple[str, LRScheduler]]:
    """Yield all schedulers by path; those inside another one, below it."""
    waiting = [*model.discovery.schedulers().items()]
    for path, part in waiting:
        yield path, part
        waiting += ((f"{path}.schedulers.{n}", each) for n, each in enumerate(members_of(part)))


@dataclass(frozen=True)
class StartChanges:
    """The differences between two starts.

    Attributes:
        options: what the next checkpoints hold of this one.
        values: settings and attributes that differ.
        code: methods that differ, each as a line.
        adopts: whether the run takes settings of ``setup``, because the user allows it.
    """

    options: dict[str, Any] = field(default_factory=dict)
    values: Sequence[ValueChange] = ()
    code: Sequence[str] = ()
    adopts: bool = False

    @property
    def all_values(self) -> dict[str, Any]:
        """All values that hold, by name."""
        found = self.options[KEY]
        return {**found["settings"], **found["kept"], **found["values"]}

    @property
    def keeps_settings(self) -> bool:
        """Whether the run keeps settings of optimizers that ``setup`` has made otherwise."""
        return bool(self.options.get(KEY, {}).get("kept"))

    def report(self) -> list[str]:
        """Warn of all that differs; returns what takes effect, to be recorded."""
        kept, lines = self.options[KEY]["kept"], []
        for values, names in _joined(self.values):
            end = ""
            if not kept.keys().isdisjoint(names):
                end = f" in setup(); the run keeps {values.partition(' -> ')[0]} {_ALLOW_SETTINGS}"
            lines.append(f"{', '.join(names)}: {values}{end}")
        if lines or self.code:
            text = "".join(f"\n  {line}" for line in (*lines, *self.code))
            _LOGGER.warning("Changed since the checkpoint:%s", text)
        return [*_texts(each for each in self.values if each.name not in kept), *self.code]


def _joined(changes: Iterable[ValueChange]) -> list[tuple[str, list[str]]]:
    """Return both values, and whose: those of an argument, and of the setting that follows."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in changes:
        alone = "" if type(each.before) in (int, float) else each.name
        found.setdefault((f"{each.before!r} -> {each.after!r}", alone), []).append(each.name)
    return [(values, names) for (values, _), names in found.items()]


def _texts(changes: Iterable[ValueChange]) -> list[str]:
    return [f"{', '.join(names)}: {values}" for values, names in _joined(changes)]


def compare_fresh(run: Run, origin: Origin, declared: Declared) -> StartChanges:
    """Compare what setup has made in rank 0 with the checkpoint, before anything is loaded.

    Raises:
        RunMismatchError: in all processes, if nothing is left to train, and values differ; and as
            :func:`refuse_unread_weights` does.
    """
    return run.replicas.on_first(partial(_compare_fresh, run, origin, declared.is_over))


def refuse_unread_weights(run: Run, record: Record) -> None:
    """Refuse numbers that ``setup`` has made of weights which it leaves to the checkpoint.

    Raises:
        RunMismatchError: if a plain value of the model differs from the one of the start that has
            read the weights.
    """
    before = record.options.get(KEY)
    if not run.leaves_weights or before is None:
        return
    fresh = read_fresh(run)
    texts = _texts(
        each
        for each in compare_values(before["values"], fresh["values"])
        if each.name.startswith("model.") and not _is_state(each.name, record)
    )
    if texts:
        raise RunMismatchError(
            f"setup() of {type(run.model).__name__} leaves the weights of load_weights to the "
            "checkpoint, and computes other values than the start that read them: "
            f"{'; '.join(texts)}. Pass load_weights(..., every_start=True) if they depend on "
            "these weights, or if you have edited them."
        )


def _shows_end(run: Run, record: Record) -> bool:
    """Return whether a start with nothing left to train shows the scores of the run as its own."""
    # A script in stages starts those again that the run has passed.
    return run.replay is None and not is_shortened(run.options, record.options)


def _compare_fresh(run: Run, origin: Origin, is_over: bool) -> StartChanges:
    """Compare in one process; if nothing is left to train, nothing is taken."""
    record, fresh = origin.record, run.fresh
    if record is not None:
        refuse_unread_weights(run, record)
    before = {} if record is None else record.options.get(KEY, {})
    last = before.get("settings", {})
    # Other versions of a library have other settings, and nobody has changed anything. And a
    # finished run was not trained with what it had not taken at its last start either.
    settings = [
        each
        for each in compare_values(last | before.get("kept", {}), fresh["settings"])
        if each.is_contradiction and not (is_over and last.get(each.name) == each.after)
    ]
    values = [
        each
        for each in compare_values(before.get("values", fresh["values"]), fresh["values"])
        if not _is_state(each.name, record)
    ]
    code = [*_compare_code(before, fresh)]
    adopts = _OPTIMIZER in run.options.allow_changes and record is not None and not is_over
    kept = {} if adopts else {each.name: each.before for each in settings}
    if origin.loaded is not None and is_over and _shows_end(run, origin.loaded.record):
        _refuse_other_values([*settings, *values], code, run.name, origin.loaded.path)
    return StartChanges(
        {KEY: {**fresh, "kept": kept}},
        [*settings, *values],
        code,
        adopts=adopts and (not before or bool(settings or code)),
    )


def _is_state(name: str, record: Record | None) -> bool:
    """Return whether training has changed an attribute: then the checkpoint has it."""
    assert record is not None
    owner, attribute = name.split(".")[:2]
    state = record.owners.get(owner, record.model if owner == "model" else {})
    # A model that overrides state_dict may have a key of this name.
    values = state.get("values")
    holders = values if isinstance(values, Mapping) else {}
    return attribute in {*holders.get("", ()), *(name.partition(".")[0] for name in holders)}


def _compare_code(before: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[str]:
    old = before["code"] if before.get("python") == fresh["python"] else {}
    for kind, methods in fresh["code"].items():
        name = kind.removeprefix(_SCRIPT)
        end = ", in an edited cell" if name != kind and is_interactive() else ""
        for method, _, _ in compare_values(old.get(kind, methods), methods):
            yield f"{name}.{method}() has other code{end}"


@dataclass(frozen=True)
class Declared:
    """The declarations of ``Trainer(params=...)``.

    Attributes:
        params: the values, without secrets; those of the run if nothing is left to train.
        is_over: whether nothing is left to train.
    """

    params: dict[str, Any]
    is_over: bool

    @classmethod
    def compare(cls, run: Run, origin: Origin, *, is_finished: bool) -> Declared:
        """Find what rank 0 declares, and whether the run has ended with other values.

        Args:
            run: the call.
            origin: where it starts.
            is_finished: whether the checkpoint is marked as the end of the run.

        Raises:
            RunMismatchError: in all processes, if the run has ended with other values.
        """
        options, loaded = run.options, origin.loaded

        def compare() -> Declared:
            params = without_secrets(options.params)
            if loaded is None or not (is_finished or has_ended(options, loaded.record)):
                return cls(params, is_over=False)
            stored = loaded.record.options
            found = compare_values(name_params(stored_params(stored)), name_params(params))
            found = [each for each in found if each.is_contradiction]
            if not _shows_end(run, loaded.record):
                allowed = options.allow_changes
                found = [x for x in found if not any(allows(name, x.name) for name in allowed)]
            _refuse_other_values(found, (), run.name, loaded.path)
            return cls(stored_params(stored), is_over=True)

        return run.replicas.on_first(compare)


def name_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by their names in ``allow_changes``."""
    return {f"{PARAMS}{name}": value for name, value in params.items()}


def _refuse_other_values(
    values: Iterable[ValueChange], code: Sequence[str], name: str, path: Path
) -> None:
    """Refuse a start that trains nothing, and differs from the run whose scores it would show.

    Args:
        values: those that differ.
        code: methods that differ.
        name: the name of the run.
        path: the file of its last checkpoint.

    Raises:
        RunMismatchError: if values differ, except those that only one of both has; in an
            interactive session, where somebody has just edited it, also if code does.
    """
    texts = _texts(each for each in values if each.is_contradiction)
    texts += code if is_interactive() else ()
    if texts:
        raise RunMismatchError(
            f"Nothing is left to train for the run {name!r} in {path.parent}, but it was trained "
            f"with other values: {'; '.join(texts)}. Its weights and scores belong to the old "
            f"values ({path.name}). Use another save_name for the new values, pass resume='never' "
            "to train this run from scratch, or undo the change. Declare an attribute that does "
            "not matter: unsaved = (...,)."
        )
