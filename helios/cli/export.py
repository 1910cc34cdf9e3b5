"""``helios export``: the weights of a checkpoint, for programs without Helios."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.contents import contents_of
from helios.checkpoint.export import FORMATS, Weights, select_weights, write_weights
from helios.checkpoint.status import Depth, Status, look_into
from helios.cli import output
from helios.core.sizes import size_text
from helios.errors import CheckpointError
from helios.version import __version__

DESCRIPTION = """\
Write only the weights of a checkpoint to a file that can be read without
Helios.

The names are those inside the network if there is only one, or if --network
names one; those of several networks begin with the model's attribute:
encoder.layer.weight. If the model overrides state_dict, all tensors outside
optimizers are exported, by the keys that lead to them.

The checkpoint is verified first. An existing file is overwritten only with
--force.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    # Versions of Python wrap a generated usage line at different places.
    parser.usage = "%(prog)s FILE --to FORMAT [options]"
    parser.add_argument("file", metavar="FILE", help="a checkpoint")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        metavar="FORMAT",
        help="safetensors, or pt, which torch.load reads",
    )
    parser.add_argument(
        "--out", metavar="PATH", help="the file (default: beside the checkpoint, same stem)"
    )
    parser.add_argument(
        "--network", metavar="NAME", help="only this network, by the model's attribute"
    )
    parser.add_argument(
        "--average",
        metavar="ID",
        help='averages instead of weights, by the id of the plugin: "ema" or "swa"',
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Export; 0 when the file is on the disk.

    Raises:
        CheckpointError: if the checkpoint is not good.
        ArgumentError: for a network or average that is not in it, or if the file exists.
    """
    source = output.existing_checkpoint(namespace.file)
    status, tree = look_into(source, Depth.BYTES)
    if not status.is_good:
        raise CheckpointError(f"{status.reason} Nothing was exported.")
    weights = select_weights(tree, network=namespace.network, average=namespace.average)
    target = Path(namespace.out or source.with_suffix(f".{namespace.to}"))
    metadata = _metadata(status, tree, namespace.average)
    write_weights(target, weights, kind=namespace.to, metadata=metadata, replaces=namespace.force)
    if namespace.json:
        output.print_json(_document(target, status, weights, metadata))
    else:
        output.print_lines(*_lines(target, weights))
    return 0


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
        "source_digest": digest or contents_of(status.path).digest,
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


def _lines(target: Path, weights: Weights) -> list[str]:
    size = size_text(weights.num_bytes)
    lines = [f"Wrote {len(weights.tensors)} tensors, {size}, to {target}."]
    if weights.left_out:
        lines.append(f"Not exported, because not tensors: {', '.join(weights.left_out)}.")
    return lines
