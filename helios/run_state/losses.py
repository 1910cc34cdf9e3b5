"""What training has changed and a checkpoint lacks: each place with the reason, and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

from helios.core.sizes import size_text
from helios.run_state.changes import Changes
from helios.run_state.found import Slot


@final
@dataclass(frozen=True)
class Losses:
    """What a resumed run will not have.

    Attributes:
        changes: of plain values.
        limit: bytes of plain values that a checkpoint holds.
        misfits: objects that came, went or changed their structure, with what differs.
        lost: other places, with the reason.
    """

    changes: Changes
    limit: int
    misfits: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def without(self, known: Collection[str]) -> Losses:
        """Return what was not named before."""
        changes = self.changes
        new = Changes(
            changes.values,
            {path: text for path, text in changes.missing.items() if path not in known},
            [slot for slot in changes.large if slot.path not in known],
            [path for path in changes.costly if path not in known],
            [slot for slot in changes.others if slot.path not in known],
        )
        misfits = {path: text for path, text in self.misfits.items() if path not in known}
        lost = {path: text for path, text in self.lost.items() if path not in known}
        return Losses(new, self.limit, misfits, lost)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.changes.missing or self.misfits or self.lost)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each place."""
        return {
            **self.changes.missing,
            **{
                path: f"came, went or changed its structure after setup() {text}".rstrip()
                for path, text in self.misfits.items()
            },
            **self.lost,
        }

    def text(self, name: str) -> str:
        """Return what a warning says.

        Args:
            name: how it calls the owner.
        """
        return " ".join(self._texts(name))

    def _texts(self, name: str) -> Iterator[str]:
        changes = self.changes
        if changes.others:
            names = ", ".join(f'"{slot.path}"' for slot in changes.others)
            reasons = "; ".join(
                dict.fromkeys(changes.missing[slot.path] for slot in changes.others)
            )
            yield (
                f"Training changed {_listed(changes.others)}, which cannot be saved as plain "
                f"values ({reasons}): a resumed run finds there what setup() makes. Give such an "
                "object state_dict() and load_state_dict() and make it an attribute of the "
                f"{name}, or declare that it need not be saved: unsaved = ({names},)."
            )
        if changes.large:
            yield (
                f"Training changed {_listed(changes.large)}, but plain values are saved up to "
                f"{size_text(self.limit)} in all only: a resumed run finds there what setup() "
                "makes. Register large tensors as buffers of a module, write an object with "
                "state_dict() and load_state_dict(), or raise "
                "CheckpointStore(max_plain_bytes=...)."
            )
        if changes.costly:
            reasons = ", ".join(f"{path} ({changes.missing[path]})" for path in changes.costly)
            yield (
                f"Whether training changed these is not known: {reasons}. A resumed run finds "
                "there what setup() makes. Save less often, or give such an object state_dict()."
            )
        if self.misfits:
            names = ", ".join(
                f"{path}{text and f' ({text})'}" for path, text in sorted(self.misfits.items())
            )
            yield (
                "Networks, optimizers or parameters came, went or changed their structure after "
                f"setup(): {names}. A resume from this state will be refused, or finds what "
                "setup() makes: create all of them in setup()."
            )
        if self.lost:
            names = "; ".join(f"{path} ({text})" for path, text in self.lost.items())
            yield f"Training changed what no checkpoint holds: {names}."


def _listed(slots: Iterable[Slot]) -> str:
    return ", ".join(f"{slot.path} ({type(slot.value).__name__})" for slot in slots)
