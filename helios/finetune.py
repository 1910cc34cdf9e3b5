"""``load_weights``: weights of another run, or of another program, by the names of tensors.

Names and shapes are compared before anything is changed. Tensors are read one by one, into existing
ones, so that optimizers keep their parameters.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.checkpoint import file_names, loading
from helios.checkpoint.export import networks_of, select_weights
from helios.checkpoint.frozen import require_whole
from helios.core.memory import storage_of
from helios.core.sharded_tensors import RowShare, is_sharded, value_of
from helios.core.utils import import_extra
from helios.core.wrappers import bare_state_dict
from helios.errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError, UsageError
from helios.model.model import Model
from helios.start.model_setup import SetupContext
from helios.start.objects import check_made
from helios.state.networks import Network, fill, is_odd
from helios.state.optimizers import load_into
from helios.storage import codec
from helios.storage.files import as_local_path
from helios.text import some_text

_LOGGER = logging.getLogger(__name__)

_OF_FOLDERS = (
    *("*model.safetensors.index.json", "*model.safetensors"),
    *("*model.bin.index.json", "*model.bin"),
)
"""What a folder of Hugging Face holds, the first choice first."""


@dataclass
class LoadedWeights:
    """The result of :func:`load_weights`. Names are those in the model or the network.

    Attributes:
        loaded: the tensors that were loaded.
        missing: those that are not in the file, which keep their values.
        unexpected: those that are only in the file.
        mismatched: those of another shape, which keep their values: the shape in the file, and that
            in the model.
        skipped: those that ``skip`` matches, in both.
        is_left_to_checkpoint: whether the file was not read, because a checkpoint is loaded next.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    is_left_to_checkpoint: bool = False

    def __str__(self) -> str:
        """Return a line for each kind of names that there is."""
        if self.is_left_to_checkpoint:
            return "left to the checkpoint"
        pairs = self.mismatched.items()
        shapes = [f"{name}: {old} in the file, {new} here" for name, (old, new) in pairs]
        parts = {
            "loaded": [str(len(self.loaded))],
            "missing in the file": self.missing,
            "only in the file": self.unexpected,
            "of another shape": shapes,
            "skipped": self.skipped,
        }
        return "; ".join(f"{what}: {some_text(names)}" for what, names in parts.items() if names)


def load_weights(
    path: str | Path,
    module: Model | nn.Module,
    *,
    rename: Mapping[str, str] | None = None,
    skip: str | Sequence[str] = (),
    strict: bool = True,
    every_start: bool = False,
) -> LoadedWeights:
    """Load weights, without counters, optimizers and random number generators.

    In ``setup``, they are loaded at the start of a run. A resume and an evaluation do not read the
    file: the weights are in their checkpoint.

    The names in a model are those of its attributes, then those in the network:
    ``"net.layers.0.weight"``. In a network they are those of its ``state_dict``. A checkpoint of
    Helios has the names of a model; for a network, those in its only network, or in the one with
    the same names.

    Args:
        path: a checkpoint of Helios, a safetensors file, a file of ``torch.save`` that holds
            tensors and plain values, or a folder of Hugging Face.
        module: a model whose networks are built, or one network.
        rename: new names for those in the file: ``{"backbone.*": "net.*"}``. Each ``*`` on the
            right stands for the match of one on the left. The first pattern that matches counts.
        skip: patterns of new names to skip, in the file and in the module: ``"net.head.*"``.
        strict: refuse names that only one side has, other shapes, and patterns that match nothing.
            False loads what fits; look at the result.
        every_start: read the file even if the run resumes or is evaluated. Needed if ``setup``
            computes something from the weights that no checkpoint holds; an error otherwise.

    Returns:
        The names that were loaded, and those that were not.

    Raises:
        ArgumentError: for a URL, a model with a ``load_state_dict`` of its own, or a pattern with
            more ``*`` on the right.
        ArgumentTypeError: if ``path`` is not a path, or ``module`` is neither a model nor a
            network.
        CheckpointError: if the file cannot be used.
        StateError: if names or shapes differ, and if the model has no networks yet.
        UsageError: without safetensors, or for a network that has no values yet
            (``Trainer(init="keyed")``).
    """
    if isinstance(module, Model):
        check_made(module)
        if type(module).load_state_dict is not Model.load_state_dict:
            raise ArgumentError(
                f"load_weights(module=...) must be one of the networks of {type(module).__name__}, "
                "whose own load_state_dict says what it loads, got the model. Pass e.g. self.net."
            )
    elif not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"load_weights(module=...) must be a Model or an nn.Module, got {module!r}."
        )
    report, context = LoadedWeights(), SetupContext.current
    if context is not None and not every_start:
        context.note_load(module)
        if context.is_loaded_next:
            # The path may be gone, too: find_last_checkpoint(...) is None then.
            report.is_left_to_checkpoint = True
            return report
    if not isinstance(path, str | Path):
        raise ArgumentTypeError(
            f"load_weights(path=...) must be a path, got {path!r}. Pass that of a checkpoint, or "
            "of a file or folder with weights; find_last_checkpoint(folder) is None if the folder "
            "has no checkpoint."
        )
    path = as_local_path("load_weights(path=...)", path)
    names = _Names(path, rename or {}, (skip,) if isinstance(skip, str) else tuple(skip))
    if isinstance(module, nn.Module) and any(x.is_meta for x in module.parameters()):
        raise UsageError(
            f"load_weights({str(path)!r}, ...) must get the Model in setup() with "
            f'Trainer(init="keyed"), got a {type(module).__name__} that has no values yet. Pass '
            "self, or call it in on_training_start if state.global_iteration is 0."
        )
    load = partial(_load, path, module, names, report, is_strict=strict)
    if isinstance(module, Model) and module.loads_after_setup is not None:
        # Setup builds without values.
        module.loads_after_setup.append((path.name, load))
    else:
        load()
    return report


