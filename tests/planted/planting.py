"""How a fault gets into Helios: it replaces a function by its name, as its module is imported.

``$HELIOS_PLANTED`` names what is planted. The process under test has it, and so has each process
that it starts: a rank, a loader worker, a run that is to be killed, whatever variables the test
gives it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "HELIOS_PLANTED"
REPORT = "HELIOS_PLANTED_REPORT"
_TEST = "PYTEST_CURRENT_TEST"
_SITE = Path(__file__).resolve().parent / "site"


class _NOTHING:
    """What has no members."""


class PlantingError(Exception):
    """What a fault replaces is not there."""


@dataclass(frozen=True)
class Fault:
    """A function that stands in for another one.

    Args:
        wrong: called with what it replaces, and with what that is called with. Of a value it gets
            the value, and returns the wrong one.
    """

    name: str
    target: str
    test: str
    wrong: Callable[..., Any]

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def find(self) -> tuple[Any, str, Any]:
        *places, name = self.target.partition(":")[2].split(".")
        owner: Any = sys.modules[self.module]
        for place in places:
            owner = vars(owner).get(place, _NOTHING)
        if name not in vars(owner):
            raise PlantingError(f"{self.target} is not there")
        return owner, name, vars(owner)[name]

    def plant(self) -> None:
        owner, name, found = self.find()
        setattr(owner, name, self._stand_in(found))

    def _stand_in(self, found: Any) -> Any:
        if isinstance(found, (staticmethod, classmethod)):
            return type(found)(self._stand_in(found.__func__))
        if isinstance(found, property):
            return property(self._stand_in(found.fget), found.fset, doc=found.__doc__)
        if isinstance(found, functools.cached_property):
            found.func = self._stand_in(found.func)
            return found
        if not callable(found):
            return self.wrong(found)

        @functools.wraps(found)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            try:
                return self.wrong(found, *args, **kwargs)
            except Exception as error:
                self._report_own(error)
                raise

        return wrong

    def _report_own(self, error: Exception) -> None:
        """Write down an error of the fault itself: it would make any test red."""
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        file = None if innermost is None else innermost.tb_frame.f_code.co_filename
        if file in (self.wrong.__code__.co_filename, __file__):
            with Path(os.environ[REPORT]).open("a") as report:
                report.write(f"{error!r}\n")


FAULTS: dict[str, Fault] = {}
"""Each fault that was imported, by ``module.function``."""


def fault(target: str, test: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a fault; its name says what breaks."""

    def add(wrong: Callable[..., Any]) -> Callable[..., Any]:
        key = f"{wrong.__module__}.{wrong.__name__}"
        FAULTS[key] = Fault(wrong.__name__.replace("_", " "), target, test, wrong)
        return wrong

    return add


def sources(folder: Path) -> str:
    """Return what ``$HELIOS_PLANTED`` has where modules are to have other sources.

    Args:
        folder: a file for each of them, with its full name. Where the sources call
            ``planted_reached(number)``, its file ``reached`` gets a line for each test that does.
    """
    return f"sources {folder}"


def start() -> None:
    """Plant what ``$HELIOS_PLANTED`` names, here and in each process that this one starts."""
    planted = os.environ.get(VARIABLE, "")
    if not planted:
        return
    kind, _, rest = planted.partition(" ")
    if kind == "sources":
        vars(builtins)["planted_reached"] = _Reached(Path(rest) / "reached")
        sys.meta_path.insert(0, _OtherSources(Path(rest)))
    else:
        importlib.import_module(planted.rpartition(".")[0])
        sys.meta_path.insert(0, _Planted(FAULTS[planted]))
    _follow(planted)


def _follow(planted: str) -> None:
    """Let processes that are started with variables of their own have the fault, too."""
    start_process = subprocess.Popen.__init__

    @functools.wraps(start_process)
    def with_fault(
        self: Any, *args: Any, env: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        start_process(self, *args, env=variables(planted, env), **more)

    subprocess.Popen.__init__ = with_fault  # type: ignore[method-assign]


def variables(planted: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a process that is to have something planted."""
    found = dict(os.environ if base is None else base)
    roots = [str(_SITE), str(ROOT)]
    old = found.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in old if path and path not in roots]
    # What tests put first stays first.
    passed_on = {name: os.environ[name] for name in (REPORT, _TEST) if name in os.environ}
    return found | passed_on | {VARIABLE: planted, "PYTHONPATH": os.pathsep.join([*kept, *roots])}


class _Planted(importlib.abc.MetaPathFinder):
    """Plants a fault as soon as its module is imported, so that nobody has the right function."""

    def __init__(self, planted: Fault) -> None:
        self._fault = planted

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_plant(module: ModuleType) -> None:
            execute(module)
            self._fault.plant()

        spec.loader.exec_module = execute_and_plant  # type: ignore[method-assign]
        return spec


class _OtherSources(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._folder / f"{fullname}.py"
        if not source.is_file():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None or spec.origin is None:
            return None
        origin = spec.origin

        def execute(module: ModuleType) -> None:
            exec(compile(source.read_text(), origin, "exec"), vars(module))

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


class _Reached:
    """Writes down which tests reach a place; at once, since processes may be killed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: set[str] = set()
        # Tests replace them.
        self._open, self._write, self._close = os.open, os.write, os.close

    def __call__(self, number: int) -> None:
        test = os.environ.get(_TEST, "").rpartition(" ")[0]
        line = f"{number} {test}\n"
        if line not in self._known:
            self._known.add(line)
            opened = self._open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._write(opened, line.encode())
            self._close(opened)
