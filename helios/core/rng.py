"""Random numbers from keys: draws depend on the key only.

A key is 64 bits hashed from typed fields. :func:`reseed` seeds every generator from a key;
:func:`stream` does so for a block and restores the previous states afterwards.

NumPy's global generator belongs to the user's script. Keys seed it only inside a call of a trainer
(:func:`numpy_global_kept`), which :func:`read_states` and :func:`load_states` know; the functions
with historical names never touch it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from helios.errors import ArgumentTypeError, UsageError

_DEFAULT_SEED = 6691
_FIELD_TYPES = frozenset((int, str))
_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_PCG_STATE_FACTOR = 0xD6E8FEB86659FD93
_PCG_INCREMENT = 0x9E3779B97F4A7C15F39CC0605CEDC835
# What `random.seed` does for an int, without its type checks.
_RANDOM: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_SEED_RANDOM = super(random.Random, _RANDOM).seed
_SEED_TORCH = torch.default_generator.manual_seed
# What `np.random.seed` calls for the generator that NumPy begins with, at twice the price.
_SEED_NUMPY = np.random.set_state.__self__.seed  # type: ignore[attr-defined]
_NUMPY_GLOBAL = "numpy_global"


def key(*fields: int | str) -> int:
    """Hash typed fields into a key of 64 bits.

    Fields are hashed with their types, never packed or added, so ``("a", 1)`` and ``("a", "1")``
    differ, and seed 1 in epoch 0 gives another key than seed 0 in epoch 1.

    Args:
        *fields: plain integers of any size, and strings.

    Raises:
        ArgumentTypeError: if a field has another type (including ``bool`` and NumPy's integers,
            whose text form differs between versions).

    Example:
        >>> key(6691, "fetch", 0, 1) == key(6691, "fetch", 0, 1)
        True
        >>> key(1, 0) == key(0, 1)
        False
    """
    if not _FIELD_TYPES.issuperset(map(type, fields)):
        found = sorted({type(field).__name__ for field in fields} - {"int", "str"})
        raise ArgumentTypeError(f"rng.key(...) takes int and str fields only, got {found}.")
    return int.from_bytes(blake2b(ascii(fields).encode(), digest_size=8).digest(), "little")


class KeySeries:
    """Keys that differ in one counter field, computed 64 at a time.

    Computing keys in a batch takes about a microsecond per key, much less than one by one between
    training steps, which evict the code from the processor's caches.

    Args:
        *prefix: the fields before the counter.
        suffix: the fields after the counter.

    Example:
        >>> KeySeries(6691, "train", suffix=(0,)).at(7) == key(6691, "train", 7, 0)
        True
    """

    _LENGTH = 64

    def __init__(self, *prefix: int | str, suffix: tuple[int | str, ...] = ()) -> None:
        key(*prefix, *suffix)  # raises
        # The text of the tuple that key() hashes, before and after the counter.
        head = "".join(f"{field!a}, " for field in prefix)
        tail = "".join(f", {field!a}" for field in suffix) or ("" if prefix else ",")
        self._tail = f"{tail})".encode()
        self._hash = blake2b(f"({head}".encode(), digest_size=8)
        self._first = 0
        self._keys: list[int] = []

    def at(self, counter: int) -> int:
        """Return the key for a value of the counter."""
        place = counter - self._first
        if 0 <= place < len(self._keys):
            return self._keys[place]
        self._keys = []
        for number in range(counter, counter + self._LENGTH):
            # The same bytes that key() hashes; the part before the counter is hashed already.
            found = self._hash.copy()
            found.update(b"%d%b" % (number, self._tail))
            self._keys.append(int.from_bytes(found.digest(), "little"))
        self._first = counter
        return self._keys[0]


class DefaultNumpyRNG:
    """Wrapper of a NumPy ``Generator`` (PCG64) whose state can be saved.

    Args:
        seed: seed of the generator; the default seed if ``None``.

    Attributes:
        pending: a key that is not applied yet; ``None`` once the generator is seeded from it.
        is_taken: whether :attr:`generator` was read, so that its reader may draw at any time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(_DEFAULT_SEED if seed is None else seed)
        self.pending: int | None = None
        self.is_taken = False

    @property
    def generator(self) -> np.random.Generator:
        """The wrapped generator."""
        self.is_taken = True
        self._settle()
        return self._generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, which consists of strings and integers."""
        self._settle()
        return dict(self._generator.bit_generator.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        self.pending = None
        self._generator.bit_generator.state = state_dict

    def reseed(self, seed: int) -> None:
        """Seed the generator from a key of 64 bits.

        Until :attr:`generator` is read for the first time, the key is only stored, which saves time
        in every iteration of a run without NumPy.
        """
        self.pending = seed
        if self.is_taken:
            self._settle()

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker may unpickle a data set that holds the default generator: it must get
        # the worker's own one, which is re-seeded there, and not a copy, which is not.
        if self is _Default.numpy:
            return _receive_default, (self.state_dict(),)
        return _make_from_state, (self.state_dict(),)

    def _settle(self) -> None:
        if self.pending is None:
            return
        seed, self.pending = self.pending, None
        # Clear the cached half of a 64-bit draw, too, or it would be the first number drawn.
        self._generator.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {
                "state": seed << 64 | seed * _PCG_STATE_FACTOR & _MASK64,
                "inc": _PCG_INCREMENT,
            },
            "has_uint32": 0,
            "uinteger": 0,
        }


class _Default:
    """The objects that exist once in a process.

    Attributes:
        numpy: the package's default NumPy generator.
    """

    numpy: DefaultNumpyRNG | None = None


def _make_from_state(state: dict[str, Any]) -> DefaultNumpyRNG:
    generator = DefaultNumpyRNG()
    generator.load_state_dict(state)
    return generator


def _receive_default(state: dict[str, Any]) -> DefaultNumpyRNG:
    if _Default.numpy is None:
        _Default.numpy = _make_from_state(state)
    return _Default.numpy


def get_default_seed() -> int:
    """Return the seed that is used if none is given: 6691."""
    return _DEFAULT_SEED


def create_default_numpy_rng(seed: int | None = None) -> None:
    """Create the default NumPy generator, or reset the existing one in place.

    An existing object is kept, because a data set may hold it, and only the default is re-seeded.

    Args:
        seed: the seed; the default seed if ``None``.
    """
    fresh = DefaultNumpyRNG(seed)
    if _Default.numpy is None:
        _Default.numpy = fresh
    else:
        _Default.numpy.load_state_dict(fresh.state_dict())


def get_default_numpy_rng() -> DefaultNumpyRNG:
    """Return the default NumPy generator.

    Raises:
        UsageError: if no trainer, :func:`seed_rngs` or :func:`create_default_numpy_rng` has
            created it yet (a ``RuntimeError``).
    """
    if _Default.numpy is None:
        raise UsageError(
            "The default NumPy generator does not exist yet: it is created when training starts. "
            "Call rng.seed_rngs(...) or rng.create_default_numpy_rng(...) to create it yourself."
        )
    return _Default.numpy


def seed_rngs(seed: int | None = None, skip_torch: bool = False) -> None:
    """Seed torch (all devices), ``random`` and the default NumPy generator.

    NumPy's legacy global generator is not changed.

    Args:
        seed: the seed; the default seed if ``None``.
        skip_torch: whether to leave torch's generators unchanged.
    """
    value = _DEFAULT_SEED if seed is None else seed
    if not skip_torch:
        torch.manual_seed(value)
    random.seed(value)
    create_default_numpy_rng(value)


def seed_setup(seed: int) -> None:
    """Seed every generator from a user's seed, before plugins, data and model are set up.

    Args:
        seed: the seed; NumPy's global generator gets it as ``numpy.random.seed`` would.
    """
    seed_rngs(seed)
    _seed_numpy_global(seed)


@contextmanager
def numpy_global_kept() -> Iterator[None]:
    """Restore NumPy's global generator after a block."""
    found = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        np.random.set_state(found)