def _load(
    path: Path,
    module: Model | nn.Module,
    names: _Names,
    report: LoadedWeights,
    share: RowShare | None = None,
    *,
    is_strict: bool,
) -> None:
    with ExitStack() as stack:
        found = _open(path, module, stack, share)
        target = _Target(module, path)
        entries = names.apply(found, target.tensors, report, is_strict=is_strict)
        _compare(entries, target, report)
        if is_strict and (report.missing or report.unexpected or report.mismatched):
            raise StateError(
                f"load_weights({str(path)!r}, ...) must find the same names and shapes in the file "
                f"and in {type(module).__name__}, but found {report}. Map names with "
                'rename={"old.*": "new.*"}, leave some out with skip="head.*", or pass '
                "strict=False to load what fits."
            )
        target.load({name: entries[name] for name in report.loaded})
    level = logging.INFO if report.loaded else logging.WARNING
    _LOGGER.log(level, "Weights of %s: %s.", path.name, report)


class _Entry(NamedTuple):
    """What a file has under a name.

    Attributes:
        shape: the shape of the tensor; ``None`` for something else, such as an extra state.
        read: reads it.
    """

    shape: tuple[int, ...] | None
    read: Callable[[], Any]


def _as_entries(table: Mapping[str, Any]) -> dict[str, _Entry]:
    return {
        name: _Entry(
            tuple(value.shape) if isinstance(value, Tensor) else None, partial(_return, value)
        )
        for name, value in table.items()
    }


def _return(value: Any) -> Any:
    return value


# ---- names


