"""Hook contexts and channels: order, errors, nesting, handles, sets and state (R10-R22).

Events are told here as the bus tells them, one by one; whole runs are in the integration tests.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helios.core.registry import Registry
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.bus import check_receiver
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS, EVENTS
from helios.plugins.channels import HookHandle, PipelineHooks
from helios.plugins.contexts import HookContext
from helios.plugins.plugin import PLUGIN_REGISTRY
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

    def __init__(self, log: list[Any], name: str, *, enter: Any = None, leave: Any = None) -> None:
        self.log = log
        self.name = name
        self.enter = enter
        self.leave = leave

    def on_enter(self, ctx: Context) -> None:
        self.log.append(f"{self.name}(")
        if self.enter is not None:
            raise self.enter

    def on_exit(self, ctx: Context) -> None:
        self.log.append(f"{self.name})" + (f" {ctx.exception!r}" if ctx.exception else ""))
        if self.leave is not None:
            raise self.leave


class Counting(HookContext):
    """Counts its beginnings; the count is state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_enter(self, ctx: Context) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def make_hooks(log: list[Any], *channels: str, **run: Any) -> PipelineHooks:
    """Return a set whose contexts note the channel that they stand in; with a context object."""
    hooks = PipelineHooks()
    hooks.context = Context(Run(**run))
    for channel in channels:
        hooks.register(channel, Noting(log, channel.removeprefix("on_")))
    return hooks


def tell(hooks: PipelineHooks, event: str) -> None:
    """Tell an event with as many arguments as the table says."""
    getattr(hooks, event)(*EVENTS[event].parameters)


def make_ctx() -> Context:
    """Return a context object without a run."""
    return Context(Run())


# Contexts


@pytest.mark.shows("R10")
def test_a_context_does_nothing_by_itself() -> None:
    """R10."""
    hook, ctx = HookContext(), make_ctx()
    with hook.begin(ctx) as entered:
        assert entered is hook
    assert hook.state_dict() == {}
    hook.load_state_dict({})


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
    """R10, R11, R12: both get the one argument."""
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


@pytest.mark.shows("R11")
def test_a_context_of_no_functions_is_an_error() -> None:
    """R11."""
    with pytest.raises(ArgumentTypeError, match=r"before=.*must be a function"):
        HookContext.from_callable("print")
    with pytest.raises(ArgumentTypeError, match=r"after=.*must be a function"):
        HookContext.from_callable(print, 3)
    with pytest.raises(ArgumentError, match="must get at least one"):
        HookContext.from_callable()


def test_a_function_that_tells_no_signature_is_taken() -> None:
    HookContext.from_callable(before=max)


@pytest.mark.shows("R12")
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_an_exception_of_the_body_is_seen_at_the_exit_and_goes_on(
    kind: type[BaseException],
) -> None:
    """R12, R16."""
    log: list[Any] = []
    ctx, error = make_ctx(), kind("body")
    with pytest.raises(kind) as caught, Noting(log, "hook").begin(ctx):
        raise error
    assert caught.value is error
    assert log == ["hook(", f"hook) {error!r}"]
    assert ctx.exception is None


@pytest.mark.shows("R14")
def test_a_context_that_fails_to_begin_is_not_left() -> None:
    """R14: the body is skipped, too."""
    log: list[Any] = []
    hook = Noting(log, "hook", enter=ValueError("enter"))
    with pytest.raises(ValueError, match="enter"), hook.begin(make_ctx()):
        log.append("body")
    assert log == ["hook("]


@pytest.mark.shows("R15")
def test_an_error_at_the_exit_joins_that_of_the_body() -> None:
    """R15: the body's error goes on, and carries the other along."""
    body, leave = ValueError("body"), KeyError("leave")
    hook = Noting([], "hook", leave=leave)
    with pytest.raises(ValueError, match="body") as caught, hook.begin(make_ctx()):
        raise body
    assert caught.value is body
    assert body.__context__ is leave
    assert leave.__context__ is None


def test_an_error_at_the_exit_alone_is_raised() -> None:
    """R15."""
    hook = Noting([], "hook", leave=KeyError("leave"))
    with pytest.raises(KeyError, match="leave"), hook.begin(make_ctx()):
        pass


