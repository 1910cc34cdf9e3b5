"""The files of the package, and the names that it exports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "helios"


def source_files() -> dict[str, str]:
    """Return the text of every module of the package by its path below ``helios/``."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in files}


def public_names() -> str:
    """List what each ``__init__`` of the package exports, one dotted name a line."""
    lines = []
    for path, text in source_files().items():
        if path.endswith("__init__.py"):
            package = ".".join(["helios", *path.split("/")[:-1]])
            lines += [f"{package}.{name}" for name in exported(text)]
    return "".join(f"{line}\n" for line in sorted(lines))


def exported(text: str) -> list[str]:
    """Return the names in a module's ``__all__``."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
