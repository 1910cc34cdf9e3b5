"""``helios.run`` and ``helios train``: fit, validate, test and predict from a command line.

Everything that a command line can get wrong is found before anything but the trainer is created.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from helios.cli.output import Answer
from helios.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    HeliosError,
)

if TYPE_CHECKING:
    from helios.cli.arguments import Given
    from helios.data.datamodule import DataModule
    from helios.model.model import Model
    from helios.trainer import Trainer

NAME = "train"

_COMMANDS = {
    "fit": "train, or continue the run",
    "validate": "validate a checkpoint of the run",
    "test": "test a checkpoint of the run",
    "predict": "predict with a checkpoint of the run",
}
_REFUSED, _WRONG_USAGE = 1, 2


def run(
    model: type[Model],
    data: type[DataModule],
    args: Sequence[str] | None = None,
    **defaults: Any,
) -> Any:
    """Run the command line of a script: ``fit``, ``validate``, ``test`` or ``predict``.

    The arguments of both constructors and of :class:`helios.Trainer` are options, by their types:
    ``python train.py fit --model.lr 1e-3 --trainer.max_epochs 10 --config run.yaml``. The
    arguments of model and data define the run, like ``Trainer(params=...)``. ``fit`` writes
    all options to ``config.yaml`` in the folder of the run.

    Args:
        model: the class of the model.
        data: the class of its data module.
        args: the words of the command line; by default, those of the process.
        **defaults: other defaults for arguments of ``Trainer``, such as ``chkpt_root="runs"``.
            Plugins that are objects are registered before those of the command line.

    Returns:
        What the call returns: True for ``fit``, scores for ``validate`` and ``test``, predictions
        for ``predict``.

    Raises:
        SystemExit: with 2 for wrong options, and with 1 for a start that is refused, after one
            message; after an interruption, ``--help`` and ``--print_config``.
        HeliosError: instead of these messages, if ``args`` is given.
    """
    if args is not None:
        return _prepare(model, data, args, "helios.run", defaults)()
    return _run(lambda: (model, data), sys.argv[1:], Path(sys.argv[0]).name, defaults)


def _run(
    find: Callable[[], tuple[Any, Any]],
    words: Sequence[str],
    program: str,
    defaults: Mapping[str, Any],
) -> Any:
    """Run a command; what is refused ends the process with one message.

    Args:
        find: returns the classes of model and data.
        words: the command and its options.
        program: what stands before them.
        defaults: other defaults for arguments of ``Trainer``.
    """
    try:
        call = _prepare(*find(), words, program, defaults)
    except HeliosError as error:
        _end(program, error, _WRONG_USAGE)
    logger = logging.getLogger("helios.start.changes")
    logger.addFilter(_reword)
    try:
        return call()
    except (ArgumentError, CheckpointError) as error:
        # Of what is refused, the message says all; of an error in user code, the traceback counts.
        if isinstance(error, ArgumentError) and not str(error).startswith("Trainer"):
            raise
        _end(program, error, _REFUSED)
    finally:
        logger.removeFilter(_reword)


def _reword(record: logging.LogRecord) -> bool:
    """Let a warning of what has changed name options, too."""
    record.msg, record.args = _in_options(record.getMessage()), ()
    return True


def _end(program: str, error: Exception, code: int) -> NoReturn:
    sys.stderr.write(f"{program}: error: {_in_options(str(error))}\n")
    raise SystemExit(code) from None


def _prepare(
    model: type[Model],
    data: type[DataModule],
    words: Sequence[str],
    program: str,
    defaults: Mapping[str, Any],
) -> Callable[[], Any]:
    """Check everything that a command line says, and return what is to be done."""
    _check_classes(model, data)
    command, *options = [*words] or [""]
    _check_command(command, program)
    given = _read_options(f"{program} {command}", model, data, options, defaults)
    trainer = _create_trainer(given, is_fit=command == "fit")

    def call() -> Any:
        datamodule, net = data(**given.data), model(**given.model)
        if command == "fit":
            if not trainer.fit(net, datamodule):
                raise SystemExit(trainer.exit_code)
            return True
        calls = {"validate": trainer.validate, "test": trainer.test, "predict": trainer.predict}
        evaluate: Callable[..., Any] = calls[command]
        return evaluate(net, datamodule, checkpoint=given.checkpoint)

    return call


def _check_classes(model: Any, data: Any) -> None:
    from helios.data.datamodule import DataModule
    from helios.model.model import Model

    for name, kind, base in (("model", model, Model), ("data", data, DataModule)):
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise ArgumentTypeError(
                f"helios.run({name}=...) must be a class derived from {base.__name__}, got "
                f"{kind!r}. Pass the class itself: its arguments are options."
            )


def _check_command(command: str, program: str) -> None:
    if command in ("-h", "--help"):
        lines = [f"  {name:10}{text}\n" for name, text in _COMMANDS.items()]
        head = f"usage: {program} COMMAND [options]\n\ncommands:\n"
        sys.stdout.write(f"{head}{''.join(lines)}\nIts options: {program} fit --help\n")
        raise SystemExit(0)
    if command not in _COMMANDS:
        (near, *_) = [*difflib.get_close_matches(command, _COMMANDS, n=1), "fit"]
        found = f"got {command!r}" if command else "got nothing"
        raise ArgumentError(
            f"The command must be one of {', '.join(_COMMANDS)}, but {found}. Try: {program} {near}"
        )


def _read_options(
    program: str,
    model: type[Model],
    data: type[DataModule],
    options: Sequence[str],
    defaults: Mapping[str, Any],
) -> Given:
    from helios.core.utils import import_extra

    for name in ("jsonargparse", "yaml"):
        import_extra(name, "cli")
    from helios.cli.arguments import Arguments

    takes_checkpoint = not program.endswith(" fit")
    arguments = Arguments(program, model, data, defaults, takes_checkpoint=takes_checkpoint)
    return arguments.parse(options)


def _create_trainer(given: Given, *, is_fit: bool) -> Trainer:
    """Create the trainer, which checks its arguments."""
    from helios.cli.config_file import ConfigFile
    from helios.trainer import Trainer

    options = given.trainer
    if is_fit and not options.keys() & {"max_epochs", "max_steps", "total_steps"}:
        raise ArgumentError(
            "--trainer.max_epochs or --trainer.max_steps must say how long the run is. Pass e.g. "
            "--trainer.max_epochs 10."
        )
    params = given.tree["trainer"]["params"] or {}
    if not isinstance(params, dict) or params.keys() & {"model", "data"}:
        raise ArgumentError(
            "--trainer.params must be a mapping without the names model and data, got "
            f"{params!r}. The arguments of model and data are declared already."
        )
    params = {**params, "model": given.tree["model"], "data": given.tree["data"]}
    own = [ConfigFile(given.tree)] if is_fit else []
    return Trainer(**{**options, "params": params, "plugins": [*options["plugins"], *own]})


_OPTION = re.compile(r"Trainer\((\w+)=\.\.\.\)")
_ALLOWED = re.compile(r"Trainer\(allow_changes=(\(.*?\))\)|\ballow_changes=(\(.*?\))")
_VALUE = re.compile(r"(?:Trainer\()?\b(\w+)=(['\"]?)([^\s()'\"]+?)\2\)?(?=[.,;:]?(?:\s|$))")


def _in_options(text: str) -> str:
    """Return a message with arguments of ``Trainer`` as options.

    Example:
        >>> _in_options("Trainer(nproc=...) must be 1. Allow it: Trainer(allow_changes=('a',)).")
        '--trainer.nproc must be 1. Allow it: --trainer.allow_changes+=a.'
        >>> _in_options("Pass resume='never', not Trainer(max_epochs=3).")
        'Pass --trainer.resume never, not --trainer.max_epochs 3.'
    """
    from helios.start.options import ROWS

    def name_value(found: re.Match[str]) -> str:
        return f"--trainer.{found[1]} {found[3]}" if found[1] in ROWS else found[0]

    def allow(found: re.Match[str]) -> str:
        names = ast.literal_eval(found[1] or found[2])
        return " ".join(f"--trainer.allow_changes+={name}" for name in names)

    return _VALUE.sub(name_value, _ALLOWED.sub(allow, _OPTION.sub(r"--trainer.\1", text)))


def train(namespace: argparse.Namespace) -> Answer:
    """Train or evaluate a model, with options from the types of its classes.

    MODEL and DATA are classes, as package.module:Class; modules are also looked for
    in the current folder. COMMAND is fit, validate, test or predict:

        helios train nets:Net data:Data fit --model.lr 0.1 --trainer.max_epochs 9
        helios train nets:Net data:Data fit --config runs/net/config.yaml
        helios train nets:Net data:Data fit --help

    Exit code 0: success. 1: an error. 2: wrong usage. 75: interrupted, run the same
    command again.
    """
    names = namespace.model, namespace.data

    def find() -> tuple[Any, Any]:
        # As python -m does; the command would only find what is installed.
        sys.path.insert(0, str(Path.cwd()))
        return _load_class(names[0]), _load_class(names[1])

    result = _run(find, namespace.rest, f"helios train {' '.join(names)}", {})
    command = namespace.rest[0]
    document = {"command": command, "result": None if command == "predict" else result}
    from helios.launch.launcher import Launch

    return Answer((), document if Launch.read().info.rank == 0 else None)


def _load_class(name: str) -> Any:
    place, _, found = name.partition(":")
    if not place or not found:
        raise ArgumentError(f"A class must be given as package.module:Class, got {name!r}.")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(
            f"There is no module {error.name!r} for {name}, neither installed nor in {Path.cwd()}."
        ) from None
    if found not in vars(module):
        names = [each for each, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(found, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ArgumentError(f"{place} has no class {found!r}.{hint}")
    return vars(module)[found]


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    command = add(NAME, train, "helios train MODEL DATA COMMAND [options]")
    command.add_argument("model", metavar="MODEL", help="its class: package.module:Net")
    command.add_argument("data", metavar="DATA", help="the data module: package.module:Data")
