"""Addresses that could never work are refused when the target is created."""

from __future__ import annotations

import pytest

from helios.errors import ArgumentError
from helios.tracking.targets import MLflow


@pytest.mark.parametrize(
    "address", ["localhost:5000", "10.0.0.1:80/path", "mlflow.example.com:443"]
)
def test_a_host_and_port_without_a_scheme_is_refused(address: str) -> None:
    with pytest.raises(ArgumentError, match=rf'begin with http.*Pass "http://{address}"'):
        MLflow(address)


def test_an_empty_address_is_refused_with_an_example() -> None:
    with pytest.raises(ArgumentError, match=r"must not be empty. Pass an address, such as"):
        MLflow("")


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:5000",
        "https://h",
        "sqlite:///mlflow.db",
        "file:/runs",
        "mlruns",
        "C:/runs",
    ],
)
def test_other_addresses_are_left_to_mlflow(address: str) -> None:
    assert MLflow(address).uri == address
