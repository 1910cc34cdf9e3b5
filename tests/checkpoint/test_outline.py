"""The tree of a checkpoint in lines: sizes, shared memory, and trees without an end."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.checkpoint.outline import Node, outline, section
from helios.storage import codec, files
from helios.storage.placeholders import stand_in
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


def test_shared_memory_counts_once_and_is_said(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    nodes = by_path(written(tmp_path, {"a": weight, "b": weight.view(2, 2), "c": torch.zeros(1)}))
    assert nodes["b"].text == "shares memory with a"
    assert [nodes[key].num_bytes for key in ("a", "b", "c", "")] == [16, 0, 4, 20]


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


def test_unknown_objects_show_their_state_and_enum_keys_their_value() -> None:
    key, state = stand_in("old.Keys")("model"), stand_in("old.State")()
    state.__setstate__({"step": 4})
    nodes = by_path({key: state, "other": stand_in("old.Thing")(1, "x")})
    assert nodes["model"].text == "old.State"
    assert nodes["model.step"].text == "4"
    assert nodes["other"].text == "old.Thing(1, 'x')"


@pytest.mark.parametrize("name", ["_laughing", "_endless", "_deep"])
def test_a_tree_that_is_too_much_is_shown_in_part(name: str) -> None:
    nodes = outline({"a": getattr(hostile, name)()})
    assert len(nodes) < 1000
    texts = [node.text for node in nodes]
    assert any("the same as" in text or "too deeply" in text for text in texts)
    assert all(len(text) < 300 for text in texts)


def test_what_no_encoder_made_is_shown_all_the_same() -> None:
    tree = {
        "a": {"__helios__": "set", "items": 5},
        "b": {"__helios__": [], "pairs": [1, [2, 3]]},
        "c": {"__helios__": "array", "value": []},
    }
    assert {"a", "b", "b.2", "c"} < set(by_path(tree))


def test_long_values_are_cut() -> None:
    nodes = by_path({"text": "x" * 10**6, "numbers": list(range(10**5)), "k" * 10**4: 1})
    assert all(len(node.path) <= 200 and len(node.text) <= 200 for node in nodes.values())


def test_a_section_gives_plain_values_as_they_are() -> None:
    tree = {"cursor": OrderedDict(epoch=1, stop=None, where=[1, 2]), "n": 3}
    assert section(tree, "cursor") == {"epoch": 1, "stop": None, "where": "[1, 2]"}
    assert section(tree, "n") == section(tree, "none") == section([1], "cursor") == {}
