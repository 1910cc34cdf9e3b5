"""Hook contexts and channels: order, errors, nesting, handles, sets and state.

Events are told here as the bus tells them, one by one; whole runs are in the integration tests.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from helios.core.registry import Registry
from helios.errors import ArgumentError
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS
from helios.plugins.channels import HookContext, PipelineHooks
from helios.state import Phase, TrainingState

STATE = TrainingState()


@dataclasses.dataclass
class Run:
    """As much of a run as a context is asked for here."""

    phase: Phase = Phase.TRAINING
    is_in_epoch: bool = False
    exception: BaseException | None = None
    resumed: bool = False


class Noting(HookContext):
    """Notes when it is entered and left, and what the context object says then."""

    def __init__(self, log: list[Any], name: str, *, leave: Any = None) -> None:
        self.log = log
        self.name = name
        self.leave = leave

    def on_enter(self, ctx: Context) -> None:
        self.log.append(f"{self.name}(")

    def on_exit(self, ctx: Context) -> None:
        self.log.append(f"{self.name})" + (f" {ctx.exception!r}" if ctx.exception else ""))
        if self.leave is not None:
            raise self.leave


def make_ctx() -> Context:
    """Return a context object without a run."""
    parts: Any = SimpleNamespace(run=Run())
    return Context(parts)


@pytest.mark.shows("R10", "R11")
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (True, True, ["before", "body", "after"]),
        (True, False, ["before", "body"]),
        (False, True, ["body", "after"]),
    ],
)
def test_a_context_of_functions_has_either_or_both(
    before: bool, after: bool, expected: list[str]
) -> None:
    """Both get the one argument."""
    log: list[Any] = []
    ctx = make_ctx()

    def note(name: str) -> Callable[[Context], None]:
        return lambda given: log.append(name if given is ctx else None)

    hook = HookContext.from_callable(
        before=note("before") if before else None, after=note("after") if after else None
    )
    with hook.begin(ctx):
        log.append("body")
    assert log == expected


@pytest.mark.shows("R15")
def test_all_exits_run_and_their_errors_are_joined() -> None:
    """The first is raised; the exits after it see it."""
    log: list[Any] = []
    hooks = PipelineHooks()
    hooks.context = make_ctx()
    errors = [ValueError("a"), None, KeyError("c"), RuntimeError("d")]
    for name, leave in zip("abcd", errors, strict=True):
        hooks.register("on_batch", Noting(log, name, leave=leave))
    hooks.on_training_batch_start(STATE)
    del log[:]
    with pytest.raises(ValueError, match="a") as caught:
        hooks.on_training_batch_end(STATE, True)
    assert log == ["a)", *(f"{name}) ValueError('a')" for name in "bcd")]
    assert caught.value is errors[0]
    texts = "".join(errors[0].__notes__) if sys.version_info >= (3, 11) else "KeyError RuntimeError"
    assert "KeyError" in texts
    assert "RuntimeError" in texts
    assert hooks.context.exception is None


@pytest.mark.shows("R17")
def test_one_object_counts_once_and_its_handle_removes_it_once() -> None:
    hooks, hook = PipelineHooks(), Noting([], "quiet")
    first = hooks.register("on_batch", hook)
    other = Noting([], "quiet")
    hooks.register("on_batch", other)
    second = hooks.register("on_batch", hook)
    assert hooks.contexts("on_batch") == [hook, other]
    second.remove()
    second.remove()
    assert hooks.contexts("on_batch") == [hook, other]
    first.remove()
    assert hooks.contexts("on_batch") == [other]
    hooks.register("on_batch", hook)
    first.remove()
    assert hooks.contexts("on_batch") == [other, hook]


@pytest.mark.shows("R18")
def test_a_channel_that_does_not_exist_is_an_error() -> None:
    """It names those that do."""
    with pytest.raises(ArgumentError, match=r"on_loop, on_epoch.*got 'on_batches'"):
        PipelineHooks().register("on_batches", Noting([], "quiet"))
    with pytest.raises(ArgumentError, match="on_optimizer_step"):
        PipelineHooks().contexts("")


@pytest.mark.shows("R19")
def test_unregister_all_empties_every_channel_for_good() -> None:
    """A handle of before does not take back what was registered afterwards."""
    hooks, hook = PipelineHooks(), Noting([], "quiet")
    handles = [hooks.register(channel, hook) for channel in CHANNELS]
    hooks.unregister_all()
    assert [hooks.contexts(channel) for channel in CHANNELS] == [[]] * len(CHANNELS)
    hooks.register("on_loop", hook)
    for handle in handles:
        handle.remove()
    assert hooks.contexts("on_loop") == [hook]


@pytest.mark.shows("R20")
def test_a_sum_is_a_new_set_under_the_first_id() -> None:
    first, second = PipelineHooks("first"), PipelineHooks("second")
    a, b, c, shared = (Noting([], "quiet") for _ in range(4))
    for hooks, hook in ((first, a), (first, shared), (second, b), (second, shared)):
        hooks.register("on_batch", hook)
    second.register("on_loop", c)
    both = first + second
    assert both.plug_id == "first"
    assert both.contexts("on_batch") == [a, shared, b]
    assert both.contexts("on_loop") == [c]
    assert first.contexts("on_batch") == [a, shared]
    assert second.contexts("on_batch") == [b, shared]


@pytest.mark.shows("R20")
def test_one_handle_removes_all_that_was_added() -> None:
    """What was there before stays."""
    hooks, other = PipelineHooks(), PipelineHooks()
    mine, shared, added = (Noting([], "quiet") for _ in range(3))
    hooks.register("on_batch", mine)
    hooks.register("on_batch", shared)
    other.register("on_batch", shared)
    other.register("on_batch", added)
    other.register("on_loop", added)
    with hooks.extend(other) as handle:
        assert hooks.contexts("on_batch") == [mine, shared, added]
        assert hooks.contexts("on_loop") == [added]
    handle.remove()
    assert hooks.contexts("on_batch") == [mine, shared]
    assert hooks.contexts("on_loop") == []
    assert other.contexts("on_batch") == [shared, added]


class Ready(PipelineHooks):
    """A ready-made set, with a method of its own."""

    def __init__(self, name: str = "ready") -> None:
        super().__init__(name)
        self.register("on_batch", HookContext.from_callable(after=self.count))
        self.seen = 0

    def count(self, ctx: Context) -> None:
        self.seen += 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    own = Registry("plugin")
    monkeypatch.setattr("helios.plugins.plugin.PLUGIN_REGISTRY", own)
    return own


@pytest.mark.shows("R21", "R22")
def test_sets_are_made_of_what_configurations_hold(registry: Registry) -> None:
    registry.register(Ready)
    assert PipelineHooks.from_hooks(None).contexts("on_batch") == []
    hooks = PipelineHooks()
    assert PipelineHooks.from_hooks(hooks) is hooks
    table = {"type": "Ready", "name": "configured"}
    made = PipelineHooks.from_hooks(table)
    assert isinstance(made, Ready)
    assert made.plug_id == "configured"
    assert table == {"type": "Ready", "name": "configured"}
    assert isinstance(PipelineHooks.from_hooks(Ready), Ready)
    assert PipelineHooks.from_hooks(lambda: hooks) is hooks
    hooks.register("on_loop", Noting([], "quiet"))
    all_of_them = PipelineHooks.from_hooks(part for part in (hooks, table, Ready, None, [hooks]))
    assert type(all_of_them) is PipelineHooks
    assert all_of_them is not hooks
    assert all_of_them.contexts("on_loop") == hooks.contexts("on_loop")
    assert len(all_of_them.contexts("on_batch")) == 2


def test_a_context_that_would_do_nothing_is_refused() -> None:
    """Most often its methods are misspelt."""

    class Misspelt(HookContext):
        def on_begin(self, ctx: Context) -> None: ...

    with pytest.raises(
        ArgumentError, match=r"Misspelt must override on_enter\(self, ctx\), on_exit"
    ):
        PipelineHooks().register("on_batch", Misspelt())
