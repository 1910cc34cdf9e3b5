"""``helios export``: the weights of a checkpoint, for programs without Helios."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.contents import open_contents
from helios.checkpoint.export import Weights, select_weights
from helios.checkpoint.export_files import FILE_FORMATS, write_weights
from helios.checkpoint.export_folders import (
    CONFIG_NAME,
    DistributedCheckpoint,
    FolderFormat,
    HuggingFace,
    write_folder,
)
from helios.checkpoint.folder_status import examine_folder
from helios.checkpoint.retention import Ranking, rank_files
from helios.checkpoint.status import Depth, Status, look_into
from helios.cli import output
from helios.core.local_paths import as_local_path
from helios.core.text import parse_size, size_text
from helios.errors import ArgumentError, CheckpointError
from helios.version import __version__

DESCRIPTION = """\
Write only the weights of a checkpoint, to be read without Helios: to a file
for safetensors and pt, to a folder for huggingface (from_pretrained loads it)
and dcp (torch.distributed.checkpoint loads it).

The names are those inside the network if there is only one, or if --network
names one; those of several networks begin with the model's attribute:
encoder.layer.weight. If the model overrides state_dict, all tensors outside
optimizers are exported, by the keys that lead to them.

With --best, FILE is the folder of a run, and its best checkpoint is exported.

The checkpoint is verified first. An existing file is overwritten only with
--force, and so is a folder if it holds nothing but an export.
"""

FORMATS = (*FILE_FORMATS, "huggingface", "dcp")
_MAX_SHARD_SIZE = "5GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    # Versions of Python wrap a generated usage line at different places.
    parser.usage = "%(prog)s FILE --to FORMAT [options]"
    parser.add_argument("file", metavar="FILE", help="a checkpoint; with --best, a run's folder")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        metavar="FORMAT",
        help="safetensors; pt, which torch.load reads; huggingface; or dcp",
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="the file or folder (default: beside the checkpoint, same stem)",
    )
    parser.add_argument(
        "--best", action="store_true", help="the best checkpoint in the folder of a run"
    )
    parser.add_argument(
        "--network", metavar="NAME", help="only this network, by the model's attribute"
    )
    parser.add_argument(
        "--average",
        metavar="ID",
        help='averages instead of weights, by the id of the plugin: "ema" or "swa"',
    )
    parser.add_argument(
        "--config", metavar="FILE", help="for huggingface: copied into the folder as config.json"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help=f"for huggingface: the size of a file, such as 500MB (default: {_MAX_SHARD_SIZE})",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file or export")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Export; 0 when all is on the disk.

    Raises:
        CheckpointError: if the checkpoint is not good.
        ArgumentError: for a network or average that is not in it, for an option that the format
            does not have, or if the file exists.
    """
    ranking = _rank(namespace.file) if namespace.best else None
    source = output.existing_checkpoint(namespace.file) if ranking is None else _best_of(ranking)
    layout = _layout(namespace)
    status, tree = look_into(source, Depth.BYTES)
    if not status.is_good:
        raise CheckpointError(f"{status.reason} Nothing was exported.")
    weights = select_weights(tree, network=namespace.network, average=namespace.average)
    _warn_of_average(status, tree, namespace)
    target = as_local_path("FILE", namespace.out or source.with_suffix(f".{namespace.to}"))
    metadata = _metadata(status, tree, namespace.average)
    names: list[str] = []
    if layout is None:
        kind, replaces = namespace.to, namespace.force
        write_weights(target, weights, kind=kind, metadata=metadata, replaces=replaces)
    else:
        names = write_folder(target, weights, layout, metadata=metadata, replaces=namespace.force)
    if namespace.json:
        document = _document(target, status, weights, metadata)
        output.print_json(document | {"files": names})
    else:
        if ranking is not None and ranking.lacks_best:
            output.print_lines(f"The best validation has no checkpoint: {ranking.best}.")
        lacks_config = namespace.to == "huggingface" and CONFIG_NAME not in names
        output.print_lines(*_lines(target, weights, lacks_config=lacks_config))
    return 0


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


def _rank(path: str) -> Ranking:
    """Return the good checkpoints of a run's folder by their scores."""
    root = output.existing_folder(path)
    ranking = rank_files(examine_folder(root).files)
    if ranking.rule is None:
        raise CheckpointError(
            f"Nothing says which checkpoint in {root} is the best: no KeepBest, no single "
            "EarlyStopping, and no have_metrics_improved of the model. Pass a file."
        )
    if ranking.path is None:
        best = "" if ranking.best is None else f" The best validation: {ranking.best}."
        raise CheckpointError(f"No checkpoint in {root} has a score.{best} Pass a file.")
    return ranking


def _best_of(ranking: Ranking) -> Path:
    assert ranking.path is not None
    return ranking.path


def _layout(namespace: argparse.Namespace) -> FolderFormat | None:
    """Return the format of a folder, with its options; ``None`` for a file."""
    if namespace.to == "huggingface":
        config = None if namespace.config is None else _read_config(namespace.config)
        return HuggingFace(_max_bytes(namespace.max_shard_size or _MAX_SHARD_SIZE), config)
    for option, value in (
        ("--config", namespace.config),
        ("--max-shard-size", namespace.max_shard_size),
    ):
        if value is not None:
            raise ArgumentError(
                f"{option} has no effect with --to {namespace.to}. Omit it, or export to "
                "huggingface."
            )
    return DistributedCheckpoint() if namespace.to == "dcp" else None


def _max_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ArgumentError(
            "--max-shard-size must be a positive number of bytes such as 500MB or 5GB, got "
            f"{text!r}."
        ) from error


def _read_config(path: str) -> bytes:
    data = output.existing_file(path).read_bytes()
    try:
        is_config = isinstance(json.loads(data), dict)
    except ValueError:
        is_config = False
    if not is_config:
        raise ArgumentError(
            f"--config must name the config.json of the network, a JSON object, got {path}. Write "
            "one with config.save_pretrained(folder)."
        )
    return data


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


def _lines(target: Path, weights: Weights, *, lacks_config: bool) -> list[str]:
    size = size_text(weights.num_bytes)
    lines = [f"Wrote {len(weights.tensors)} tensors, {size}, to {target}."]
    if weights.left_out:
        lines.append(f"Not exported, because not tensors: {', '.join(weights.left_out)}.")
    if lacks_config:
        lines.append(
            "from_pretrained also needs a config.json there: pass --config, or write it with "
            f"config.save_pretrained({str(target)!r})."
        )
    return lines
