"""``helios export`` and ``migrate``: checkpoints for other programs, and those of another one."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.contents import open_contents
from helios.checkpoint.export import Weights, select_weights
from helios.checkpoint.export_files import FILE_FORMATS, draft_of, write_folder, write_weights
from helios.checkpoint.loading import Depth
from helios.checkpoint.retention import Ranking
from helios.checkpoint.status import Status, look_into
from helios.cli import output
from helios.cli.output import Answer, Command, argument
from helios.errors import ArgumentError, CheckpointError
from helios.migration.folder_migration import BACKUP_FOLDER, Report, Result, migrate_checkpoints
from helios.storage import files
from helios.storage.local_paths import as_local_path
from helios.text import parse_size, size_text
from helios.version import __version__

FORMATS = (*FILE_FORMATS, "huggingface")
_OF_ADAPTERS = re.compile(r"(^|\.)(base_model\.model\.|lora_[A-Za-z_]+(\.|$)|ia3_l(\.|$))")


def export_weights(namespace: argparse.Namespace) -> Answer:
    """Write only the weights of a checkpoint, to be read without Helios: to a file
    for safetensors and pt, to a folder for huggingface (from_pretrained loads it).

    The names are those inside the network if there is only one, or if --network
    names one; those of several networks begin with the model's attribute:
    encoder.layer.weight. If the model overrides state_dict, all tensors outside
    optimizers are exported, by the keys that lead to them.

    Of a run's folder, the checkpoint from which fit would resume is exported, or
    with --best the best one.

    The checkpoint is verified first. An existing file is overwritten only with
    --force, and an existing folder never.
    """
    source, ranking = output.find_checkpoint(namespace.path, takes_best=namespace.best)
    is_folder = namespace.to == "huggingface"
    if not is_folder and (namespace.config or namespace.max_shard_size):
        raise ArgumentError("--config and --max-shard-size need --to huggingface.")
    folder_options = _folder_options(namespace) if is_folder else {}
    with output.progress(source.name, output.size_of(source)) as watch:
        status, tree = look_into(source, Depth.BYTES, watch)
    if not status.is_good:
        raise CheckpointError(f"{status.reason} Nothing was exported.")
    weights = select_weights(tree, network=namespace.network, average=namespace.average)
    if is_folder:
        _refuse_adapters(weights)
    _warn_of_average(status, tree, namespace)
    target = as_local_path("FILE", namespace.out or source.with_suffix(f".{namespace.to}"))
    metadata = _metadata(status, tree, namespace.average)
    names: list[str] = []
    draft = draft_of(target) if is_folder else files.temporary_path(target)
    with output.growth(draft, target.name, weights.num_bytes):
        if is_folder:
            names = write_folder(target, weights, metadata=metadata, **folder_options)
        else:
            force = namespace.force
            write_weights(target, weights, kind=namespace.to, metadata=metadata, replaces=force)
    lacks_config = is_folder and namespace.config is None
    return Answer(
        _lines(target, weights, ranking, lacks_config=lacks_config),
        lambda: {**_document(target, status, weights, metadata), "files": names},
    )


def _refuse_adapters(weights: Weights) -> None:
    """Refuse a model of PEFT, whose names ``from_pretrained`` does not know."""
    named = [name for name in weights.tensors if _OF_ADAPTERS.search(name)]
    if named:
        raise ArgumentError(
            "--to huggingface cannot export a model with adapters of PEFT, because nothing would "
            f"load the folder: {len(named)} of its {len(weights.tensors)} tensors have names such "
            f"as {named[0]}. Adapters cannot be exported yet. Use --to safetensors, which keeps "
            "all names: load_state_dict of the same PEFT model loads that file."
        )


def _warn_of_average(status: Status, tree: Any, namespace: argparse.Namespace) -> None:
    """Warn if the scores of the checkpoint are not those of the weights that are exported."""
    averages = [] if status.sidecar is None else status.sidecar.averages
    plugins = tree.get(file_names.KEY_PLUGINS, {})
    for name in averages:
        networks = plugins.get(name, {}).get("averages", {})
        is_concerned = namespace.network is None or namespace.network in networks
        if name != namespace.average and is_concerned:
            sys.stderr.write(
                f"helios export: warning: the scores of {status.path.name} are those of the "
                f"average of plugin {name!r}, which is not exported: --average {name}\n"
            )


def _folder_options(namespace: argparse.Namespace) -> dict[str, Any]:
    try:
        max_bytes = parse_size(namespace.max_shard_size or "5GB")
    except ValueError as error:
        raise ArgumentError(
            "--max-shard-size must be a positive number of bytes such as 500MB or 5GB, got "
            f"{namespace.max_shard_size!r}."
        ) from error
    config = namespace.config and output.existing_file(namespace.config).read_bytes()
    return {"max_bytes": max_bytes, "config": config}


def _metadata(status: Status, tree: Any, average: str | None) -> dict[str, str]:
    state, sidecar = tree[file_names.KEY_TRAINING_STATE], status.sidecar
    digest = "" if sidecar is None else sidecar.digest
    return {
        # The key that other libraries look for in the header.
        "format": "pt",
        "helios_version": __version__,
        "run_name": "" if sidecar is None else sidecar.run_name,
        "epoch": str(state["global_epoch"]),
        "iteration": str(state["global_iteration"]),
        "source": status.path.name,
        "source_digest": digest or open_contents(status.path).digest,
        "average": average or "",
    }


def _document(
    target: Path, status: Status, weights: Weights, metadata: dict[str, str]
) -> dict[str, Any]:
    return {
        "path": str(target),
        "source": str(status.path),
        "num_tensors": len(weights.tensors),
        "num_bytes": weights.num_bytes,
        "names": list(weights.tensors),
        "left_out": weights.left_out,
        "metadata": metadata,
    }


def _lines(
    target: Path, weights: Weights, ranking: Ranking | None, *, lacks_config: bool
) -> list[str]:
    size = size_text(weights.num_bytes)
    lines = []
    if ranking is not None and ranking.lacks_best:
        lines.append(f"The best validation has no checkpoint: {ranking.best}.")
    count = len(weights.tensors)
    lines += [f"Wrote {count} tensor{'s' if count != 1 else ''}, {size}, to {target}."]
    if weights.left_out:
        lines.append(f"Not exported, because not tensors: {', '.join(weights.left_out)}.")
    if lacks_config:
        lines.append(
            "from_pretrained also needs a config.json there: pass --config, or write it with "
            f"config.save_pretrained({str(target)!r})."
        )
    return lines


def migrate(namespace: argparse.Namespace) -> Answer:
    """Migrate all checkpoints below a folder to the current format, in place.

    Files of other programs, links and saves in progress are listed and left alone.
    A kill loses nothing: run the same command again to continue.

    Exit code 0: success. 1: a file is damaged, was refused or could not be
    migrated. 2: wrong usage.
    """
    root = as_local_path("ROOT", namespace.root)
    if not root.exists():
        raise ArgumentError(f"No such folder or file: {root}.")
    reports = migrate_checkpoints(
        root,
        is_dry=namespace.dry_run,
        backs_up=namespace.backup,
        show=partial(output.progress, "migrate", unit=" files"),
    )
    is_failure = any(report.result.is_failure for report in reports)
    return Answer(_summary(reports), partial(_list_reports, root, reports), lambda: int(is_failure))


def _list_reports(root: Path, reports: Iterable[Report]) -> dict[str, Any]:
    table = [
        {
            "path": str(report.path),
            "result": report.result.value,
            "reason": report.reason,
            "backup": None if report.backup is None else str(report.backup),
        }
        for report in reports
    ]
    return {"root": str(root), "counts": _count(reports), "files": table}


def _count(reports: Iterable[Report]) -> dict[str, int]:
    counts = Counter(report.result for report in reports)
    return {result.value: counts[result] for result in Result if counts[result]}


def _summary(reports: Sequence[Report]) -> list[str]:
    lines = []
    for result in Result:
        found = [report for report in reports if report.result is result]
        if found:
            lines += [f"{result.value}:", *(f"  {report}" for report in found)]
    counts = [f"{count} {name}" for name, count in _count(reports).items()]
    return [*lines, f"{', '.join(counts) or 'There is no checkpoint here'}."]


COMMANDS = {
    "export": Command(
        export_weights,
        argument("path", metavar="FILE|DIR", help="a checkpoint, or the folder of a run"),
        argument(
            "--to",
            required=True,
            choices=FORMATS,
            metavar="FORMAT",
            help="safetensors; pt, which torch.load reads; or huggingface",
        ),
        argument(
            "--out",
            metavar="PATH",
            help="the file or folder (default: beside the checkpoint, same stem)",
        ),
        argument("--best", action="store_true", help="the best checkpoint of the folder"),
        argument("--network", metavar="NAME", help="only this network, by the model's attribute"),
        argument(
            "--average",
            metavar="ID",
            help='averages instead of weights, by the id of the plugin: "ema" or "swa"',
        ),
        argument(
            "--config",
            metavar="FILE",
            help="for huggingface: copied into the folder as config.json",
        ),
        argument(
            "--max-shard-size",
            metavar="SIZE",
            help="for huggingface: the size of a file, such as 500MB (default: 5GB)",
        ),
        argument("--force", action="store_true", help="overwrite an existing file"),
        # Versions of Python wrap a generated usage line at different places.
        usage="%(prog)s FILE|DIR --to FORMAT [options]",
    ),
    "migrate": Command(
        migrate,
        argument("root", metavar="ROOT", help="a folder, or one file"),
        argument(
            "--dry-run",
            action="store_true",
            help="report what would be done, and write nothing",
        ),
        argument(
            "--backup",
            action="store_true",
            default=True,
            help=f"keep each old file in a folder {BACKUP_FOLDER} beside it (the default)",
        ),
        argument("--no-backup", action="store_false", dest="backup", help="keep no backups"),
    ),
}