def test_contexts_nest_and_an_outer_exception_comes_back() -> None:
    """R16: an exception that is dealt with inside is not seen outside."""
    log: list[Any] = []
    ctx = make_ctx()
    with Noting(log, "outer").begin(ctx):
        with pytest.raises(ValueError, match="inner"), Noting(log, "inner").begin(ctx):
            raise ValueError("inner")
        assert ctx.exception is None
    assert log == ["outer(", "inner(", "inner) ValueError('inner')", "outer)"]


# Channels


@pytest.mark.shows("R2", "R19")
def test_a_set_has_the_channels_of_the_table() -> None:
    """R1, R2, R19."""
    hooks = PipelineHooks()
    assert hooks.plug_id == "pipeline-hooks"
    names = "loop epoch step batch model_forward model_backward optimizer_step"
    assert [f"on_{name}" for name in names.split()] == list(CHANNELS)
    for channel in CHANNELS:
        assert hooks.contexts(channel) == []
        hook = Noting([], "quiet")
        hooks.register(channel, hook)
        assert hooks.contexts(channel) == [hook]
    check_receiver(hooks)


@pytest.mark.shows("R1")
@pytest.mark.parametrize("name", [e.name for e in EVENTS.values() if e.scope])
def test_every_event_with_a_scope_begins_or_ends_it(name: str) -> None:
    """R1: the column of the table and the methods are the same."""
    log: list[Any] = []
    channel = EVENTS[name].scope
    hooks = make_hooks(log, channel)
    twin = name.replace("_end", "_start")
    assert name in vars(PipelineHooks)
    if twin != name:
        tell(hooks, twin)
        assert log == [f"{channel.removeprefix('on_')}("]
        log.clear()
    tell(hooks, name)
    assert log == [channel.removeprefix("on_") + ("(" if twin == name else ")")]


@pytest.mark.shows("R13", "C11")
def test_contexts_are_left_in_the_order_in_which_they_are_entered() -> None:
    """R13, C11: not reversed."""
    log: list[Any] = []
    hooks = make_hooks(log)
    for name in "abc":
        hooks.register("on_model_forward", Noting(log, name))
    hooks.on_forward_start(None)
    hooks.on_forward_end(None)
    assert log == ["a(", "b(", "c(", "a)", "b)", "c)"]


@pytest.mark.shows("R14")
def test_where_one_fails_to_begin_only_begun_ones_are_left() -> None:
    """R14: later ones are not entered at all; outer scopes are left, too."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_loop", "on_step")
    error = ValueError("enter")
    for name, enter in (("a", None), ("b", error), ("c", None)):
        hooks.register("on_batch", Noting(log, name, enter=enter))
    hooks.on_training_start()
    hooks.on_training_step_start(STATE)
    with pytest.raises(ValueError, match="enter"):
        hooks.on_training_batch_start(STATE)
    assert log == ["loop(", "step(", "a(", "b("]
    del log[:]
    hooks.on_exception(error)
    assert log == [f"{name}) {error!r}" for name in ("a", "step", "loop")]


@pytest.mark.shows("R15")
def test_all_exits_run_and_their_errors_are_joined() -> None:
    """R15: the first is raised; the exits after it see it."""
    log: list[Any] = []
    hooks = make_hooks(log)
    errors = [ValueError("a"), None, KeyError("c"), RuntimeError("d")]
    for name, leave in zip("abcd", errors, strict=True):
        hooks.register("on_batch", Noting(log, name, leave=leave))
    hooks.on_training_batch_start(STATE)
    del log[:]
    with pytest.raises(ValueError, match="a") as caught:
        hooks.on_training_batch_end(STATE, True)
    assert log == ["a)", *(f"{name}) ValueError('a')" for name in "bcd")]
    assert caught.value is errors[0]
    assert errors[0].__context__ is errors[2]
    assert errors[2].__context__ is errors[3]
    assert hooks.context.exception is None


def test_an_error_of_an_inner_scope_is_seen_at_the_exits_of_outer_ones() -> None:
    """R15: where one end closes several scopes."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_epoch", "on_step")
    hooks.register("on_batch", Noting(log, "batch", leave=ValueError("x")))
    hooks.on_training_epoch_start(1)
    hooks.on_training_step_start(STATE)
    hooks.on_training_batch_start(STATE)
    del log[:]
    with pytest.raises(ValueError, match="x"):
        hooks.on_training_epoch_end(1)
    assert log == ["batch)", "step) ValueError('x')", "epoch) ValueError('x')"]