def _seed_numpy_global(seed: int) -> None:
    # It takes 32 bits. The lower ones alone would give it the words of torch's CPU generator.
    value = (seed ^ seed >> 32) & _MASK32
    try:
        _SEED_NUMPY(value)
    except TypeError:  # a script has set another bit generator, and the cached draw would stay
        np.random.seed(value)
        np.random.set_state(np.random.get_state(legacy=False) | {"has_gauss": 0, "gauss": 0.0})


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def reseed(seed: int) -> None:
    """Seed every generator from one key: torch (CPU and initialized CUDA devices), random, NumPy.

    Takes about 8 microseconds on a CPU; ``torch.manual_seed`` alone takes a hundred.

    Args:
        seed: a key of 64 bits.
    """
    _SEED_TORCH(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    _SEED_RANDOM(seed)
    _RANDOM.gauss_next = None  # type: ignore[attr-defined]
    if _Default.numpy is None:
        create_default_numpy_rng(seed)
    numpy = _Default.numpy or get_default_numpy_rng()
    numpy.pending = seed
    if numpy.is_taken:
        numpy.reseed(seed)
    _seed_numpy_global(seed)


@contextmanager
def stream(seed: int) -> Iterator[None]:
    """Seed all generators from a key for a block, then restore their previous states."""
    found = read_states()
    try:
        reseed(seed)
        yield
    finally:
        load_states(found)
        if found["numpy"] is None:
            _Default.numpy = None


def get_rng_state_dict() -> dict[str, Any]:
    """Return the state of all generators, in types that ``weights_only`` loading accepts.

    Returns:
        Keys ``torch`` (uint8 tensor), ``rand``, ``numpy`` (``None`` if it does not exist) and, if
        CUDA is initialized, ``cuda`` (a list of uint8 tensors, one per device).
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "rand": random.getstate(),
        "numpy": None if _Default.numpy is None else _Default.numpy.state_dict(),
    }
    if _uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def load_rng_state_dict(state_dict: dict[str, Any]) -> None:
    """Restore the states that :func:`get_rng_state_dict` returned."""
    torch.set_rng_state(state_dict["torch"])
    version, words, gauss = state_dict["rand"]
    random.setstate((version, tuple(words), gauss))
    if state_dict["numpy"] is not None:
        if _Default.numpy is None:
            create_default_numpy_rng()
        get_default_numpy_rng().load_state_dict(state_dict["numpy"])
    if "cuda" in state_dict and torch.cuda.is_available():
        # A machine may have fewer devices than the one that saved; the run uses the first ones.
        torch.cuda.set_rng_state_all(state_dict["cuda"][: torch.cuda.device_count()])


def read_states() -> dict[str, Any]:
    """Return the states of all generators that keys seed.

    Returns:
        The result of :func:`get_rng_state_dict`, and the state of NumPy's global generator. Reading
        that takes 25 microseconds, so no step does it.
    """
    return get_rng_state_dict() | {_NUMPY_GLOBAL: np.random.get_state(legacy=False)}


def load_states(state_dict: dict[str, Any]) -> None:
    """Restore the states that :func:`read_states` returned."""
    load_rng_state_dict(state_dict)
    np.random.set_state(state_dict[_NUMPY_GLOBAL])