@final
class _Names:
    """Patterns of names.

    Args:
        path: the file.
        rename: patterns of names in the file, and what they become.
        skip: patterns of new names.

    Raises:
        ArgumentError: if a new name has more wildcards than the pattern.
    """

    def __init__(self, path: Path, rename: Mapping[str, str], skip: Sequence[str]) -> None:
        self._path = path
        for old, new in rename.items():
            if new.count("*") > old.count("*"):
                raise ArgumentError(
                    f"load_weights(rename=...) must have no more * on the right than on the left, "
                    f"got {{{old!r}: {new!r}}}. Each * on the right stands for one on the left."
                )
        self._rename = {old: (_compile(old), new.split("*")) for old, new in rename.items()}
        self._skip = {each: _compile(each) for each in skip}

    def apply(
        self,
        found: Mapping[str, _Entry],
        present: Iterable[str],
        report: LoadedWeights,
        *,
        is_strict: bool,
    ) -> dict[str, _Entry]:
        """Return what a file has by new names, without those that are skipped.

        Raises:
            StateError: if two get the same name; and, if strict, for a pattern without effect.
        """
        entries, olds, used = dict[str, _Entry](), dict[str, str](), set[str]()
        for old, entry in found.items():
            new = self._new_name(old, used)
            if new in olds:
                raise StateError(
                    f"load_weights(rename=...) must give each tensor in {self._path} a name of its "
                    f"own, but {olds[new]} and {old} both become {new}. Change the patterns."
                )
            entries[new], olds[new] = entry, old
        for name in {**entries, **dict.fromkeys(present)}:
            matching = [text for text, pattern in self._skip.items() if pattern.fullmatch(name)]
            used.update(matching)
            if matching:
                report.skipped.append(name)
        idle = [text for text in (*self._rename, *self._skip) if text not in used]
        if idle and is_strict:
            raise StateError(
                f"load_weights({str(self._path)!r}, ...) must get patterns that match a name, but "
                f"no name matches {', '.join(map(repr, idle))}. The file has {some_text(found)}. "
                "The first pattern of rename that matches counts, and skip is about new names. "
                "Fix the pattern, or omit it."
            )
        return {name: entry for name, entry in entries.items() if name not in report.skipped}

    def _new_name(self, name: str, used: set[str]) -> str:
        for text, (pattern, parts) in self._rename.items():
            if match := pattern.fullmatch(name):
                used.add(text)
                kept = (*match.groups()[: len(parts) - 1], "")
                return "".join(map("".join, zip(parts, kept, strict=True)))
        return name


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def _compare(entries: Mapping[str, _Entry], target: _Target, report: LoadedWeights) -> None:
    """Sort the names into what is loaded, and what is not."""
    for name, entry in entries.items():
        present = target.tensors.get(name)
        if name not in target.tensors:
            report.unexpected.append(name)
        elif entry.shape is None or not isinstance(present, Tensor) or is_lazy(present):
            report.loaded.append(name)
        elif entry.shape != tuple(present.shape):
            report.mismatched[name] = (entry.shape, tuple(present.shape))
        else:
            report.loaded.append(name)
    # A file may hold a tensor that has two names under one of them.
    places = {target.place_of(name) for name in report.loaded} - {None}
    report.missing += [
        name
        for name in target.tensors
        if name not in {*entries, *report.skipped} and target.place_of(name) not in places
    ]


# ---- what is loaded into


@final
class _Target:
    """The networks that get the weights.

    Args:
        module: the model or the network.
        path: the file, for messages.

    Attributes:
        tensors: what their states hold, by name.

    Raises:
        StateError: if there is none.
    """

    def __init__(self, module: Model | nn.Module, path: Path) -> None:
        self._loose: dict[str, Tensor] = {}
        self._networks: dict[str, nn.Module] = {}
        if isinstance(module, Model):
            self._networks = module.discovery.saved_modules()
            self._loose = module.discovery.moved()[0]
        else:
            self._networks = {"": module}
        self._states = {name: bare_state_dict(net) for name, net in self._networks.items()}
        self.tensors: dict[str, Any] = {
            _join(name, key): part
            for name, state in self._states.items()
            for key, part in state.items()
        }
        self.tensors |= self._loose
        if not self.tensors:
            kind = type(module).__name__
            raise StateError(
                f"load_weights({str(path)!r}, ...) must get a model whose networks are built, but "
                f"{kind} has none yet. Call it as the last line of setup(): "
                "helios.load_weights(path, self)."
            )

    def place_of(self, name: str) -> Any:
        """Return where the memory of a tensor is; ``None`` without any."""
        part = self.tensors.get(name)
        if not isinstance(part, Tensor) or is_lazy(part) or not storage_of(part):
            return None
        return storage_of(part), part.storage_offset(), part.shape, part.stride()

    def load(self, entries: Mapping[str, _Entry]) -> None:
        """Read the tensors one by one, and copy each into the one of its name."""
        for path, network in self._networks.items():
            state = self._states[path]
            own = {key: _join(path, key) for key in state if _join(path, key) in entries}
            is_plain = all(
                isinstance(part, Tensor) and not is_lazy(part) for part in state.values()
            )
            if is_plain and not is_odd(Network(network)):
                for key, name in own.items():
                    _fill(name, state[key], entries[name])
            elif own:
                # Its own code says what becomes of its state.
                read = {key: entries[name].read() for key, name in own.items()}
                load_into(path or type(network).__name__, network, type(state)(state) | read)
        for name, tensor in self._loose.items():
            if name in entries:
                _fill(name, tensor, entries[name])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fill(name: str, tensor: Tensor, entry: _Entry) -> None:
    saved = entry.read()
    fill(name, tensor, saved if is_sharded(tensor) else value_of(saved))


