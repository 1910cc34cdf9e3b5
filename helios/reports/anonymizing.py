"""Removes from the files of a run who trained it and where, for reviews without names.

Removed are names of hosts and users, home folders and other absolute paths, and from the state of
the git repository the remote, the branch, the commit and the author. Names that identify nobody,
such as ``root``, stay in texts, because they are words of programs too.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from helios.ledger.manifest.git_state import find_author
from helios.ledger.manifest.manifest_file import Manifest, Section

HIDDEN = "anonymous"
_PATH = "<path>"
_ORDINARY = frozenset(
    (
        *("root", "user", "users", "ubuntu", "admin", "runner", "localhost", "home", "jovyan"),
        *("debian", "git", "scm", "repos"),
    )
)
_SHORTEST, _LONG = 3, 6
_SYSTEM = r"(?!/(?:dev|proc|sys|usr|bin|etc)/)"
_PART = r"[^\s/\"'<>|:,;()\[\]{}\\]"
_SCHEME = r"\b(?:file|s3|gs|hdfs|ssh):/"
# Addresses of files; the name of a host or bucket is no last part.
_PLACES = re.compile(
    rf"{_SCHEME}/(?=[\w./@-])(?:{_PART}|:)*(?:(?:/{_PART}*)*/({_PART}*))?", re.IGNORECASE
)
# At least two parts; not what follows a host in a URL, a division, or a path that is relative.
_PATHS = re.compile(
    rf"(?:(?<![\w.~/)\]}}<>-]){_SYSTEM}|{_PATH})/(?:{_PART}+/)+({_PART}*)"
    r"|\b[A-Za-z]:\\(?:[^\s\\\"']+\\)+([^\s\\\"']*)"
)
# Between quotation marks, a path may contain spaces.
_QUOTED = re.compile(rf"([\"'])(?:{_PATH}|{_SYSTEM}|{_SCHEME})/[^\"'\n]*/([^\"'\n/]*)\1")
_WHOLE_PATH = re.compile(r"(?:/|[A-Za-z]:\\).*")
_SLASHES = re.compile(r"[/\\]")
_HOMES = re.compile(r"(?:/home/|/Users/|\\Users\\+)([^/\\\s\"':]+)")
# The path below the host, of https://host/owner/project and of user@host:owner/project.
_REMOTE = re.compile(r"(?:(?!file:)[a-z+]+://[^/]+/|(?!\w+://)[^/:]+:(?!/))(.+)", re.IGNORECASE)
_GIT_KEPT = ("is_dirty", "patch", "is_cut")


@final
class Anonymizer:
    """Replaces names and paths in texts and in JSON.

    Args:
        names: of hosts, users and authors.
        folders: absolute paths that are replaced as a whole, also if they contain spaces.
    """

    def __init__(self, names: Iterable[str], folders: Iterable[str]) -> None:
        self.names = sorted({name for name in names if _identifies(name)}, key=len, reverse=True)
        self._folders = sorted({each for each in folders if each.count("/") > 1}, key=len)[::-1]
        self._words = re.compile("|".join(map(_find_word, self.names)), re.IGNORECASE)

    def replace(self, text: str) -> str:
        """Return a text without names and absolute paths; the last part of a path stays."""
        for folder in self._folders:
            text = text.replace(folder, _PATH)
        text = _QUOTED.sub(rf"\1{_PATH}/\2\1", text)
        text = _PLACES.sub(lambda found: f"{_PATH}/{found[1] or ''}", text)
        text = _PATHS.sub(lambda found: f"{_PATH}/{found[1] or found[2] or ''}", text)
        return self._words.sub(HIDDEN, text) if self.names else text

    def replace_in(self, value: Any, *, key: str = "") -> Any:
        """Return plain values without names and paths, also in keys of tables."""
        if key == "host":
            return HIDDEN
        if isinstance(value, str):
            if _WHOLE_PATH.fullmatch(value) and "\n" not in value:
                value = f"{_PATH}/{_SLASHES.split(value)[-1]}"
            return self.replace(value)
        if isinstance(value, Mapping):
            return {self.replace(name): self.replace_in(x, key=name) for name, x in value.items()}
        return [self.replace_in(each) for each in value] if isinstance(value, list) else value

    def replace_in_manifest(self, manifest: Manifest) -> Manifest:
        """Return a manifest without names and paths."""
        sections = [
            Section(self.replace_in(each.start), self._replace_in_facts(each.facts))
            for each in manifest.sections
        ]
        return Manifest(manifest.run, sections)

    def _replace_in_facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(facts)
        if "git" in kept:
            kept["git"] = {name: kept["git"][name] for name in _GIT_KEPT if name in kept["git"]}
        if "command" in kept:
            hidden = ("folder", "script_folder", "python")
            kept["command"] = {name: x for name, x in kept["command"].items() if name not in hidden}
        found: dict[str, Any] = self.replace_in(kept)
        return found

    def find_names(self, text: str) -> list[str]:
        """Return the names that a text holds."""
        return sorted(set(self._words.findall(text))) if self.names else []


def _find_word(name: str) -> str:
    """Return the pattern of a name: a short one may be part of another word by chance."""
    if len(name) >= _LONG:
        return re.escape(name)
    # An underscore is part of a word for programs, not for readers.
    return rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"


def _identifies(name: str) -> bool:
    return len(name) >= _SHORTEST and name.lower() not in _ORDINARY


def make_anonymizer(manifest: Manifest | None, events: Iterable[Mapping[str, Any]]) -> Anonymizer:
    """Return what removes the names that are known of a run, and of this process.

    Args:
        manifest: the manifest of the run.
        events: lines of its files that may name hosts.
    """
    hosts = {socket.gethostname()}
    for each in events:
        hosts.update(map(str, (each.get("host", ""), *each.get("hosts", ()))))
    folders = {str(Path.home()), str(Path.cwd())}
    users, places = set(_find_users()), {Path.cwd()}
    for section in [] if manifest is None else manifest.sections:
        hosts.add(str(section.start.get("host", "")))
        folders.update(_find_folders(section.facts))
        users.update(_find_owners(str(section.facts.get("git", {}).get("remote", ""))))
        places.add(Path(section.facts.get("command", {}).get("folder", ".")))
    for folder in folders:
        users.update(_HOMES.findall(folder))
    short = {host.partition(".")[0] for host in hosts}
    authors = {name for place in places for name in find_author(place)}
    return Anonymizer(hosts | short | users | authors, folders)


def _find_users() -> Iterator[str]:
    yield Path.home().name
    with contextlib.suppress(KeyError, OSError, ImportError):
        yield getpass.getuser()


def _find_owners(remote: str) -> list[str]:
    """Return the parts of the path of a repository above its own name."""
    found = _REMOTE.fullmatch(remote)
    return [] if found is None else found[1].strip("/").split("/")[:-1]


def _find_folders(value: Any) -> Iterator[str]:
    """Yield the absolute paths that are whole values of a table."""
    if isinstance(value, str) and _WHOLE_PATH.fullmatch(value):
        yield value
        yield str(Path(value).parent)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _find_folders(each)
    elif isinstance(value, list):
        for each in value:
            yield from _find_folders(each)
