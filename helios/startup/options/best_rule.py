"""Which score decides what the best validation of a run is; one score has one mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from helios.best import BestRule, Mode
from helios.errors import ArgumentError
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.plugin import Plugin
from helios.startup.options.checkpoint_options import CheckpointOptions


def find_best_rule(
    options: CheckpointOptions, plugins: Iterable[Plugin], model: Model
) -> BestRule | None:
    """Return what decides which validation of a run is the best.

    That is the score of ``KeepBest``, or else that of ``EarlyStopping``, or else the model, if it
    overrides ``have_metrics_improved``; ``None`` if there is nothing, or if several plugins watch
    different scores.
    """
    plugins = list(plugins)
    declared = find_declared_rule(options, plugins)
    watches = any(isinstance(each, EarlyStopping) for each in plugins)
    judges = type(model).have_metrics_improved is not Model.have_metrics_improved
    return BestRule() if declared is None and judges and not watches else declared


def find_declared_rule(options: CheckpointOptions, plugins: Iterable[Plugin]) -> BestRule | None:
    """Return the rule of ``KeepBest``, or else of ``EarlyStopping``; ``None`` without one."""
    if options.store is not None and options.store.keep_best is not None:
        return options.store.keep_best.rule
    watched = {each.monitored for each in plugins if isinstance(each, EarlyStopping)}
    if len(watched) != 1:
        return None
    ((metric, mode),) = watched
    return BestRule(metric, mode)


def require_one_mode(
    options: CheckpointOptions, plugins: Iterable[Plugin], schedulers: Schedulers | None = None
) -> None:
    """Check that nothing takes small values of a score as good, and something else large ones.

    Raises:
        ArgumentError: naming both.
    """
    known: dict[str, tuple[Mode, str]] = {}
    for metric, mode, owner in _list_modes(options, plugins, schedulers):
        first, other = known.setdefault(metric, (mode, owner))
        if first != mode:
            raise ArgumentError(
                f"The score {metric!r} must have one mode, but {other} has mode={first!r}, and "
                f'{owner} has mode={mode!r}. Correct one of them: "min" if small scores are good, '
                '"max" if large ones are.'
            )


def _list_modes(
    options: CheckpointOptions, plugins: Iterable[Plugin], schedulers: Schedulers | None
) -> Iterator[tuple[str, Mode, str]]:
    """Yield each score whose mode is set, with the mode, and where."""
    rule = None if options.store is None else options.store.keep_best
    if rule is not None:
        yield rule.metric, rule.mode, "KeepBest"
    for plugin in plugins:
        if isinstance(plugin, EarlyStopping):
            yield *plugin.monitored, f"EarlyStopping {plugin.plug_id!r}"
    for path, metric, mode in [] if schedulers is None else schedulers.find_plateaus():
        yield metric, mode, f"the ReduceLROnPlateau model.{path}"
