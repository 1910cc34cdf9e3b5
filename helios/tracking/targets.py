"""Where a tracker sends a run to: options of the two libraries, and what a run of theirs can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.storage.local_paths import as_local_path

_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_WITHOUT_SCHEME = re.compile(r"[\w.-]+:\d+(/.*)?")
_ADDRESS = 'an address, such as "http://localhost:5000"'
_MODES = ("offline", "online")

Rows: TypeAlias = Sequence[Mapping[str, Any]]


class Delivery(Enum):
    """How a run gets its points, and what decides which of them are sent."""

    ACKNOWLEDGED = "while training runs; the server acknowledges them, which is noted here"
    CONTINUED = "while training runs, in whole iterations, from where the server says it stands"
    AT_ONCE = "all of them, when training has ended"


def _check_texts(target: object, texts: Mapping[str, object], *required: str) -> None:
    owner = type(target).__name__
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ArgumentTypeError(
                f'{owner}({name}=...) must be a str, got {value!r}. Pass e.g. {name}="name".'
            )
        if name in required and not value:
            example = _ADDRESS if name == "uri" else "a name"
            raise ArgumentError(f"{owner}({name}=...) must not be empty. Pass {example}.")


@dataclass(frozen=True)
class MLflow:
    """A server of MLflow, which receives points while training runs.

    Credentials come from the environment, as MLflow documents it.

    Args:
        uri: address of the server, such as ``"http://localhost:5000"``. That of a database needs
            all of MLflow, not only its client.
        experiment: name of the experiment; created if it is missing.
        run_name: name of the run; that of the model by default.

    Raises:
        ArgumentError: for an address that is empty, begins without ``http://`` or contains a
            password.
        ArgumentTypeError: for a value that is not a string.
    """

    uri: str
    experiment: str = "Default"
    run_name: str = ""

    @property
    def delivery(self) -> Delivery:
        """How points are sent."""
        return Delivery.ACKNOWLEDGED

    def __post_init__(self) -> None:
        _check_texts(self, asdict(self), "uri", "experiment")
        if _WITHOUT_SCHEME.fullmatch(self.uri):
            raise ArgumentError(
                "MLflow(uri=...) must begin with http:// or https:// if it names a host and a "
                f'port, got {self.uri!r}. Pass "http://{self.uri}".'
            )
        if _CREDENTIALS.search(self.uri):
            raise ArgumentError(
                "MLflow(uri=...) must contain no credentials, because it is written to a file. Set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
            )


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases: an offline one, which ``wandb sync`` uploads, or an online one.

    An online run receives points while training runs. Its server and credentials come from the
    environment, as W&B documents it: ``WANDB_BASE_URL``, and ``WANDB_API_KEY`` or ``wandb login``.

    Args:
        project: name of the project.
        entity: user or team; that of your account by default.
        run_name: name of the run; that of the model by default.
        folder: where the library creates its folder ``wandb``, which has the offline run; that of
            the tracker by default.
        mode: ``"offline"`` or ``"online"``.

    Raises:
        ArgumentError: for a project that is empty, or another mode.
        ArgumentTypeError: for a value of the wrong type.
    """

    project: str
    entity: str = ""
    run_name: str = ""
    folder: str | Path = ""
    mode: Literal["offline", "online"] = "offline"

    @property
    def delivery(self) -> Delivery:
        """How points are sent."""
        return Delivery.CONTINUED if self.mode == "online" else Delivery.AT_ONCE

    def __post_init__(self) -> None:
        folder = str(self.folder) if isinstance(self.folder, Path) else self.folder
        object.__setattr__(self, "folder", folder)
        _check_texts(self, asdict(self), "project")
        if self.mode not in _MODES:
            raise ArgumentError(
                f'WandB(mode=...) must be "offline" or "online", got {self.mode!r}. Pass "online" '
                "to send points while training runs."
            )
        if folder:
            path = as_local_path("WandB(folder=...)", folder)
            object.__setattr__(self, "folder", str(path.absolute()))


Target: TypeAlias = MLflow | WandB


def to_plain(target: Target) -> dict[str, Any]:
    """Return a target as JSON has it."""
    plain = {"kind": type(target).__name__, **asdict(target)}
    if plain.get("mode") == "offline":
        # Earlier versions wrote offline runs only, and no mode.
        del plain["mode"]
    return plain


def from_plain(plain: Mapping[str, Any]) -> Target:
    """Return the target that :func:`to_plain` has described.

    Raises:
        UsageError: if it is none that this version of Helios knows.
    """
    kinds: dict[str, type[Target]] = {"MLflow": MLflow, "WandB": WandB}
    options = dict(plain)
    try:
        return kinds[options.pop("kind")](**options)
    except (LookupError, TypeError) as error:
        raise UsageError(
            f"{dict(plain)!r} is no target of a tracker that this version of Helios knows. Use the "
            "version that wrote it."
        ) from error


class Destination(Protocol):
    """A run of a server, or in files of its library."""

    @property
    def delivery(self) -> Delivery:
        """How it gets its points."""
        ...

    @property
    def place(self) -> str:
        """Where the run is, for messages."""
        ...

    def open(self, params: Mapping[str, Any]) -> None:
        """Find the run, or create it.

        Args:
            params: hyper-parameters and options.
        """
        ...

    def channels(self) -> Mapping[str, Callable[[Rows], int]]:
        """Return what sends rows, by name; each returns how many the run did not have.

        With ``ACKNOWLEDGED``, that is once all of them are acknowledged.
        """
        ...

    def confirm(self) -> None:
        """Check now and then that what was sent without an acknowledgment arrives.

        Raises:
            Exception: if it does not, or the server cannot be reached.
        """
        ...

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add options that were not known when the run was opened."""
        ...

    def add_document(self, path: Path) -> None:
        """Send a file, or replace the earlier one of its name."""
        ...

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Note how the run has ended: finished, failed or killed; returns when it has all rows."""
        ...