def test_all_exits_run_also_where_one_is_broken_off_by_the_keyboard() -> None:
    """R15."""
    log: list[Any] = []
    hooks = make_hooks(log)
    hooks.register("on_loop", Noting(log, "a", leave=KeyboardInterrupt()))
    hooks.register("on_loop", Noting(log, "b"))
    hooks.on_training_start()
    with pytest.raises(KeyboardInterrupt):
        hooks.on_training_end()
    assert log[2:] == ["a)", "b) KeyboardInterrupt()"]


def test_an_exit_that_raises_the_exception_again_adds_nothing() -> None:
    """R15, R16."""
    hooks = make_hooks([])

    def raise_again(ctx: Context) -> None:
        if ctx.exception is not None:
            raise ctx.exception

    error = ValueError("first")
    hooks.register("on_loop", Noting([], "a", leave=error))
    hooks.register("on_loop", HookContext.from_callable(after=raise_again))
    hooks.on_training_start()
    with pytest.raises(ValueError, match="first") as caught:
        hooks.on_training_end()
    assert caught.value is error
    assert error.__context__ is None
    assert not getattr(error, "__notes__", [])


@pytest.mark.parametrize("version", [(3, 10), min((3, 11), sys.version_info[:2])])
def test_an_error_names_those_that_followed(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R15: as a note, or in the log where the interpreter knows no notes."""
    monkeypatch.setattr("helios.plugins.contexts.sys", types.SimpleNamespace(version_info=version))
    hooks = make_hooks([])
    hooks.register("on_loop", Noting([], "a", leave=ValueError("first")))
    hooks.register("on_loop", Noting([], "b", leave=ValueError("second")))
    hooks.on_training_start()
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first") as caught:
        hooks.on_training_end()
    notes = getattr(caught.value, "__notes__", [])
    said = "\n".join(notes) if version == (3, 11) else caplog.text
    assert "ValueError('second') was raised too" in said
    assert bool(notes) is not bool(caplog.text)


@pytest.mark.shows("R16")
def test_after_an_exception_every_exit_sees_it_innermost_scope_first() -> None:
    """R16; it stays in the context object, and the exits run once."""
    log: list[Any] = []
    hooks = make_hooks(log, *CHANNELS)
    for event in (
        *("on_training_start", "on_training_epoch_start", "on_training_step_start"),
        *("on_training_batch_start", "on_optimizer_step_start"),
    ):
        tell(hooks, event)
    del log[:]
    error = KeyboardInterrupt()
    hooks.on_exception(error)
    names = ["optimizer_step", "batch", "step", "epoch", "loop"]
    assert log == [f"{name}) {error!r}" for name in names]
    assert hooks.context.exception is error
    hooks.on_fit_end()
    hooks.teardown()
    assert len(log) == len(names)


@pytest.mark.shows("R15")
def test_errors_of_exits_after_an_exception_do_not_keep_others_from_running() -> None:
    """R15, R16: the exception is what they all see, and it goes on with their errors."""
    log: list[Any] = []
    errors = [ValueError("a"), ValueError("b")]
    hooks = make_hooks(log, "on_loop")
    hooks.register("on_epoch", Noting(log, "a", leave=errors[0]))
    hooks.register("on_epoch", Noting(log, "b", leave=errors[1]))
    hooks.on_training_start()
    hooks.on_training_epoch_start(1)
    del log[:]
    error = RuntimeError("body")
    try:
        raise error
    except RuntimeError:
        hooks.on_exception(error)
    assert log == [f"{name}) {error!r}" for name in ("a", "b", "loop")]
    assert error.__context__ is errors[0]
    assert errors[0].__context__ is errors[1]
    assert errors[1].__context__ is None


def test_an_exception_before_there_is_a_context_is_none_of_its_business() -> None:
    hooks = PipelineHooks()
    hooks.on_exception(ValueError("in setup"))
    hooks.teardown()


# Scopes


@pytest.mark.shows("R4")
def test_an_outer_end_ends_what_is_open_inside() -> None:
    """R4: inner to outer, without an exception."""
    log: list[Any] = []
    hooks = make_hooks(log, *CHANNELS)
    for event in ("on_training_epoch_start", "on_training_step_start", "on_training_batch_start"):
        tell(hooks, event)
    hooks.on_training_epoch_end(1)
    assert log == ["epoch(", "step(", "batch(", "batch)", "step)", "epoch)"]
    hooks.on_training_batch_end(STATE, False)
    hooks.on_training_step_end(STATE, True)
    assert len(log) == 6


def test_a_scope_that_was_cut_off_ends_before_the_next_of_its_kind() -> None:
    """R4: as where a loop of one's own goes on after an error in a batch."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_step", "on_batch", "on_model_forward")
    hooks.on_training_step_start(STATE)
    hooks.on_training_batch_start(STATE)
    hooks.on_forward_start(None)
    hooks.on_training_batch_start(STATE)
    cut = ["model_forward)", "batch)"]
    assert log == ["step(", "batch(", "model_forward(", *cut, "batch("]


@pytest.mark.shows("R3")
def test_a_batch_lies_in_a_step_also_where_its_window_began_in_another_epoch() -> None:
    """R1: in ITERATION unit a window goes across the end of an epoch."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_epoch", "on_step", "on_batch")
    hooks.on_training_epoch_start(1)
    hooks.on_training_step_start(STATE)
    hooks.on_training_batch_start(STATE)
    hooks.on_training_batch_end(STATE, False)
    hooks.on_training_epoch_end(1)
    assert log == ["epoch(", "step(", "batch(", "batch)", "step)", "epoch)"]
    hooks.on_training_epoch_start(2)
    for _ in range(2):
        hooks.on_training_batch_start(STATE)
        hooks.on_training_batch_end(STATE, False)
    hooks.on_training_step_end(STATE, True)
    assert log[6:] == ["epoch(", "step(", *["batch(", "batch)"] * 2, "step)"]


def test_a_validation_is_a_loop_only_by_itself() -> None:
    """R4: inside of fit it lies in the loop of the training."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_loop", "on_batch")
    hooks.on_training_start()
    for _ in range(2):
        hooks.on_validation_start(0)
        hooks.on_validation_batch_start(0)
        hooks.on_validation_batch_end(0)
        hooks.on_validation_end(0)
    hooks.on_training_end()
    assert log == ["loop(", "batch(", "batch)", "batch(", "batch)", "loop)"]
    del log[:]
    hooks.on_validation_start(0)
    hooks.on_validation_batch_start(0)
    hooks.on_validation_batch_end(0)
    hooks.on_validation_end(0)
    assert log == ["loop(", "batch(", "batch)", "loop)"]


