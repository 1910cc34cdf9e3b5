"""The ledger of a run, and what is made of it: comparisons, verification, replays, reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.ledger.differences import Difference, diff
from helios.ledger.replaying import Replay
from helios.ledger.verification import LedgerStatus, verify

if TYPE_CHECKING:
    from helios.ledger.packing import Pack
    from helios.ledger.reports import RunReport
    from helios.ledger.run_comparison import RunComparison

__all__ = ["Difference", "LedgerStatus", "Replay", "compare", "diff", "pack", "report", "verify"]


def report(run: str | Path, checkpoints: Sequence[Mapping[str, Any]] | None = None) -> RunReport:
    """Make the report of a run.

    Args:
        run: the folder of the run, or its ledger.
        checkpoints: facts about each checkpoint that is still there: ``name``, ``state``,
            ``epoch``, ``iteration``, ``level``, ``digest`` and ``metrics``. ``None`` if they were
            not looked at: the report then has those that the lineage names.

    Raises:
        LedgerError: if there is no run, or if one of its files cannot be read.
    """
    # A training needs none of it, and imports this package.
    from helios.ledger.reports import make_report

    return make_report(run, checkpoints)


def compare(*runs: str | Path, by: str | None = None) -> RunComparison:
    """Compare the results of runs.

    Args:
        runs: the folders of at least two runs.
        by: what groups them: an argument of the command, an option, an entry of the manifest such
            as ``seeds.random_seed``, or a topic. ``None`` for one group.

    Raises:
        ArgumentError: for fewer than two runs, for one that is named twice, or if no run has
            ``by``.
        LedgerError: if a run has no evidence, or if it cannot be read.
    """
    from helios.ledger.run_comparison import compare_runs

    return compare_runs(runs, by=by)


def pack(
    run: str | Path,
    target: str | Path,
    *,
    weights: Path | None = None,
    notes: Sequence[str] = (),
    is_anonymous: bool = False,
) -> Pack:
    """Pack the evidence of a run into one archive, with the commands that check it.

    Args:
        run: the folder of the run, or its ledger.
        target: the zip file; an old one is replaced.
        weights: a file of weights to add, such as one that ``helios export`` has written.
        notes: sentences for the README of the archive.
        is_anonymous: whether to remove names of hosts and users, absolute paths, and the remote,
            branch, commit and author of the git repository.

    Raises:
        LedgerError: if there is no run, if its files cannot be read, or if the archive would not be
            anonymous.
        OSError: if the disk fails; an old archive stays.
    """
    from helios.ledger.packing import pack_run

    return pack_run(run, target, weights=weights, notes=notes, is_anonymous=is_anonymous)
