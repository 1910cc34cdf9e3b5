"""``helios inspect``: the content of one checkpoint, without the code that wrote it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from helios.best import BestValidation
from helios.checkpoint import file_names
from helios.checkpoint.outline import Node, outline, section
from helios.checkpoint.reproducibility import list_missing
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.status import Status, look_into
from helios.cli import output
from helios.cli.output import Column
from helios.core.stored_values import list_values, stored_arguments, stored_params
from helios.core.text import size_text, with_step

DESCRIPTION = """\
Show the content of a checkpoint: its sidecar, its counters, and the tree of its
tensors with types, shapes and sizes. Works on damaged, old and foreign files
as far as they can be read. Tensors are not read, and objects of unknown types
are named, never built.

Exit code 0: the file is good, as far as its structure shows. 1: it is not; the
reason is printed after the state. 2: wrong usage.
"""

_DEPTH = 4
_INDENT = "  "
_MAX_VALUE = 60
_SECTIONS = (file_names.KEY_TRAINING_STATE, file_names.KEY_CURSOR, file_names.KEY_OPTIONS)
_SHOWN_APART = ("params", "params_history", "found")
_COLUMNS = (
    Column("tree"),
    Column("type", rank=1),
    Column("shape", rank=1),
    Column("size", is_right=True, rank=1),
    Column("value", rank=2),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("file", metavar="FILE", help="a checkpoint")
    parser.add_argument(
        "--depth",
        type=int,
        default=_DEPTH,
        metavar="N",
        help=f"levels of the tree to show; 0 for all (default: {_DEPTH})",
    )
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Show; 0 if the file is good, 1 if it is not."""
    path = output.existing_checkpoint(namespace.file)
    status, tree = look_into(path)
    nodes = [] if tree is None else outline(tree)
    if namespace.json:
        output.print_json(_document(status, tree, nodes))
    else:
        output.print_lines(*_lines(status, tree, nodes, namespace.depth))
    return 0 if status.is_good else 1


def _document(status: Status, tree: Any, nodes: list[Node]) -> dict[str, Any]:
    """Return everything; tensors by path, whatever the depth."""
    sidecar = status.sidecar
    return {
        **output.status_document(status),
        "sidecar": None if sidecar is None else dataclasses.asdict(sidecar),
        "keys": [node.path for node in nodes if len(node.keys) == 1],
        **{key: section(tree, key) for key in _SECTIONS},
        "tensors": [_tensor_document(node) for node in nodes if node.kind == "tensor"],
        "num_tensors": nodes[0].num_tensors if nodes else 0,
        "num_bytes": nodes[0].num_bytes if nodes else 0,
    }


def _tensor_document(node: Node) -> dict[str, Any]:
    return {
        "path": node.path,
        "dtype": node.dtype,
        "shape": list(node.shape),
        "bytes": node.num_bytes,
        "note": node.text,
    }


def _lines(status: Status, tree: Any, nodes: list[Node], depth: int) -> Iterator[str]:
    facts = {
        "file": str(status.path),
        "size": size_text(status.size),
        "state": status.condition.value,
        "reason": status.reason,
        "refers to": ", ".join(status.needs),
        **({} if status.sidecar is None else _sidecar_facts(status.sidecar)),
        **{key: _in_one_line(section(tree, key)) for key in _SECTIONS},
        **_value_facts(status.sidecar, tree),
    }
    yield from output.facts({name: text for name, text in facts.items() if text})
    if nodes:
        yield ""
        rows = [_row(node) for node in nodes if _is_shown(node, depth)]
        yield from output.table(_COLUMNS, rows, output.terminal_width())
        total = size_text(nodes[0].num_bytes)
        yield f"{nodes[0].num_tensors} tensors, {total}"


def _value_facts(sidecar: Sidecar | None, tree: Any) -> dict[str, str]:
    """Return what the run is declared with, and what constructors were given."""
    options = _options_of(sidecar, tree)
    earlier = options.get("params_history", [])[:-1]
    return {
        "params": list_values(stored_params(options)),
        "earlier params": "; ".join(
            f"from iteration {each['iteration']}: {list_values(stored_params(each))}"
            for each in earlier
        ),
        "found": list_values(stored_arguments(options)),
    }


def _options_of(sidecar: Sidecar | None, tree: Any) -> Mapping[str, Any]:
    if sidecar is not None:
        return sidecar.options
    found = tree.get(file_names.KEY_OPTIONS) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _sidecar_facts(sidecar: Sidecar) -> dict[str, str]:
    return {
        "run": sidecar.run_name,
        "place": f"epoch {sidecar.epoch}, iteration {with_step(sidecar.iteration, sidecar.step)}",
        "metrics": output.metrics_text(sidecar.metrics),
        "best": str(BestValidation.from_plain(sidecar.best) or ""),
        "averages": ", ".join(map(str, sidecar.averages)),
        "level": sidecar.level,
        "lacks": list_missing(sidecar.missing),
        "rests on": "; ".join(map(str, sidecar.claims)),
        "audit": "; ".join(map(str, sidecar.mismatches)),
        "finished": sidecar.finished or "",
        "replicas": str(sidecar.num_replicas),
        "resumed from": sidecar.resumed_from or "",
        "changes": "; ".join(map(str, sidecar.changes)),
        "migrated": "from a file of helios-ml" if sidecar.is_migrated else "",
        "written by": f"Helios {sidecar.version}, format {sidecar.schema}",
        "digest": sidecar.digest,
    }


def _in_one_line(table: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {value}" for name, value in table.items() if name not in _SHOWN_APART
    )


def _is_shown(node: Node, depth: int) -> bool:
    is_in_facts = len(node.keys) > 1 and node.keys[0] in _SECTIONS
    return bool(node.keys) and not is_in_facts and (depth < 1 or len(node.keys) <= depth)


def _row(node: Node) -> tuple[str, ...]:
    name = _INDENT * (len(node.keys) - 1) + (node.keys[-1] or "''")
    size = size_text(node.num_bytes) if node.num_tensors else ""
    if node.kind == "tensor":
        return (name, node.dtype, str(list(node.shape)), size, node.text)
    if node.kind == "value":
        return (name, "", "", "", _cut(node.text))
    count = f"{node.num_tensors} tensors" if node.num_tensors else ""
    return (name, node.text, count, size, "")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
