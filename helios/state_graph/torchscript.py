"""Reads attributes of scripted and traced networks, which PyTorch stores and cannot restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from helios.state_graph.object_names import ObjectNames
from helios.state_graph.scanning import ContentScanner

_OF_GRAPHS = ("meta", "shape_env", "training", "graph")


def script_marks(found: ObjectNames, content: Callable[[], ContentScanner]) -> dict[str, bytes]:
    """Return a mark of each attribute of a ``ScriptModule`` or ``GraphModule``, by name.

    Args:
        found: networks by path.
        content: returns what compares values by content.
    """
    return {
        f"{path}.{name}.{key}" if name else f"{path}.{key}": content().mark(value)
        for path, module in found.modules().items()
        if any(
            issubclass(kind, ScriptModule | GraphModule) for kind in found.networks.of(module).kinds
        )
        for name, part in found.networks.of(module).modules
        for key, value in _attributes_of(part)
    }


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, ScriptModule):
        described: Any = vars(module).get("_concrete_type")
        for key in described.get_attributes() if described is not None else ():
            value = vars(module)["_c"].getattr(key)
            # Parameters, buffers and modes are saved.
            if not key.startswith("_") and key != "training" and not isinstance(value, Tensor):
                yield key, value
    elif isinstance(module, GraphModule):
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in _OF_GRAPHS:
                yield key, value