def test_a_validation_batch_may_lie_in_a_training_batch() -> None:
    log: list[Any] = []
    hooks = make_hooks(log, "on_batch")
    hooks.on_training_batch_start(STATE)
    hooks.on_validation_batch_start(0)
    hooks.on_validation_batch_end(0)
    assert log == ["batch(", "batch(", "batch)"]
    hooks.on_training_batch_end(STATE, False)
    assert log[3:] == ["batch)"]


def test_a_trial_validation_lies_in_the_loop_that_follows() -> None:
    """R1, R4: the loop begins once."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_loop", "on_batch")
    hooks.on_sanity_check_start()
    hooks.on_validation_start(0)
    hooks.on_validation_batch_start(0)
    hooks.on_validation_batch_end(0)
    hooks.on_validation_end(0)
    hooks.on_training_start()
    hooks.on_training_end()
    assert log == ["loop(", "batch(", "batch)", "loop)"]


@pytest.mark.shows("R12")
@pytest.mark.parametrize("event", ["on_fit_end", "teardown"])
def test_what_an_interruption_has_left_open_ends_without_exception(event: str) -> None:
    """R12."""
    log: list[Any] = []
    hooks = make_hooks(log, "on_loop", "on_epoch")
    hooks.on_training_start()
    hooks.on_training_epoch_start(1)
    getattr(hooks, event)()
    assert log == ["loop(", "epoch(", "epoch)", "loop)"]


def test_a_set_serves_one_run_after_another() -> None:
    """R4: nothing of a broken run is left, nor that it was resumed."""
    seen: list[bool] = []
    hooks = make_hooks([])
    hooks.register("on_loop", HookContext.from_callable(lambda ctx: seen.append(ctx.resumed)))
    hooks.on_checkpoint_loaded()
    hooks.on_training_start()
    hooks.teardown()
    hooks.on_training_start()
    assert seen == [True, False]


def test_resumed_is_true_for_what_another_process_began() -> None:
    """DESIGN section 7: the loop and the epoch that were resumed, and nothing else."""
    log: list[Any] = []
    hooks = make_hooks(log, is_in_epoch=True)
    for channel in ("on_loop", "on_epoch", "on_step", "on_batch"):
        name = channel.removeprefix("on_")
        hooks.register(
            channel,
            HookContext.from_callable(
                lambda ctx, name=name: log.append((name, ctx.resumed)),
                lambda ctx, name=name: log.append((name, ctx.resumed)),
            ),
        )
    hooks.on_checkpoint_loaded()
    hooks.on_training_start()
    hooks.on_training_resume(STATE)
    assert log == [("loop", True), ("epoch", True)]
    assert hooks.context.resumed is False
    hooks.on_training_batch_start(STATE)
    hooks.on_training_epoch_end(1)
    hooks.on_training_epoch_start(2)
    hooks.on_training_end()
    assert log[2:] == [
        *(("step", False), ("batch", False), ("batch", False), ("step", False)),
        *(("epoch", True), ("epoch", False), ("epoch", False), ("loop", True)),
    ]
    assert hooks.context.resumed is False


def test_resumed_is_false_again_after_a_context_that_failed_to_begin() -> None:
    hooks = make_hooks([])
    hooks.register("on_loop", Noting([], "a", enter=ValueError("x")))
    hooks.on_checkpoint_loaded()
    with pytest.raises(ValueError, match="x"):
        hooks.on_training_start()
    assert hooks.context.resumed is False


def test_a_resume_between_epochs_begins_no_epoch() -> None:
    log: list[Any] = []
    hooks = make_hooks(log, "on_epoch", is_in_epoch=False)
    hooks.on_training_resume(STATE)
    assert log == []


# Registration


@pytest.mark.shows("R17")
def test_one_object_counts_once_and_stays_until_its_last_handle_is_removed() -> None:
    """R17."""
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
    first.remove()
    assert hooks.contexts("on_batch") == [other]


def test_equal_objects_are_two() -> None:
    """R17: the same object, not an equal one."""

    class Equal(Counting):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None

    hooks = PipelineHooks()
    hooks.register("on_batch", Equal())
    handle = hooks.register("on_batch", Equal())
    assert len(hooks.contexts("on_batch")) == 2
    handle.remove()
    assert len(hooks.contexts("on_batch")) == 1


def test_one_object_may_stand_in_several_channels() -> None:
    """R17."""
    hooks, hook = PipelineHooks(), Noting([], "quiet")
    handle = hooks.register("on_batch", hook)
    hooks.register("on_epoch", hook)
    handle.remove()
    assert hooks.contexts("on_batch") == []
    assert hooks.contexts("on_epoch") == [hook]


@pytest.mark.shows("R17")
def test_a_handle_removes_at_the_end_of_a_with_statement() -> None:
    """R17: also after an exception, and only what it stands for."""
    hooks, hook = PipelineHooks(), Noting([], "quiet")
    with hooks.register("on_batch", hook) as handle:
        assert isinstance(handle, HookHandle)
        assert hooks.contexts("on_batch") == [hook]
    assert hooks.contexts("on_batch") == []
    with pytest.raises(ValueError, match="x"), hooks.register("on_batch", hook):
        raise ValueError("x")
    assert hooks.contexts("on_batch") == []


@pytest.mark.shows("R18")
def test_a_channel_that_does_not_exist_is_an_error() -> None:
    """R18: it names those that do."""
    with pytest.raises(ArgumentError, match=r"on_loop, on_epoch.*got 'on_batches'"):
        PipelineHooks().register("on_batches", Noting([], "quiet"))
    with pytest.raises(ArgumentError, match="on_optimizer_step"):
        PipelineHooks().contexts("")


@pytest.mark.shows("R19")
@pytest.mark.parametrize("hook", [None, print, HookContext, PipelineHooks()])
def test_only_contexts_are_registered(hook: Any) -> None:
    """R19."""
    with pytest.raises(ArgumentTypeError, match="must be a HookContext object"):
        PipelineHooks().register("on_batch", hook)


@pytest.mark.shows("R19")
def test_unregister_all_empties_every_channel_for_good() -> None:
    """R19: a handle of before does not take back what was registered afterwards."""
    hooks, hook = PipelineHooks(), Noting([], "quiet")
    handles = [hooks.register(channel, hook) for channel in CHANNELS]
    hooks.unregister_all()
    assert [hooks.contexts(channel) for channel in CHANNELS] == [[]] * len(CHANNELS)
    hooks.register("on_loop", hook)
    for handle in handles:
        handle.remove()
    assert hooks.contexts("on_loop") == [hook]


@pytest.mark.shows("R17")
def test_a_context_that_is_removed_in_its_scope_is_left_all_the_same() -> None:
    """R12, R17."""
    log: list[Any] = []
    hooks = make_hooks(log)
    handle = hooks.register("on_batch", Noting(log, "a"))
    hooks.on_training_batch_start(STATE)
    handle.remove()
    hooks.on_training_batch_end(STATE, False)
    hooks.on_training_batch_start(STATE)
    hooks.on_training_batch_end(STATE, False)
    assert log == ["a(", "a)"]


@pytest.mark.parametrize("how", ["handle", "unregister_all"])
def test_a_context_that_is_removed_before_its_turn_is_not_entered(how: str) -> None:
    """R17."""
    log: list[Any] = []
    hooks = make_hooks(log)
    remove = hooks.unregister_all
    hooks.register(
        "on_batch", HookContext.from_callable(lambda ctx: remove(), lambda ctx: log.append("left"))
    )
    handle = hooks.register("on_batch", Noting(log, "b"))
    if how == "handle":
        remove = handle.remove
    hooks.on_training_batch_start(STATE)
    hooks.on_training_batch_end(STATE, False)
    assert log == ["left"]


def test_a_context_that_comes_into_an_open_scope_is_entered_at_the_next_beginning() -> None:
    """R17: it is not left before it was entered."""
    log: list[Any] = []
    hooks = make_hooks(log)
    late = Noting(log, "late")
    hooks.register(
        "on_batch", HookContext.from_callable(lambda c: hooks.register("on_batch", late))
    )
    hooks.on_training_batch_start(STATE)
    hooks.on_training_batch_end(STATE, False)
    assert log == []
    hooks.on_training_batch_start(STATE)
    assert log == ["late("]


# Sets


@pytest.mark.shows("R20")
def test_a_sum_is_a_new_set_under_the_first_id() -> None:
    """R20."""
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
def test_a_sum_is_a_snapshot() -> None:
    """R20: later changes of either are not seen."""
    first, second = PipelineHooks(), PipelineHooks()
    kept = Noting([], "quiet")
    handle = second.register("on_batch", kept)
    both = first + second
    first += second
    handle.remove()
    first.register("on_epoch", Noting([], "quiet"))
    second.register("on_batch", Noting([], "quiet"))
    second.register("on_loop", Noting([], "quiet"))
    for hooks in (first, both):
        assert hooks.contexts("on_batch") == [kept]
        assert hooks.contexts("on_loop") == []
    assert both.contexts("on_epoch") == []


@pytest.mark.shows("R20")
def test_adding_in_place_keeps_the_object() -> None:
    """R20."""
    hooks = before = PipelineHooks("mine")
    other = PipelineHooks()
    other.register("on_batch", Noting([], "quiet"))
    hooks += other
    assert hooks is before
    assert hooks.plug_id == "mine"
    hooks += hooks
    assert hooks.contexts("on_batch") == other.contexts("on_batch")


@pytest.mark.shows("R20")
def test_one_handle_removes_all_that_was_added() -> None:
    """R20; what was there before stays."""
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


@pytest.mark.shows("R20")
@pytest.mark.parametrize("other", [None, [], HookContext()])
def test_only_sets_are_added(other: Any) -> None:
    """R20."""
    hooks = PipelineHooks()
    for add in (hooks.extend, hooks.__add__, hooks.__iadd__):
        with pytest.raises(ArgumentTypeError, match=r"PipelineHooks\.from_hooks"):
            add(other)


class Ready(PipelineHooks):
    """A ready-made set, with a method of its own (R22)."""

    def __init__(self, name: str = "ready") -> None:
        super().__init__(name)
        self.register("on_batch", HookContext.from_callable(after=self.count))
        self.seen = 0

    def count(self, ctx: Context) -> None:
        self.seen += 1


@pytest.mark.shows("R22")
def test_a_ready_made_set_registers_its_own_methods() -> None:
    """R22: alone, and as a part of another set."""
    ready = Ready()
    for hooks in (ready, PipelineHooks() + ready):
        hooks.context = make_ctx()
        hooks.on_training_batch_start(STATE)
        hooks.on_training_batch_end(STATE, False)
    assert ready.seen == 2


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    own = Registry("plugin")
    monkeypatch.setattr("helios.plugins.plugin.PLUGIN_REGISTRY", own)
    return own


@pytest.mark.shows("R21", "R22")
def test_sets_are_made_of_what_configurations_hold(registry: Registry) -> None:
    """R21."""
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


def test_sets_are_registered_plugins() -> None:
    """R21."""
    made = PipelineHooks.from_hooks({"type": "PipelineHooks", "plug_id": "named"})
    assert type(made) is PLUGIN_REGISTRY.get("PipelineHooks")
    assert made.plug_id == "named"


class Other:
    """Something else."""


@pytest.mark.shows("R21")
@pytest.mark.parametrize(
    "source", [3, "Ready", b"Ready", HookContext(), HookContext, [Other], dict]
)
def test_nothing_else_makes_a_set(source: Any) -> None:
    """R21."""
    with pytest.raises(ArgumentTypeError, match=r"from_hooks\(\.\.\.\) must get"):
        PipelineHooks.from_hooks(source)


@pytest.mark.shows("R21")
def test_a_table_must_name_a_registered_set(registry: Registry) -> None:
    """R21."""
    registry.register(Other)
    with pytest.raises(ArgumentError, match="'type'"):
        PipelineHooks.from_hooks({"name": "x"})
    with pytest.raises(KeyError, match="Missing"):
        PipelineHooks.from_hooks({"type": "Missing"})
    with pytest.raises(ArgumentTypeError, match="Other"):
        PipelineHooks.from_hooks({"type": "Other"})


# State


def test_the_state_is_that_of_the_contexts_by_channel_and_number() -> None:
    hooks = PipelineHooks()
    removed = [hooks.register("on_batch", Counting(7)) for _ in range(2)]
    hooks.register("on_batch", Noting([], "quiet"))
    hooks.register("on_batch", Counting(1))
    hooks.register("on_loop", Counting(2))
    for handle in removed:
        handle.remove()
    hooks.register("on_batch", Counting(3))
    hooks.register("on_batch", Counting(4))
    assert hooks.state_dict() == {
        "on_loop.0": {"count": 2},
        "on_batch.3": {"count": 1},
        "on_batch.4": {"count": 3},
        "on_batch.5": {"count": 4},
    }


def test_the_state_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    def make(count: int) -> PipelineHooks:
        hooks = PipelineHooks()
        hooks.register("on_batch", Noting([], "quiet"))
        hooks.register("on_batch", Counting(count))
        hooks.register("on_epoch", Counting(10 * count))
        return hooks

    saved, fresh = make(3), make(0)
    fresh.load_state_dict(saved.state_dict())
    assert fresh.state_dict() == saved.state_dict()
    assert not caplog.records


def test_a_context_in_several_channels_is_saved_once(caplog: pytest.LogCaptureFixture) -> None:
    hook, hooks = Counting(1), PipelineHooks()
    hooks.register("on_batch", hook)
    hooks.register("on_loop", hook)
    state = hooks.state_dict()
    assert state == {"on_loop.0": {"count": 1}}
    hooks.load_state_dict({"on_loop.0": {"count": 5}})
    assert hook.count == 5
    assert not caplog.records


def test_states_left_over_and_missing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    hooks = PipelineHooks("mine")
    hooks.context = make_ctx()
    hook = Counting(4)
    hooks.register("on_batch", hook)
    hooks.load_state_dict({"on_loop.0": {"count": 5}})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "'mine'" in text
    assert "without a context: on_loop.0" in text
    assert "without a saved state: on_batch.0" in text
    assert hook.count == 4


def test_an_inference_load_does_not_complain(caplog: pytest.LogCaptureFixture) -> None:
    hooks = PipelineHooks()
    hooks.context = Context(Run(phase=Phase.TESTING))
    hooks.load_state_dict({"on_loop.0": {"count": 5}})
    assert not caplog.records


def test_a_context_with_half_a_state_is_an_error() -> None:
    class Half(Noting):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.zeros(1)}

    with pytest.raises(ArgumentError, match=r"Half must override both.*got state_dict only"):
        PipelineHooks().register("on_batch", Half([], "half"))

    class OtherHalf(Noting):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Nothing."""

    with pytest.raises(ArgumentError, match="got load_state_dict only"):
        PipelineHooks().register("on_batch", OtherHalf([], "half"))


