"""What training has changed and a checkpoint lacks: each path with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

from helios.run_state.changes import Changes
from helios.run_state.walk_result import Slot


@final
@dataclass(frozen=True)
class MissingState:
    """State that a resumed run will lack.

    Attributes:
        changes: of plain values.
        misfits: objects that were added, removed or changed in structure, with what differs.
        lost: other paths, with the reason.
    """

    changes: Changes
    misfits: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def without(self, known: Collection[str]) -> MissingState:
        """Return what was not reported before."""
        changes = self.changes
        new = Changes(
            changes.values,
            {path: text for path, text in changes.missing.items() if path not in known},
            [slot for slot in changes.large if slot.path not in known],
            [slot for slot in changes.others if slot.path not in known],
        )
        misfits = {path: text for path, text in self.misfits.items() if path not in known}
        lost = {path: text for path, text in self.lost.items() if path not in known}
        return MissingState(new, misfits, lost)

    def __bool__(self) -> bool:
        """Return whether anything is missing."""
        return bool(self.changes.missing or self.misfits or self.lost)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each path."""
        return {
            **self.changes.missing,
            **{
                path: "was added, removed or changed in structure after "
                f"setup(){text and f', {text}'}: create it there"
                for path, text in self.misfits.items()
            },
            **self.lost,
        }

    def text(self, name: str) -> str:
        """Return the text of a warning.

        Args:
            name: the name of the owner in the text.
        """
        return " ".join(self._texts(name))

    def _texts(self, name: str) -> Iterator[str]:
        changes = self.changes
        if changes.others:
            names = ", ".join(f'"{slot.path}"' for slot in changes.others)
            yield (
                f"Training changed {_listed(changes.others)}, which cannot be saved as plain "
                f"values ({_reasons(changes)}). A resumed run starts with what setup() makes. "
                f"Declare what need not be saved: unsaved = ({names},) of the {name}."
            )
        if changes.large:
            yield (
                f"Training changed {_listed(changes.large)}, but "
                f"{changes.missing[changes.large[0].path]}. A resumed run starts with what "
                "setup() makes."
            )
        if self.misfits:
            names = ", ".join(
                f"{path}{text and f' ({text})'}" for path, text in sorted(self.misfits.items())
            )
            yield (
                "Networks, optimizers or parameters were added, removed or changed in structure "
                f"after setup(): {names}. A resume from this state fails, or starts with what "
                "setup() makes: create all of them in setup()."
            )
        if self.lost:
            names = "; ".join(f"{path} ({text})" for path, text in self.lost.items())
            yield f"Training changed what no checkpoint can hold: {names}."


def _listed(slots: Iterable[Slot]) -> str:
    return ", ".join(f"{slot.path} ({type(slot.value).__name__})" for slot in slots)


def _reasons(changes: Changes) -> str:
    """Return the reasons, each once, with the paths of each if there are several reasons."""
    groups: dict[str, list[str]] = {}
    for slot in changes.others:
        groups.setdefault(changes.missing[slot.path], []).append(slot.path)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in groups.items())
