"""``helios export`` and ``migrate``: checkpoints for other programs, and those of another one."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from helios.checkpoint import file_names
from helios.checkpoint.loading import Depth
from helios.checkpoint.status import Status, look_into
from helios.cli import output
from helios.cli.checkpoints import existing, find_checkpoint
from helios.cli.output import Answer
from helios.errors import ArgumentError, CheckpointError
from helios.storage.files import as_local_path
from helios.text import count_text, size_text
from helios.version import __version__

if TYPE_CHECKING:
    from helios.checkpoint.export import Weights

_FOLDER_FORMAT = "huggingface"
FORMATS = ("safetensors", "pt", _FOLDER_FORMAT)
_OF_ADAPTERS = re.compile(r"(^|\.)(base_model\.model\.|lora_[A-Za-z_]+(\.|$)|ia3_l(\.|$))")


def export_weights(namespace: argparse.Namespace) -> Answer:
    """Write the weights of a checkpoint to a separate file.

    They are read without Helios: from a file for safetensors and pt, from a folder
    for huggingface (from_pretrained loads it).

    The names are those inside the network if there is only one, or if --network
    names one; those of several networks begin with the model's attribute:
    encoder.layer.weight. If the model overrides state_dict, all tensors outside
    optimizers are exported, by the keys that lead to them.

    With --trained, frozen parameters are left out, such as the base under adapters:
    load_state_dict(..., strict=False) of the network takes the rest.

    For a run's folder, exports the checkpoint from which fit would resume, or with
    --best the best one.

    The checkpoint is verified first. An existing file is overwritten only with
    --force, and an existing folder never.
    """
    from helios.checkpoint.export import select_weights, write_folder, write_weights

    source = find_checkpoint(namespace.path, takes_best=namespace.best)
    with output.progress(source.name, total=source.stat().st_size) as bar:
        status, tree = look_into(source, Depth.BYTES, bar.update)
    if not status.is_good:
        raise CheckpointError(f"{status.reason} Nothing was exported.")
    weights = select_weights(
        tree,
        network=namespace.network,
        average=namespace.average,
        is_trained=namespace.trained,
    )
    _warn_of_average(status, tree, namespace)
    target = as_local_path("FILE", namespace.out or source.with_suffix(f".{namespace.to}"))
    metadata = _metadata(status, tree, namespace.average)
    count = count_text(len(weights.tensors), "tensor")
    lines = [f"Wrote {count}, {size_text(weights.num_bytes)}, to {target}."]
    names: list[str] = []
    if namespace.to == _FOLDER_FORMAT:
        _refuse_adapters(weights, is_trained=namespace.trained)
        names = write_folder(target, weights, metadata=metadata)
        lines.append(
            "from_pretrained also needs a config.json there: that of the base model, or what "
            f"config.save_pretrained({str(target)!r}) writes."
        )
    else:
        force = namespace.force
        write_weights(target, weights, kind=namespace.to, metadata=metadata, replaces=force)
    if weights.left_out:
        lines.append(f"Not exported, because not tensors: {', '.join(weights.left_out)}.")
    document = {
        "path": target,
        "source": source,
        "num_tensors": len(weights.tensors),
        "num_bytes": weights.num_bytes,
        "names": list(weights.tensors),
        "left_out": weights.left_out,
        "metadata": metadata,
        "files": names,
    }
    return Answer(lines, document)


def _refuse_adapters(weights: Weights, *, is_trained: bool) -> None:
    """Refuse a part, and a model of PEFT, whose names ``from_pretrained`` does not know."""
    if is_trained:
        raise ArgumentError(
            "--to huggingface must get all weights, because from_pretrained draws those that a "
            "folder lacks, got --trained. Use --to safetensors."
        )
    named = [name for name in weights.tensors if _OF_ADAPTERS.search(name)]
    if named:
        raise ArgumentError(
            f"--to huggingface cannot export adapters of PEFT ({named[0]}, ...), because nothing "
            "would load the folder. Use --to safetensors, and load_state_dict of the same PEFT "
            "model."
        )


def _warn_of_average(status: Status, tree: Any, namespace: argparse.Namespace) -> None:
    """Warn if the scores of the checkpoint are not those of the weights that are exported."""
    for name in [] if status.sidecar is None else status.sidecar.averages:
        networks = tree[file_names.KEY_PLUGINS].get(name, {}).get("averages", {})
        if name != namespace.average and namespace.network in (None, *networks):
            output.warn(
                f"the scores of {status.path.name} are those of the average of plugin {name!r}, "
                f"which is not exported: --average {name}"
            )


def _metadata(status: Status, tree: Any, average: str | None) -> dict[str, str]:
    state, sidecar = tree[file_names.KEY_TRAINING_STATE], status.sidecar
    return {
        # The key that other libraries look for in the header.
        "format": "pt",
        "helios_version": __version__,
        "run_name": "" if sidecar is None else sidecar.run_name,
        "epoch": str(state["global_epoch"]),
        "iteration": str(state["global_iteration"]),
        "source": status.path.name,
        "source_digest": "" if sidecar is None else sidecar.digest,
        "average": average or "",
    }


def migrate(namespace: argparse.Namespace) -> Answer:
    """Migrate checkpoints of helios-ml below a folder to the current format, in place.

    Files of other programs, links and saves in progress are listed and left alone.
    A kill loses nothing: run the same command again to continue.

    Exit code 0: success. 1: a file is damaged, was refused or could not be
    migrated. 2: wrong usage.
    """
    from helios.migration.folder_migration import Result, migrate_checkpoints

    root = existing(namespace.root)
    watch = partial(output.progress, "migrate", unit=" files")
    reports = migrate_checkpoints(
        root, is_dry=namespace.dry_run, backs_up=namespace.backup, watch=watch
    )
    counts = Counter(report.result.value for report in reports)
    lines = []
    for result in Result:
        found = [f"  {report}" for report in reports if report.result is result]
        lines += [f"{result.value}:", *found] if found else []
    total = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Answer(
        [*lines, f"{total or 'There is no checkpoint here'}."],
        {
            "root": root,
            "counts": counts,
            "files": [vars(each) | {"result": each.result.value} for each in reports],
        },
        not any(report.result.is_failure for report in reports),
    )


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parsers of the commands."""
    export = add("export", export_weights, "helios export FILE|DIR --to FORMAT [options]")
    export.add_argument("path", metavar="FILE|DIR", help="a checkpoint, or the folder of a run")
    export.add_argument("--to", required=True, choices=FORMATS, help="what reads the weights")
    export.add_argument("--out", metavar="PATH", help="the file or folder to write")
    export.add_argument("--best", action="store_true", help="the best checkpoint of the folder")
    export.add_argument("--trained", action="store_true", help="without frozen parameters")
    export.add_argument("--network", metavar="NAME", help="only this network of the model")
    export.add_argument("--average", metavar="ID", help='averages, such as "ema", not the weights')
    export.add_argument("--force", action="store_true", help="overwrite an existing file")
    old = add("migrate", migrate)
    old.add_argument("root", metavar="ROOT", help="a folder, or one file")
    old.add_argument("--dry-run", action="store_true", help="report only, and write nothing")
    old.add_argument("--no-backup", action="store_false", dest="backup", help="keep no old files")
