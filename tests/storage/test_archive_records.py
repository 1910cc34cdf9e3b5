"""What a file says of its tensors' sizes is compared with its records, whatever PyTorch does."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from helios.storage.container_checks import check_sizes

_OF_TORCH = [torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
_UNTYPED = [torch.uint16, torch.float8_e4m3fn]


def pack(tree: Any, **options: Any) -> io.BytesIO:
    handle = io.BytesIO()
    torch.save(tree, handle, **options)
    return handle


def repack(source: io.BytesIO, old: bytes, new: bytes) -> io.BytesIO:
    """Return a container whose pickle says something else."""
    return rewrite(source, lambda name, data: {name: data.replace(old, new, 1)})


def rewrite(source: io.BytesIO, change: Any) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(source) as container, zipfile.ZipFile(made, "w") as target:
        for name in container.namelist():
            parts = {name: container.read(name)}
            if name.endswith(("data.pkl", "data/0")):
                parts = change(name, container.read(name))
            for part, data in parts.items():
                target.writestr(part, data)
    return made


def test_what_torch_writes_is_taken_whatever_it_holds() -> None:
    base = torch.zeros(10)
    tree = {
        "typed": [torch.zeros(3, dtype=dtype) for dtype in _OF_TORCH],
        "untyped": [torch.zeros(5, dtype=dtype) for dtype in _UNTYPED],
        "views": [base[3:5], base[::2], base.view(2, 5)],
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "sparse": torch.zeros(2, 2).to_sparse(),
        # Strings that references hold too: they may come out of the memo there.
        "storage": ["cpu", "0", "storage", 10],
        "many": [torch.zeros(1) for _ in range(300)],
    }
    for protocol in (2, 3):
        check_sizes(pack(tree, pickle_protocol=protocol))


@pytest.mark.parametrize("number", [3, 5, 255])
def test_another_number_of_elements_than_the_record_has_is_refused(number: int) -> None:
    lying = repack(pack(torch.zeros(4)), b"cpuq\x04K\x04t", b"cpuq\x04K%ct" % number)
    text = f"the record 0 has 16 bytes instead of {4 * number}"
    with pytest.raises(ValueError, match=text):
        check_sizes(lying)


def refer(code: bytes) -> io.BytesIO:
    """Return a container of one record whose pickle is ``code``."""
    return rewrite(
        pack(torch.zeros(4)),
        lambda name, data: {name: code if name.endswith("data.pkl") else data},
    )


_HEAD = b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
_REFERENCES = {
    "a number that is popped": _HEAD + b"X\x03\x00\x00\x00cpuK\x04K\xff0tQ.",
    "a number of a list": _HEAD + b"X\x03\x00\x00\x00cpu]K\xffatQ.",
    "an inner tuple": _HEAD + b"X\x03\x00\x00\x00cpu(K\x04ttQ.",
    "a memo that was overwritten": b"\x80\x02K\x04q\x01]q\x01"
    + _HEAD[2:]
    + b"X\x03\x00\x00\x00cpuh\x01tQ.",
    "another kind of storage": _HEAD.replace(b"FloatStorage", b"Size")
    + b"X\x03\x00\x00\x00cpuK\x04tQ.",
    "a name in the place of a reference": b"\x80\x02X\x01\x00\x00\x000Q.",
}


@pytest.mark.shows("S38")
@pytest.mark.parametrize("case", _REFERENCES)
def test_a_reference_that_torch_does_not_write_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="in a way that torch does not write"):
        check_sizes(refer(_REFERENCES[case]))
