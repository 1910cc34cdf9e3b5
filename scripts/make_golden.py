"""Write the golden files anew: run it when a change of them is meant, and read the difference.

What frozen runs recorded is written only if it is named (``frozen``): it changes if bits do.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.site import event_page  # noqa: E402 (found by the line above)
from tests import codebase  # noqa: E402
from tests.cli import helps  # noqa: E402
from tests.golden import frozen  # noqa: E402
from tests.support import (  # noqa: E402
    decisions,
    event_situations,
    file_trails,
    replica_logs,
)
from tests.support.matrix import cells  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


def _in(folder: Path, texts: Mapping[str, str]) -> dict[Path, str]:
    return {folder / name: text for name, text in texts.items()}


MAKERS: dict[str, Callable[[], dict[Path, str]]] = {
    "names": lambda: {GOLDEN / "public_names.txt": codebase.public_names()},
    "matrix": lambda: {cells.GOLDEN: cells.golden_table()},
    "decisions": lambda: {decisions.GOLDEN: decisions.golden_table()},
    "events": lambda: _in(GOLDEN / "events", event_situations.golden_logs()),
    "replicas": lambda: _in(replica_logs.FOLDER, replica_logs.golden_logs()),
    "help": lambda: _in(GOLDEN / "help", helps.help_texts()),
    "page": lambda: {ROOT / "docs" / "hooks.md": event_page.render()},
    "order": lambda: {file_trails.PAGE: file_trails.page()},
    "frozen": frozen.golden_results,
}
"""What makes each group of golden files, and the pages that are generated."""


def main() -> None:
    """Write each golden file and say which ones changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "groups", nargs="*", choices=[[], *MAKERS], help="all but frozen, if none is named"
    )
    groups = parser.parse_args().groups or [name for name in MAKERS if name != "frozen"]
    # Recorded runs would fill the screen; some of them fail on purpose.
    logging.disable(logging.CRITICAL)
    wanted: dict[Path, str] = {}
    for group in groups:
        wanted |= MAKERS[group]()
    if "events" in groups:
        for path in sorted(set((GOLDEN / "events").glob("*")) - set(wanted)):
            path.unlink()
            print(f"{path.relative_to(ROOT)}: removed")
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        found = path.read_text("utf-8") if path.exists() else ""
        path.write_text(text, "utf-8")
        if found != text:
            print(f"{path.relative_to(ROOT)}: changed")
    print(f"{len(wanted)} files are as the code makes them.")


if __name__ == "__main__":
    main()
