"""The objects that hold state in a run besides the model, and their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from helios.core.utils import Stateful, unsaved_of
from helios.counters import Phase
from helios.data.loader import KeyedLoader, data_sets_of
from helios.data.order import ReplayedOrder
from helios.data.source import ByOwnState, Source
from helios.engines.engine import Engine
from helios.hooks.events import CHANNELS
from helios.loops.loop import Loop, find_loops
from helios.model.model import Model
from helios.plugins.channels import PipelineHooks, keeps_state
from helios.plugins.plugin import Plugin
from helios.state.owners import Owner, Owners
from helios.state.values import generators_in
from helios.storage.plain_objects import attributes_of

if TYPE_CHECKING:
    from helios.start.run import Run

_LOGGER = logging.getLogger(__name__)

_MANY = 100
"""Maximum length of a list that is searched for data sets, as in ``ConcatDataset``."""

_IN_WORKERS = "a generator that each loader worker copies: draw from torch or random instead"


def find_owners(run: Run, source: Source | None = None) -> Owners:
    """Return all objects that may hold state, right after setup.

    Args:
        run: the call. If its model overrides ``state_dict``, that may omit something.
        source: the training data; ``None`` outside a training. Between validations, the order of
            theirs has a state then.
    """
    model, datamodule, engine = run.model, run.datamodule, run.engine
    validation = run.sources.get(Phase.VALIDATION, ()) if source is not None else ()
    owners = [Owner("engine", engine, engine.unsaved, _has_own(engine, Engine))]
    owners += _of_plugins(run.plugins)
    if type(model).state_dict is not Model.state_dict:
        owners.append(Owner("model", model, model.unsaved, has_own_state=True, is_model=True))
    owners.append(Owner("data", datamodule, datamodule.unsaved))
    owners += (
        Owner(f"loop {path!r}", loop, loop.unsaved, _has_own(loop, Loop))
        for path, loop in find_loops(run.loops.fit).items()
    )
    others: dict[str, object] = {"<model>": model}
    if source is not None and isinstance(source.resumes_by, ByOwnState):
        # It is saved as of the last batch that was trained on; the loader itself may have read
        # ahead since then.
        others |= {"<data 0>": source.loader, "<data 1>": source.resumes_by.holder}
    elif source is not None and not _count_workers(source):
        owners += (
            Owner(name, part, unsaved_of(part), is_data=True)
            for name, part in _dataset_parts(source)
        )
    orders = {f"loader {number}": _order_of(each) for number, each in enumerate(validation)}
    if any(orders.values()):
        owners.append(Owner("validation orders", SimpleNamespace(**orders)))
    found = Owners(
        owners, lambda: {**others, **_saved_by(model)}, safe_types=model.types_for_safe_load()
    )
    found.take_baseline()
    return found


def find_stranded_generators(source: Source) -> dict[str, str]:
    """Return the generators in a data set that loader workers copy, and warn of them."""
    num_workers = _count_workers(source)
    if not num_workers:
        return {}
    names = [
        f"{name}: {key}" for name, part in _dataset_parts(source) for key in generators_in(part)
    ]
    if names:
        _LOGGER.warning(
            "%s: with num_workers=%d each worker draws from a copy that no checkpoint holds. Draw "
            "from torch, random or Helios' NumPy generator, which are seeded for each batch, or "
            "use num_workers=0.",
            ", ".join(names),
            num_workers,
        )
    return dict.fromkeys(names, _IN_WORKERS)


def _saved_by(model: Model) -> dict[str, object]:
    """Return what a model saves by itself, by the names that other owners use."""
    objects = model.discovery.named_objects()
    values = model.discovery.pop_values()
    return {
        **{f"<model>/{name}": part for name, part in objects.items()},
        **{f"<model>.{path}": part for path, part in values.items()},
    }


def _has_own(part: Any, base: type) -> bool:
    return type(part).state_dict is not base.state_dict  # type: ignore[attr-defined]


def _of_plugins(plugins: Mapping[str, Plugin]) -> Iterator[Owner]:
    for name, plugin in plugins.items():
        has_own = type(plugin).state_dict not in (Plugin.state_dict, PipelineHooks.state_dict)
        yield Owner(f"plugin {name!r}", plugin, plugin.unsaved, has_own)
        if isinstance(plugin, PipelineHooks):
            for channel in CHANNELS:
                for place, hook in enumerate(plugin.contexts(channel)):
                    context = f"context {place} ({type(hook).__name__}) of {channel} in {name!r}"
                    yield Owner(context, hook, hook.unsaved, keeps_state(hook))


def _order_of(source: Source) -> dict[str, Any]:
    """Return what has the state that the order of a source depends on, by name."""
    loader = source.loader
    if isinstance(loader, KeyedLoader):
        order = loader.batches.order
        return order.holders if isinstance(order, ReplayedOrder) else {}
    if not isinstance(loader, DataLoader) or isinstance(loader, Stateful):
        return {}
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return ReplayedOrder(sampler).holders


def _count_workers(source: Source) -> int:
    return int(source.description.get("num_workers") or 0)


def _dataset_parts(source: Source) -> Iterator[tuple[str, object]]:
    """Yield the training data set, those that it contains, and the collate function's object."""
    loader = source.loader
    if isinstance(loader, DataLoader):
        yield from find_data_sets(source)
        yield from _holders_in("collate function", loader.collate_fn)


def find_data_sets(source: Source) -> Iterator[tuple[str, object]]:
    """Yield the data set of a loader of PyTorch, and those that it contains, each with a path."""
    loader = source.loader
    waiting: list[tuple[str, Any]] = [("data set", data_sets_of(loader)[-1])]
    seen: set[int] = set()
    while waiting:
        name, part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield name, part
        for key, value in attributes_of(part).items():
            inner = value if isinstance(value, list | tuple) and len(value) < _MANY else [value]
            found = [item for item in inner if isinstance(item, Dataset)]
            place = f"{name}.{key}"
            names = [f"{place}.{number}" for number in range(len(found))] if found[1:] else [place]
            waiting += zip(names, found, strict=False)


def _holders_in(name: str, call: Any) -> Iterator[tuple[str, object]]:
    """Yield what a callable keeps values in: itself, or what it is a method or a partial of."""
    if isinstance(call, MethodType):
        yield from _holders_in(name, call.__self__)
    elif isinstance(call, partial):
        yield from _holders_in(name, call.func)
        given = enumerate((*call.args, *call.keywords.values()), 1)
        yield from (
            pair for number, part in given for pair in _holders_in(f"{name}.{number}", part)
        )
    elif attributes_of(call) and not isinstance(call, ModuleType | nn.Module | Stateful):
        yield name, call
