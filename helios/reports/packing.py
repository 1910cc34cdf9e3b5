"""Packs the evidence of a run into one archive, with the commands that check it.

The archive has the same bytes whenever the same files are packed: sorted, and without times.

An anonymous one does not say who trained the run, and where: names of hosts and users, home folders
and other absolute paths are removed, and from the state of the git repository the remote, the
branch, the commit and the author. Names that identify nobody, such as ``root``, stay in texts,
because they are words of programs too.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import re
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, final

import helios.ledger.book as book
import helios.ledger.lineage as lineage
import helios.ledger.manifest_file as manifest_file
import helios.ledger.timing as timing
from helios.errors import LedgerError
from helios.ledger.book import read_last_line
from helios.ledger.line import stated_hash
from helios.ledger.lineage import read_event_file
from helios.ledger.manifest_file import Manifest, Section
from helios.ledger.run_facts import RunFacts, read_run
from helios.ledger.scrubbing import scrub
from helios.ledger.source_files import find_author
from helios.reports.checklist import command_text, git_text
from helios.storage import files
from helios.storage.digest import digest_file
from helios.storage.local_paths import as_local_path
from helios.version import __version__

README, SUMS, PATCH = "README.md", "SHA256SUMS", "patch.diff"
_CODE = "code"
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_UNIX = 3
_MODULE_PART = re.compile(r"\w[\w. -]*")
_LARGE = 1 << 31


@dataclass
class Pack:
    """What goes into an archive.

    Attributes:
        name: the name of the folder in it.
        texts: the content of small files, by their names.
        paths: files that are copied as they are, by their names in the archive.
        notes: what is missing or was changed, in sentences.
        digests: SHA-256 of each file, in hexadecimal digits; filled when it is written.
    """

    name: str
    texts: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def pack(
    run: str | Path,
    target: str | Path,
    *,
    weights: Path | None = None,
    notes: Sequence[str] = (),
    is_anonymous: bool = False,
    watch: Callable[[int], object] | None = None,
) -> Pack:
    """Pack the evidence of a run into one archive, with the commands that check it.

    Args:
        run: the folder of the run, or its ledger.
        target: the zip file; an old one is replaced.
        weights: a file of weights to add, such as one that ``helios export`` has written.
        notes: sentences for the README of the archive.
        is_anonymous: whether to remove names of hosts and users, absolute paths, and the remote,
            branch, commit and author of the git repository.
        watch: called with numbers of bytes that were packed.

    Raises:
        LedgerError: if there is no run, if its files cannot be read, or if the archive would not be
            anonymous.
        OSError: if the disk fails; an old archive stays.
    """
    facts, anonymizer = read_run(run), None
    if is_anonymous:
        events = [*lineage.read_lineage(facts.folder), *facts.times.starts]
        anonymizer = make_anonymizer(facts.manifest, events)
    packed = gather(facts, anonymizer)
    packed.notes += notes if anonymizer is None else map(anonymizer.replace, notes)
    if weights is not None:
        packed.paths[f"weights{weights.suffix}"] = weights
    if anonymizer is not None:
        check_anonymous(packed, anonymizer)
    target = as_local_path("pack(target=...)", target)
    write_archive(target, packed, facts, anonymizer, watch)
    return packed


def gather(run: RunFacts, anonymizer: Anonymizer | None = None) -> Pack:
    """Return what is to be packed of a run, except for weights.

    Args:
        run: what is known of the run.
        anonymizer: removes names and paths; ``None`` to keep them.

    Raises:
        LedgerError: if two files would have one name without the names of persons.
    """
    pack = Pack(run.name, notes=list(run.missing.values()))
    if run.ledger is not None:
        pack.paths[book.FILE_NAME] = run.ledger
    _add_code(pack, run)
    manifest = run.manifest
    events = {
        name: list(read_event_file(run.folder / name))
        for name in (lineage.FILE_NAME, timing.FILE_NAME)
        if (run.folder / name).is_file()
    }
    if anonymizer is not None:
        manifest = None if manifest is None else anonymizer.replace_in_manifest(manifest)
        events = {name: anonymizer.replace_in(lines) for name, lines in events.items()}
        pack.texts = _anonymize(pack.texts, anonymizer)
        pack.notes = [anonymizer.replace(note) for note in pack.notes]
        pack.name = anonymizer.replace(pack.name)
    if manifest is not None:
        pack.texts[manifest_file.FILE_NAME] = manifest.to_json()
    for name, lines in events.items():
        pack.texts[name] = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    return pack


def _anonymize(texts: Mapping[str, str], anonymizer: Anonymizer) -> dict[str, str]:
    """Return files without names in their texts and in their own names."""
    origins: dict[str, str] = {}
    for name in texts:
        twin = origins.setdefault(anonymizer.replace(name), name)
        if twin != name:
            raise LedgerError(
                f"{twin} and {name} would both be {anonymizer.replace(name)} in an anonymous "
                "archive. Rename one of them and train again, or pack without --anonymous."
            )
    return {name: anonymizer.replace(texts[origin]) for name, origin in origins.items()}


def _add_code(pack: Pack, run: RunFacts) -> None:
    """Add the source files that are still what the newest start has imported, and the patch."""
    facts = run.facts
    git = facts.get("git", {})
    if "patch" in git:
        pack.texts[PATCH] = git["patch"]
    if git.get("is_cut"):
        pack.notes.append(f"{PATCH} is cut off: the local changes were longer.")
    folder = _find_folder(facts.get("command", {}))
    for module, hashes in facts.get("code", {}).items():
        if module == "__main__":
            module = _name_main(facts.get("command", {}), str(hashes["file"]))
        name = _name_source(module, str(hashes["file"]))
        text = _read_source(folder, hashes)
        if name is None or text is None:
            pack.notes.append(
                f"The source file {hashes['file']} is missing: it is not there any more, or has "
                "changed since the run has imported it."
            )
        else:
            path = f"{_CODE}/{name}"
            pack.texts[path] = scrub(text)
            if pack.texts[path] != text:
                pack.notes.append(
                    f"{path}: what looks like a secret was replaced, so its hash differs from "
                    f"{manifest_file.FILE_NAME}."
                )


def _find_folder(command: Mapping[str, Any]) -> Path:
    """Return the folder of the script; the script itself may be relative to a former folder."""
    if "script_folder" in command:
        return Path(command["script_folder"])
    return Path(command.get("folder", ""), command.get("script", "")).parent


def _name_main(command: Mapping[str, Any], file: str) -> str:
    """Return the name with which the main module is imported, if ``python -m`` has run it."""
    if "module" not in command:
        return "__main__"
    package = str(command["module"]).removesuffix(".__main__")
    return f"{package}.__main__" if PurePosixPath(file).name == "__main__.py" else package


def _name_source(module: str, file: str) -> str | None:
    """Return where a module is imported from, below the folder of the code."""
    name = PurePosixPath(file).name
    parts = [] if module == "__main__" else module.split(".")
    if parts and name != "__init__.py":
        *parts, stem = parts
        name = f"{stem}.py"
    is_plain = all(_MODULE_PART.fullmatch(part) for part in (*parts, name.removesuffix(".py")))
    return "/".join([*parts, name]) if is_plain else None


def _read_source(folder: Path, hashes: Mapping[str, Any]) -> str | None:
    file = Path(hashes["file"])
    path = file.expanduser() if file.parts[:1] == ("~",) else folder / file
    try:
        data = path.read_bytes()
        is_equal = hashlib.sha256(data).hexdigest()[:16] == hashes["text"]
        return data.decode() if is_equal else None
    except (OSError, ValueError, RuntimeError):
        return None


def check_anonymous(pack: Pack, anonymizer: Anonymizer) -> None:
    """Check that no name is left in what cannot be changed.

    Raises:
        LedgerError: if the ledger or another file holds one.
    """
    for name, path in pack.paths.items():
        found, tail = [], b""
        with path.open("rb") as handle:
            while data := handle.read(1 << 24):
                # Latin-1 keeps every byte; in weights, short names occur by chance.
                names = anonymizer.find_names((tail + data).decode("latin-1"))
                found += [each for each in names if len(each) > 5 or path.suffix == ".jsonl"]
                tail = data[-256:]
        if found:
            raise LedgerError(
                f"{name} holds the name {found[0]!r}, so the archive would not be anonymous. It "
                "cannot be changed without losing its hashes. Rename the loss or attribute in the "
                "code and train again, or pack without --anonymous."
            )


def write_archive(
    target: Path,
    pack: Pack,
    run: RunFacts,
    anonymizer: Anonymizer | None = None,
    watch: Callable[[int], object] | None = None,
) -> None:
    """Write an archive with a README and the digests of all files.

    Args:
        target: the file; an old one is replaced.
        pack: what goes into it.
        run: what is known of the run.
        anonymizer: as in :func:`gather`.
        watch: as in :func:`pack`.

    Raises:
        OSError: if the disk fails; an old archive stays.
    """
    readme = "\n".join(_write_readme(pack, run, anonymizer))
    pack.texts[README] = readme if anonymizer is None else anonymizer.replace(readme)
    contents: dict[str, bytes | Path] = {
        **{name: text.encode("utf-8", "replace") for name, text in pack.texts.items()},
        **pack.paths,
    }
    pack.digests = {name: _hash(contents[name], watch) for name in sorted(contents)}
    sums = "".join(f"{digest}  {name}\n" for name, digest in pack.digests.items())
    contents[SUMS] = sums.encode()
    with files.replacing(target) as partial, files.create(partial) as handle:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(contents):
                _add(archive, f"{pack.name}/{name}", contents[name], watch)
        files.fsync(handle)


def _hash(content: bytes | Path, watch: Callable[[int], object] | None) -> str:
    if isinstance(content, Path):
        return digest_file(content, watch).partition(":")[2]
    return hashlib.sha256(content).hexdigest()


def _add(
    archive: zipfile.ZipFile,
    name: str,
    content: bytes | Path,
    watch: Callable[[int], object] | None,
) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr, info.create_system = _MODE, _UNIX
    info.compress_type = zipfile.ZIP_DEFLATED
    if isinstance(content, bytes):
        archive.writestr(info, content)
        return
    is_large = content.stat().st_size >= _LARGE
    source: BinaryIO
    with content.open("rb") as source, archive.open(info, "w", force_zip64=is_large) as copy:
        while data := source.read(1 << 20):
            copy.write(data)
            if watch is not None:
                watch(len(data))


def _write_readme(pack: Pack, run: RunFacts, anonymizer: Anonymizer | None) -> Iterator[str]:
    yield f"# {pack.name}\n"
    yield "The evidence of a training run with Helios. Check it in this folder:\n"
    yield "```text"
    yield f"sha256sum -c {SUMS}"
    if run.ledger is not None:
        yield f"helios verify {book.FILE_NAME}"
    yield "```\n"
    if run.ledger is not None:
        chain = stated_hash(read_last_line(run.ledger))
        yield f"`helios verify` must print the hash `{chain}`, which covers all iterations.\n"
    yield from _write_repeat(pack, run, anonymizer)
    yield "| file | content |\n|---|---|"
    yield from _list_contents([*pack.texts, *pack.paths])
    if pack.notes:
        yield "\nNotes:\n"
        yield from (f"- {note}" for note in pack.notes)
    if anonymizer is not None:
        yield (
            "\nThe archive is anonymous: names of hosts and users, absolute paths, and the remote, "
            "branch, commit and author of the git repository were removed. So hashes of source "
            "files in run.json may differ from those of the files here; the ledger is unchanged."
        )
    yield ""


def _write_repeat(pack: Pack, run: RunFacts, anonymizer: Anonymizer | None) -> Iterator[str]:
    facts = run.facts
    command = facts.get("command", {})
    if command_text(facts) is None or run.ledger is None:
        return
    script = f"{_CODE}/{PurePosixPath(command.get('script', '')).name}"
    if anonymizer is not None:
        script = anonymizer.replace(script)
    if script in pack.texts:
        facts = {**facts, "command": {**command, "script": script}}
    yield "To repeat the run, and to compare each iteration with it:\n"
    yield "```text"
    yield f"pip install helios-trainer=={facts.get('versions', {}).get('helios', __version__)}"
    path = f"PYTHONPATH={_CODE} " if "module" in command else ""
    yield f"{path}{command_text(facts)}"
    yield f"helios diff {book.FILE_NAME} FOLDER_OF_YOUR_RUN"
    yield "```\n"
    git = git_text(facts)
    if git is not None and anonymizer is None:
        yield f"The code is {git}.\n"
    yield (
        "The ledgers are equal if the versions of all libraries, the processor or GPU and the "
        f"number of threads are, too: {manifest_file.FILE_NAME} names them.\n"
    )


def _list_contents(names: Sequence[str]) -> Iterator[str]:
    known = {
        book.FILE_NAME: "one line per iteration, chained by hashes",
        manifest_file.FILE_NAME: "command, options, versions, environment, hashes of the code",
        lineage.FILE_NAME: "starts, kills, saves, with digests of the checkpoints",
        timing.FILE_NAME: "times and scores; not part of the hash",
        PATCH: "local changes to the commit",
        README: "this file",
        SUMS: "SHA-256 of all other files",
    }
    for name in sorted({*names, README, SUMS}):
        kind = "source file of the run" if name.startswith(f"{_CODE}/") else "the final weights"
        yield f"| `{name}` | {known.get(name, kind)} |"


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
