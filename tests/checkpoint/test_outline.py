"""The tree of a checkpoint in lines: sizes, shared memory, and trees without an end."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.checkpoint.outline import Node, outline
from helios.storage import codec, files
from tests.checkpoint import hostile


def written(tmp_path: Path, tree: Any) -> Any:
    path = tmp_path / "file.pth"
    with files.create(path) as handle:
        codec.write_encoded(handle, codec.encode(tree, where=""))
    return codec.read_structure(path)[0]


def by_path(tree: Any) -> dict[str, Node]:
    return {node.path: node for node in outline(tree)}


def test_groups_sum_up_tensors_and_bytes(tmp_path: Path) -> None:
    tree = {"a": {"x": torch.zeros(3), "y": [torch.zeros(2, dtype=torch.bfloat16), 1]}, "n": 7}
    nodes = by_path(written(tmp_path, tree))
    assert list(nodes) == ["", "a", "a.x", "a.y", "a.y.0", "a.y.1", "n"]
    assert (nodes["a.x"].dtype, nodes["a.x"].shape, nodes["a.x"].num_bytes) == ("float32", (3,), 12)
    assert (nodes["a"].num_tensors, nodes["a"].num_bytes) == (2, 16)
    assert (nodes[""].num_tensors, nodes[""].num_bytes) == (2, 16)
    assert nodes["n"].text == "7"


def test_encoded_values_are_shown_as_they_were(tmp_path: Path) -> None:
    counts: defaultdict[str, Any] = defaultdict(int, steps=3)
    tree = {
        "array": np.arange(3),
        "where": Path("a") / "b",
        "counts": counts,
        "seen": {5},
        "odd": {("a", torch.float32): torch.ones(1)},
    }
    nodes = by_path(written(tmp_path, tree))
    assert nodes["array"].text == "array([0, 1, 2])"
    assert "'a/b'" in nodes["where"].text
    assert nodes["counts.steps"].text == "3"
    assert nodes["seen.0"].text == "5"
    assert sum(node.kind == "tensor" for node in nodes.values()) == 1


@pytest.mark.parametrize("name", ["_laughing", "_endless", "_deep"])
def test_a_tree_that_is_too_much_is_shown_in_part(name: str) -> None:
    nodes = outline({"a": getattr(hostile, name)()})
    assert len(nodes) < 1000
    texts = [node.text for node in nodes]
    assert any("the same as" in text or "too deeply" in text for text in texts)
    assert all(len(text) < 300 for text in texts)
