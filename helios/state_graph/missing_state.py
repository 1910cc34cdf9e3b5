"""What training has changed and a checkpoint lacks: each path with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from helios.state_graph.changes import Changes


@final
@dataclass(frozen=True)
class MissingState:
    """State that a resumed run will lack.

    Attributes:
        missing: the reason why a plain value is not saved, by path.
        large: the types of those that are too large, by path.
        others: the types of those that no checkpoint can hold, by path.
        misfits: objects that were added, removed or changed in structure, with what differs.
        lost: other paths, with the reason.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    large: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, changes: Changes, misfits: Mapping[str, str], lost: Mapping[str, str]
    ) -> MissingState:
        """Return what is missing of changes."""
        return cls(changes.missing, changes.large, changes.others, misfits, lost)

    def without(self, known: Collection[str]) -> MissingState:
        """Return what was not reported before."""
        tables = (self.missing, self.large, self.others, self.misfits, self.lost)
        return MissingState(
            *({path: text for path, text in table.items() if path not in known} for table in tables)
        )

    def __bool__(self) -> bool:
        """Return whether anything is missing."""
        return bool(self.missing or self.misfits or self.lost)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each path."""
        return {
            **self.missing,
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
        if self.others:
            names = ", ".join(f'"{path}"' for path in self.others)
            yield (
                f"Training changed {_listed(self.others)}, which cannot be saved as plain values "
                f"({self._reasons()}). A resumed run starts with what setup() makes. Declare what "
                f"need not be saved: unsaved = ({names},) of the {name}."
            )
        if self.large:
            yield (
                f"Training changed {_listed(self.large)}, but "
                f"{self.missing[next(iter(self.large))]}. A resumed run starts with what setup() "
                "makes."
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

    def _reasons(self) -> str:
        """Return the reasons, each once, with the paths of each if there are several reasons."""
        groups: dict[str, list[str]] = {}
        for path in self.others:
            groups.setdefault(self.missing[path], []).append(path)
        if len(groups) == 1:
            return next(iter(groups))
        return "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in groups.items())


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({kind})" for path, kind in types.items())