# ---- files


def _open(
    path: Path, module: Model | nn.Module, stack: ExitStack, share: RowShare | None
) -> dict[str, _Entry]:
    """Return what a file or folder holds, by name; tensors are read later, or mapped."""
    is_ours = file_names.is_checkpoint(path) or file_names.is_folder(path)
    if not is_ours and not path.exists():
        raise CheckpointError(loading.gone_text(path))
    if is_ours or file_names.sidecar_path(path).exists():
        return _open_checkpoint(path, module, share)
    if path.is_dir():
        return _open_folder(path, stack)
    if path.suffix == ".safetensors":
        return _open_safetensors(path, stack)
    tree = codec.read(path, maps=True)
    if isinstance(tree, Mapping) and file_names.KEY_SCHEMA in tree:
        return _open_checkpoint(path, module, share)
    return _as_entries(select_weights({file_names.KEY_MODEL: tree}).tensors)


def _open_checkpoint(
    path: Path, module: Model | nn.Module, share: RowShare | None
) -> dict[str, _Entry]:
    types = module.types_for_safe_load() if isinstance(module, Model) else []
    payload = loading.load(path, types, maps=True, share=share).payload
    state = payload[file_names.KEY_MODEL]
    require_whole(state, path)
    networks = networks_of(state)
    if not isinstance(module, Model):
        groups = state if networks is None else networks
        groups = {key: part for key, part in groups.items() if isinstance(part, Mapping)}
        names = bare_state_dict(module).keys()
        fitting = [part for part in groups.values() if part.keys() == names]
        if len(fitting) == 1 or len(groups) == 1:
            return _as_entries((fitting or [*groups.values()])[0])
    if networks is None:
        return _as_entries(select_weights(payload).tensors)
    named = dict(state["parameters"])
    for name, part in networks.items():
        named |= {_join(name, key): value for key, value in part.items()}
    return _as_entries(named)


def _open_folder(folder: Path, stack: ExitStack) -> dict[str, _Entry]:
    """Return what a folder of Hugging Face holds."""
    candidates = (sorted(folder.glob(pattern)) for pattern in _OF_FOLDERS)
    found = next(filter(None, candidates), [])
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise CheckpointError(
            f"{folder} must hold the weights of one model: one of {', '.join(_OF_FOLDERS)}, found "
            f"{names}. Pass the path of a file; of a run, that of its best checkpoint is "
            "helios.find_best_checkpoint(folder)."
        )
    (path,) = found
    if path.suffix != ".json":
        return _open_file(path, stack)
    entries: dict[str, _Entry] = {}
    for name in dict.fromkeys(_read_index(path).values()):
        if Path(str(name)).name != name or not (folder / name).is_file():
            raise CheckpointError(
                f"{path} names {name!r}, but there is no such file in {folder}. Download it again."
            )
        entries |= _open_file(folder / name, stack)
    return entries


def _read_index(path: Path) -> dict[str, str]:
    try:
        table: dict[str, str] = dict(json.loads(path.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} must have a weight_map, from names to files. Download it again."
        ) from error
    return table


def _open_file(path: Path, stack: ExitStack) -> dict[str, _Entry]:
    if path.suffix == ".safetensors":
        return _open_safetensors(path, stack)
    return _as_entries(select_weights({file_names.KEY_MODEL: codec.read(path, maps=True)}).tensors)


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, _Entry]:
    library = import_extra("safetensors", "safetensors")
    try:
        file = stack.enter_context(library.safe_open(path, framework="pt"))
        return {
            name: _Entry(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))
            for name in file.keys()  # noqa: SIM118 - it is no mapping
        }
    except library.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged: {error}. Download it again."
        ) from error
