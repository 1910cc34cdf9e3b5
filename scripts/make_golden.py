"""Write the golden files anew: run it when a change of them is meant, and read the difference."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import house  # noqa: E402 (found by the line above)


def main() -> None:
    """Write each golden file and say which ones changed."""
    folder = ROOT / "tests" / "golden"
    folder.mkdir(exist_ok=True)
    for name, text in {"public_names.txt": house.public_names()}.items():
        path = folder / name
        found = path.read_text("utf-8") if path.exists() else ""
        path.write_text(text, "utf-8")
        print(f"{path.relative_to(ROOT)}: {'unchanged' if found == text else 'changed'}")


if __name__ == "__main__":
    main()
