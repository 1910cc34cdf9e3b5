"""Which validation of a run is the best: by which score, and which ones so far.

One score has one mode. What was the best before a start, its checkpoint says, or its score file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helios.best import BestRule, BestSoFar, Mode, Validation
from helios.errors import ArgumentError, LedgerError
from helios.ledger.run_file import read_run
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.plugin import Plugin
from helios.replicas.on_all_ranks import on_first
from helios.replicas.replicas import Replicas
from helios.start.options import Options


def find_best_rule(options: Options, plugins: Iterable[Plugin], model: Model) -> BestRule | None:
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


def find_declared_rule(options: Options, plugins: Iterable[Plugin]) -> BestRule | None:
    """Return the rule of ``KeepBest``, or else of ``EarlyStopping``; ``None`` without one."""
    if options.store is not None and options.store.keep_best is not None:
        return options.store.keep_best.rule
    watched = {each.monitored for each in plugins if isinstance(each, EarlyStopping)}
    if len(watched) != 1:
        return None
    ((metric, mode),) = watched
    return BestRule(metric, mode)


def require_one_mode(
    options: Options, plugins: Iterable[Plugin], schedulers: Schedulers | None = None
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
    options: Options, plugins: Iterable[Plugin], schedulers: Schedulers | None
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


_LOGGER = logging.getLogger(__name__)


def continue_best(
    stored: Mapping[str, Any] | None,
    rule: BestRule | None,
    *,
    after: int,
    folder: Path | None,
    replicas: Replicas,
) -> BestSoFar:
    """Return the best validations before a start, by the rule of this start.

    The checkpoint has them, so that those after it are forgotten when a run goes
    back. Under another rule
    they are found again in the scores that the run has written.

    Args:
        stored: what the checkpoint says; ``None`` without a rule.
        rule: what decides in this start; ``None`` if nothing does.
        after: the iteration of the checkpoint.
        folder: the run's folder; ``None`` if its files are not those of this run.
        replicas: the processes; rank 0 reads.
    """
    if rule is None:
        return BestSoFar()
    before = BestSoFar() if stored is None else BestSoFar.from_plain(stored)
    former = before.rule
    is_alike = former is not None and former.is_alike(rule)
    if former is not None and is_alike and rule.count <= former.count:
        return BestSoFar(rule, before.validations[: rule.count], before.since)
    if stored is not None and not is_alike:
        _LOGGER.info(
            "From here on %s decides which validation is the best; before, %s did.",
            rule,
            former or "nothing",
        )
    found = BestSoFar(rule)
    found.since, validations = on_first(replicas, lambda: _read_scores(folder, after))
    for validation, has_improved in validations:
        found.judge(validation, has_improved=has_improved)
    return found


def _read_scores(folder: Path | None, after: int) -> tuple[int, list[tuple[Validation, bool]]]:
    """Return the iteration after which validations are known, and those until a checkpoint."""
    if folder is None:
        return after, []
    try:
        found = read_run(folder)
        validations = [
            (
                Validation(line["iteration"], line["scores"], line["step"]),
                bool(line.get("has_improved")),
            )
            for line in found.validations
            if line["iteration"] <= after
        ]
    except (LedgerError, LookupError, TypeError):
        # A file that somebody has edited is as good as none.
        return after, []
    return (found.starts[0].iteration if found.starts else after), validations
