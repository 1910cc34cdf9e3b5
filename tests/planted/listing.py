"""All faults, and whether each can be planted and its test is there."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Mapping

from tests.planted import faults, planting
from tests.planted.planting import Fault, PlantingError


def find_faults() -> dict[str, Fault]:
    """Return all faults, by what ``$HELIOS_PLANTED`` has for them."""
    for module in sorted(each.name for each in pkgutil.iter_modules(faults.__path__)):
        importlib.import_module(f"{faults.__name__}.{module}")
    return planting.FAULTS


def find_problems(chosen: Mapping[str, Fault]) -> list[str]:
    """Return a line for each fault that cannot be planted, or whose test is not there."""
    problems = []
    for fault in chosen.values():
        try:
            importlib.import_module(fault.module)
            fault.find()
        except (ImportError, PlantingError) as error:
            problems.append(f"{fault.name}: {error}")
        if not _is_there(fault.test):
            problems.append(f"{fault.name}: there is no test {fault.test}")
    return problems


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = planting.ROOT / file
    if not path.is_file():
        return False
    name = name.partition("[")[0]
    tree = ast.parse(path.read_text())
    return not name or any(isinstance(n, ast.FunctionDef) and n.name == name for n in tree.body)
