"""Objects that remember what their constructors were given, as plain data.

Nothing has to be called for it, and ``inspect.signature`` sees the classes as if nothing was done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from helios.core.declared_values import describe_given
from helios.core.signatures import read_signature

_ATTRIBUTE = "_constructor_arguments"


class _UntouchedSignature:
    """The signature that a class would have without ``KeepsArguments.__new__``."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        lineage = owner.__mro__
        own = lineage[: lineage.index(KeepsArguments)]
        if instance is not None or any({"__new__", "__init__"} & vars(kind).keys() for kind in own):
            raise AttributeError("__signature__")
        init: Any = inspect.getattr_static(owner, "__init__")
        if init is object.__init__:
            return inspect.Signature()
        signature = read_signature(init)
        _, *rest = signature.parameters.values()
        return signature.replace(parameters=rest)


class KeepsArguments:
    """Base of classes whose objects remember what their constructors were given."""

    _internals: ClassVar[str] = _ATTRIBUTE

    # Type checkers would take __new__ for the constructor of classes without __init__.
    if not TYPE_CHECKING:
        __signature__ = _UntouchedSignature()

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            new = super().__new__
            has_init = cls.__init__ is not object.__init__
            if (args or kwargs) and not has_init:
                # Python says so only of classes without any __new__.
                raise TypeError(f"{cls.__name__}() takes no arguments")
            self = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
            # A __new__ of a subclass may keep them to itself.
            is_told = has_init and (bool(args or kwargs) or cls.__new__ is KeepsArguments.__new__)
            given = bind_arguments(cls.__init__, (self, *args), kwargs) if is_told else {}
            # Not by assignment, which a class may have forbidden or changed.
            vars(self)[_ATTRIBUTE] = describe_given(dict(islice(given.items(), 1, None)))
            return self


def arguments_of(owner: object) -> dict[str, Any]:
    """Return what the constructor of an object was given, and its defaults, as a flat table."""
    return dict(vars(owner).get(_ATTRIBUTE, {}))


def bind_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults.

    There are none for what cannot be called like that: the call itself says so.
    """
    try:
        bound = read_signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return given
