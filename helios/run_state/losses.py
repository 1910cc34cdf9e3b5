"""What training has changed and a checkpoint lacks: each place with the reason, and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import final

from helios.run_state.found import Slot
from helios.run_state.values import LIMIT


@final
@dataclass(frozen=True)
class Losses:
    """What a resumed run will not have.

    Attributes:
        others: places that hold what cannot be saved.
        large: places beyond the limit of plain values.
        misfits: objects that came, went or changed their structure, with what differs.
        lost: other places, with the reason.
    """

    others: list[Slot]
    large: list[Slot]
    misfits: dict[str, str]
    lost: dict[str, str]

    def without(self, known: Collection[str]) -> Losses:
        """Return what was not named before."""
        return Losses(
            [slot for slot in self.others if slot.path not in known],
            [slot for slot in self.large if slot.path not in known],
            {path: text for path, text in self.misfits.items() if path not in known},
            {path: text for path, text in self.lost.items() if path not in known},
        )

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.others or self.large or self.misfits or self.lost)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each place."""
        return {
            **{slot.path: f"{_kind(slot)}, which cannot be saved" for slot in self.others},
            **{slot.path: f"{_kind(slot)}, beyond the limit" for slot in self.large},
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
        if self.others:
            names = ", ".join(f'"{slot.path}"' for slot in self.others)
            is_iterator = any(isinstance(slot.value, Iterator) for slot in self.others)
            reason = " (an iterator: nothing tells how far it has come)" if is_iterator else ""
            yield (
                f"Training changed {_listed(self.others)}, which cannot be saved as plain values"
                f"{reason}: a resumed run finds there what setup() makes. Give such an object "
                "state_dict() and load_state_dict() and make it an attribute of the "
                f"{name}, or declare that it need not be saved: unsaved = ({names},)."
            )
        if self.large:
            yield (
                f"Training changed {_listed(self.large)}, but plain values are saved up to "
                f"{LIMIT >> 20} MiB in all only: a resumed run finds there what setup() makes. "
                "Register large tensors as buffers of a module, or write an object with "
                "state_dict() and load_state_dict()."
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


def _kind(slot: Slot) -> str:
    return type(slot.value).__name__


def _listed(slots: Iterable[Slot]) -> str:
    return ", ".join(f"{slot.path} ({_kind(slot)})" for slot in slots)
