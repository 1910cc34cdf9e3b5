"""The options of a training command, made from the types of its model, its data and ``Trainer``."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jsonargparse
from jsonargparse.typing import register_type

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.engines.precision import Precision, ScalerOptions
from helios.errors import ArgumentError
from helios.ledger.run_file import NOT_WRITTEN
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.start.options import MEANT, ROWS, check_names
from helios.trainer import Trainer

_OF_EVALUATIONS = (
    'what to load: "newest", "best", a file, or null for no checkpoint; "auto" is the newest one'
)

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_UNKNOWN_KEY = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'")


@dataclass(frozen=True)
class Given:
    """The arguments from a command line and its files.

    Attributes:
        trainer: the arguments of ``Trainer`` that are not its defaults.
        model: all arguments of the model.
        data: all arguments of the data module.
        checkpoint: what an evaluation loads.
        tree: everything but ``checkpoint``, as plain data.
    """

    trainer: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    checkpoint: str | None
    tree: dict[str, Any]


class Arguments:
    """The options of a command.

    Args:
        program: what stands before the options, such as ``train.py fit``.
        model: the class of the model.
        data: the class of its data.
        defaults: arguments of ``Trainer`` that the options may replace.
        takes_checkpoint: whether the command evaluates a checkpoint.
    """

    def __init__(
        self,
        program: str,
        model: type[Model],
        data: type[DataModule],
        defaults: Mapping[str, Any],
        *,
        takes_checkpoint: bool,
    ) -> None:
        # A precision is written as its name, not as a class with arguments.
        register_type(Precision, lambda precision: precision.value, _read_precision)
        self._kinds: dict[str, type] = {"model": model, "data": data, "trainer": Trainer}
        self._parser = jsonargparse.ArgumentParser(
            prog=program,
            usage=f"{program} [options]",
            description="Options may be in several files; later ones win.",
            exit_on_error=False,
        )
        self._parser.add_argument("--config", action="config", help="a YAML file with options")
        if takes_checkpoint:
            self._parser.add_argument(
                "--checkpoint", type=str | None, default="auto", help=_OF_EVALUATIONS
            )
        for name, kind in self._kinds.items():
            self._parser.add_class_arguments(kind, name, fail_untyped=False, instantiate=False)
            group = (self._parser.groups or {}).get(name)
            if group is not None:
                group.title = f"Arguments of {kind.__name__}"
        check_names(defaults)
        self._objects = {name: value for name, value in defaults.items() if _holds_objects(value)}
        plain = {name: defaults[name] for name in defaults if name not in self._objects}
        self._parser.set_defaults({f"trainer.{x}": _plain_keys(each) for x, each in plain.items()})

    def parse(self, words: Sequence[str]) -> Given:
        """Read a command line.

        Raises:
            ArgumentError: for an unknown option, or a value of another type.
            SystemExit: after ``--help`` and ``--print_config``.
        """
        try:
            found = self._parser.parse_args(list(words))
        except argparse.ArgumentError as error:
            known = [*vars(self._parser.get_defaults().as_flat())]
            raise ArgumentError(_explain(error.message, known, words)) from None
        text = self._parser.dump(found, format="json", skip_unset=False)
        tree: dict[str, Any] = {"model": {}, "data": {}, **json.loads(text)}
        checkpoint = tree.pop("checkpoint", "auto")
        for name in _find_hidden("", tree):
            raise ArgumentError(
                f"--{name} is a secret, so the file of the run lacks it. Pass it again."
            )
        made = self._parser.instantiate(found)
        model, data = (vars(made[name]) if name in made else {} for name in ("model", "data"))
        return Given(self._find_changed(vars(made.trainer)), model, data, checkpoint, tree)

    def _find_changed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``Trainer`` to pass; its own defaults mean what is not passed."""
        defaults = inspect.signature(Trainer).parameters
        changed = {
            name: value for name, value in options.items() if value != defaults[name].default
        }
        plugins = [*self._objects.get("plugins", ()), *changed.get("plugins", ())]
        return {**self._objects, **changed, "plugins": plugins}


def _holds_objects(value: Any) -> bool:
    """Return whether a default is an object that no file can hold, or a list of such objects."""
    found = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(each, Plugin | Engine) for each in found)


def _plain_keys(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key.value if isinstance(key, Enum) else key: each for key, each in value.items()}


def _read_precision(value: Any) -> Precision:
    """Return a precision by its name, or by its fields, as defaults of classes have it."""
    if not isinstance(value, dict):
        return Precision.from_str(value)
    scaler = value.get("scaler")
    return Precision(value["value"], scaler and ScalerOptions(**scaler))


def _find_hidden(name: str, value: Any) -> Iterator[str]:
    """Yield the options that a file of a run does not hold."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in entries:
            yield from _find_hidden(f"{name}.{key}" if name else str(key), each)
    elif value == NOT_WRITTEN:
        yield name


def _explain(message: str, known: Sequence[str], words: Sequence[str]) -> str:
    """Return what jsonargparse says of a command line, and what an unknown option may mean.

    Args:
        message: its message.
        known: the names of all options.
        words: the command line.
    """
    names: list[str] = []
    if found := _UNKNOWN.search(message):
        options = [word for word in found[1].split() if word.startswith("-")]
        names = [option.lstrip("-").partition("=")[0] for option in options]
    elif found := _UNKNOWN_KEY.match(message):
        names = [".".join(filter(None, found.groups()))]
    if message.startswith("Problems parsing config"):
        # It does not name the file.
        files = [word for word in words if word.endswith((".yaml", ".yml", ".json"))]
        message = f"{', '.join(files)}: {message}"
    return "\n".join(_refuse_name(name, known) for name in names) or message


def _refuse_name(name: str, known: Sequence[str]) -> str:
    meant = {other: f"--trainer.{x}" if x in ROWS else x for other, x in MEANT.items()}
    meant |= {f"trainer.{other}": option for other, option in meant.items()}
    meant |= {each.rpartition(".")[2]: f"--{each}" for each in reversed(known)}
    meant |= {each: f"--{each}" for each in known}
    near = difflib.get_close_matches(name, meant, n=1)
    hint = f"Did you mean {meant[near[0]]}?" if near else "--help lists the options."
    return f"There is no option --{name}. {hint}"