# What would never run


def test_a_context_that_would_do_nothing_is_refused() -> None:
    """DESIGN R5: most often its methods are misspelt."""

    class Misspelt(HookContext):
        def on_begin(self, ctx: Context) -> None: ...

    with pytest.raises(
        ArgumentError, match=r"Misspelt must override on_enter\(self, ctx\), on_exit"
    ):
        PipelineHooks().register("on_batch", Misspelt())


async def act_async(*args: Any) -> None: ...


def act_by_generator(*args: Any) -> Any:
    yield


def act_without(self: Any) -> None: ...


def act_with_two(self: Any, ctx: Any, more: Any) -> None: ...


@pytest.mark.parametrize("name", ["on_enter", "on_exit"])
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (act_async, "must be a plain method, but is async"),
        (act_by_generator, "must be a plain method, but is a generator"),
        (act_without, r"must take one argument, the context object, but takes \(\)"),
        (act_with_two, "must take one argument, the context object, but takes .*more"),
    ],
)
def test_a_part_that_would_not_run_is_refused(name: str, method: Any, words: str) -> None:
    hook = type("Wrong", (HookContext,), {name: method})()
    with pytest.raises(ArgumentTypeError, match=rf"Wrong\.{name} {words}"):
        PipelineHooks().register("on_batch", hook)


@pytest.mark.parametrize("function", [act_async, act_by_generator, lambda: None])
def test_a_function_that_would_not_run_makes_no_context(function: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"from_callable\(after=\.\.\.\) must"):
        HookContext.from_callable(after=function)


def test_a_set_that_hears_an_event_itself_keeps_its_channels() -> None:
    """R22: an override without super() would switch a channel off."""
    with pytest.raises(
        UsageError, match=r"Deaf\.on_training_batch_start must call super\(\)\.on_training_batch"
    ):

        class Deaf(PipelineHooks):
            def on_training_batch_start(self, state: TrainingState) -> None: ...

    class Hearing(PipelineHooks):
        def on_training_batch_start(self, state: TrainingState) -> None:
            super().on_training_batch_start(state)

        def on_log(self, scalars: dict[str, float], state: TrainingState) -> None: ...

    class Heir(Hearing):
        def on_training_batch_start(self, state: TrainingState) -> None:
            Hearing.on_training_batch_start(self, state)

    log: list[Any] = []
    hooks = Heir("hearing")
    hooks.context = Context(Run())
    hooks.register("on_batch", Noting(log, "batch"))
    tell(hooks, "on_training_batch_start")
    assert log == ["batch("]
