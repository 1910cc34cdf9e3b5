"""Statements of the reference texts, shown through whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.core import rng
from helios.engines.engine import Engine
from helios.errors import ArgumentError, StateError
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS
from helios.loops.epoch import EpochLoop
from helios.loops.optimizer import OptimizerLoop
from helios.plugins import HookContext, PipelineHooks, Plugin
from helios.state import Phase, TrainingState
from tests.data.datasets import draw
from tests.support.event_logs import Linear, Numbers, ScoringLinear
from tests.support.quiet import Quiet


def make_trainer(**options: Any) -> helios.Trainer:
    """Return a trainer by steps on the CPU."""
    given = {"train_unit": "iteration", "total_steps": 4, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **options})


@pytest.mark.shows("H1", "H5", "K8")
def test_generators_are_seeded_before_anything_is_set_up() -> None:

    def drawn_in_setup(noise: int, call: str, **options: Any) -> dict[str, list[float]]:
        drawn: dict[str, list[float]] = {}

        def drawing(kind: type, letter: str, *given: Any) -> Any:
            def setup(self: Any, *args: Any, **named: Any) -> None:
                drawn[letter] = draw()
                kind.setup(self, *args, **named)

            return type(kind.__name__, (kind,), {"setup": setup})(*given)

        rng.seed_rngs(noise)
        trainer = make_trainer(plugins=[drawing(Quiet, "P")], **options)
        chosen = {} if call == "fit" else {"checkpoint": None}
        getattr(trainer, call)(drawing(Linear, "M"), drawing(Numbers, "D", 3, 1), **chosen)
        return drawn

    expected = torch.rand((), generator=torch.Generator().manual_seed(6691)).item()
    for call in ("fit", "test"):
        first = drawn_in_setup(1, call)
        assert list(first) == ["P", "D", "M"]
        assert first == drawn_in_setup(2, call)
        assert first["P"][0] == expected
        other = drawn_in_setup(1, call, random_seed=7)
        assert all(first[letter] != other[letter] for letter in "PDM")


class Failing(Numbers):
    """Notes its calls, and raises in one of them."""

    def __init__(self, calls: list[str], place: str) -> None:
        super().__init__(3, 1)
        self.calls, self.place = calls, place

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.place:
            raise OSError(f"no disk in {name}")

    def prepare_data(self) -> None:
        self.note("prepare_data")

    def setup(self) -> None:
        self.note("setup")
        super().setup()

    def teardown(self) -> None:
        self.note("teardown")


@pytest.mark.shows("H17", "K7")
@pytest.mark.parametrize("call", ["fit", "test"])
@pytest.mark.parametrize("place", ["prepare_data", "setup", "step"])
def test_data_is_prepared_once_and_torn_down_also_after_an_error(call: str, place: str) -> None:
    calls: list[str] = []

    class Model(Linear):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            raise OSError("no disk in step")

        test_step = train_step

    chosen = {} if call == "fit" else {"checkpoint": None}
    with pytest.raises(OSError, match=f"no disk in {place}"):
        getattr(make_trainer(), call)(Model(), Failing(calls, place), **chosen)
    expected = ["prepare_data", "setup", "teardown"]
    assert calls == (["prepare_data", "teardown"] if place == "prepare_data" else expected)


@pytest.mark.shows("H40")
def test_steps_validations_saves_and_logs_happen_on_boundaries_only(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"step": [], "validation": [], "save": [], "log": []}

    class Watcher(Quiet):
        now = 0

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            self.now = state.global_iteration
            if should_log:
                seen["log"].append(self.now)

        def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
            assert state.is_step_boundary
            seen["step"].append(self.now)

        def on_validation_start(self, validation_cycle: int) -> None:
            seen["validation"].append(self.now)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen["save"].append(self.now)

    frequencies = dict.fromkeys(("valid_frequency", "chkpt_frequency", "print_frequency"), 1)
    trainer = make_trainer(
        total_steps=3,
        accumulation_steps=2,
        chkpt_root=tmp_path,
        plugins=[Watcher()],
        **frequencies,
    )
    trainer.fit(Linear(), Numbers(4, 1))
    assert seen == {name: [2, 4, 6] for name in seen}


class Counting(Linear):
    """Notes the counters and the call to log at the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[int, ...]] = []
        self.logs: list[int] = []
        self.unsaved = ("states", "logs")

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        counters = state.dict()
        assert counters.pop("average_iter_time") >= 0.0
        assert isinstance(counters.pop("is_step_boundary"), bool)
        self.states.append(tuple(counters.values()))
        if should_log:
            self.logs.append(state.global_iteration)

    def have_metrics_improved(self) -> bool:
        return False


@pytest.mark.shows("H30", "H41", "L39", "R42")
def test_every_counter_says_what_its_name_says() -> None:
    """Three batches an epoch, a validation after every second one, no improvement."""
    model = Counting()
    make_trainer(total_steps=6, valid_frequency=2).fit(model, Numbers(3, 1))
    # current, global, epoch, validation cycles, batch of the epoch, early stop, since validation,
    # whether the step is committed, steps before
    assert model.states == [
        (1, 1, 1, 0, 0, 0, 1, True, 0),
        (2, 2, 1, 0, 1, 0, 2, True, 1),
        (3, 3, 1, 1, 2, 1, 1, True, 2),
        (4, 4, 2, 1, 0, 1, 2, True, 3),
        (5, 5, 2, 2, 1, 2, 1, True, 4),
        (6, 6, 2, 2, 2, 2, 2, True, 5),
    ]


@pytest.mark.shows("H53")
@pytest.mark.parametrize(
    ("unit", "total", "accumulation", "logs"),
    [("iteration", 7, 1, [2, 4, 6]), ("iteration", 5, 2, [4, 8]), ("epoch", 2, 2, [2, 4, 6])],
)
def test_logging_is_asked_for_on_multiples_that_just_moved(
    unit: str, total: int, accumulation: int, logs: list[int]
) -> None:
    model = Counting()
    trainer = make_trainer(
        train_unit=unit, total_steps=total, accumulation_steps=accumulation, print_frequency=2
    )
    trainer.fit(model, Numbers(3))
    assert model.logs == logs


@pytest.mark.shows("H50", "H54", "R40", "C4", "C18")
@pytest.mark.parametrize("is_failing", [False, True])
def test_a_validation_runs_without_benchmarking_and_without_gradients(is_failing: bool) -> None:
    seen: list[tuple[str, bool, bool, bool]] = []

    def note(place: str) -> None:
        settings = torch.backends.cudnn.benchmark, torch.is_grad_enabled()
        seen.append((place, *settings, torch.is_inference_mode_enabled()))

    class Model(Linear):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            note("train")
            return super().train_step(batch, state)

        def valid_step(self, batch: Any, step: int) -> None:
            note("valid")
            if is_failing:
                raise OSError("no disk")

    trainer = make_trainer(total_steps=2, valid_frequency=1, enable_cudnn_benchmark=True)
    found = torch.backends.cudnn.benchmark
    if is_failing:
        with pytest.raises(OSError, match="no disk"):
            trainer.fit(Model(), Numbers(2, 1))
    else:
        trainer.fit(Model(), Numbers(2, 1))
    assert torch.backends.cudnn.benchmark == found
    pair = [("train", True, True, False), ("valid", False, False, False)]
    assert seen == (pair if is_failing else pair * 2)


class Keeping(Quiet):
    def __init__(self, plug_id: str, value: int = 0) -> None:
        super().__init__(plug_id)
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.shows("H18", "H59")
def test_plugins_are_reached_and_saved_by_their_ids(tmp_path: Path) -> None:

    def fit(total_steps: int, *plugins: Plugin) -> helios.Trainer:
        trainer = make_trainer(
            total_steps=total_steps, chkpt_root=tmp_path, chkpt_frequency=1, plugins=plugins[:1]
        )
        for plugin in plugins[1:2]:
            plugin.configure_trainer(trainer)
        for plugin in plugins[2:]:
            trainer.plugins[plugin.plug_id] = plugin
        trainer.fit(Linear(), Numbers())
        return trainer

    trainer = fit(1, Keeping("model", 1), Keeping("rng", 2), Keeping("version", 3))
    assert list(trainer.plugins) == ["model", "rng", "version"]
    path = helios.find_last_checkpoint(tmp_path / "linear")
    assert path is not None
    saved = helios.load_checkpoint(path)
    assert saved["plugins"] == {"model": {"value": 1}, "rng": {"value": 2}, "version": {"value": 3}}
    restored = [Keeping("model"), Keeping("rng"), Keeping("version")]
    fit(2, *restored)
    assert [plugin.value for plugin in restored] == [1, 2, 3]


@pytest.mark.shows("H61", "K17", "R37")
def test_a_model_may_move_its_batches_in_every_phase() -> None:
    phases: list[Phase] = []

    class Model(ScoringLinear):
        def batch_to_device(self, batch: Any, phase: Phase) -> Any:
            phases.append(phase)
            return super().batch_to_device(batch, phase)

    trainer, model = make_trainer(total_steps=1, valid_frequency=1), Model()
    trainer.fit(model, Numbers(1, 1))
    trainer.test(model, Numbers(1, 2))
    assert phases == [Phase.TRAINING, Phase.VALIDATION, Phase.TESTING, Phase.TESTING]


@pytest.mark.shows("L8", "L14")
def test_loops_are_replaced_by_their_path_and_resume(tmp_path: Path) -> None:
    steps: list[int] = []

    class Announcing(OptimizerLoop):
        def advance(self, batch: Any) -> None:
            super().advance(batch)
            steps.append(self.session.state.global_iteration)

    def fit(total: int, *, replaces: bool) -> Linear:
        trainer = make_trainer(total_steps=total, chkpt_root=tmp_path, chkpt_frequency=1)
        if replaces:
            trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=Announcing())
        model = Linear()
        trainer.fit(model, Numbers())
        return model

    fit(2, replaces=False)
    weights = fit(5, replaces=True).net.state_dict()
    assert steps == [3, 4, 5]
    model = Linear()
    make_trainer(total_steps=5).fit(model, Numbers())
    assert all(weights[name].equal(weight) for name, weight in model.net.state_dict().items())


class CountingEpochs(EpochLoop):
    count = 0

    def advance(self) -> None:
        super().advance()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.shows("L35", "L36")
def test_the_state_of_a_loop_that_is_gone_is_carried_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def fit(total_steps: int, loop: EpochLoop | None) -> str:
        trainer = make_trainer(total_steps=total_steps, chkpt_root=tmp_path, chkpt_frequency=1)
        if loop is not None:
            trainer.fit_loop.connect(epoch_loop=loop)
        trainer.fit(Linear(), Numbers())
        return capsys.readouterr().err

    fit(2, CountingEpochs())
    assert "loop that is not connected: fit.epoch." in fit(3, None)
    returned = CountingEpochs()
    assert "not connected" not in fit(5, returned)
    # Two batches of the first run, two of the third; the second one did not count.
    assert returned.count == 4


@pytest.mark.shows("H6")
def test_a_test_restores_no_generators(tmp_path: Path) -> None:

    class Model(Linear):
        def on_testing_start(self) -> None:
            super().on_testing_start()
            self.drawn = [draw()]

        def test_step(self, batch: Any, step: int) -> None:
            self.drawn.append(draw())

        def on_testing_end(self) -> None:
            self.drawn.append(draw())

    def drawn_in_test(**chosen: Any) -> list[list[float]]:
        model = Model()
        make_trainer(chkpt_root=tmp_path).test(model, Numbers(3, 2), **chosen)
        return model.drawn

    make_trainer(chkpt_root=tmp_path, chkpt_frequency=1).fit(Linear(), Numbers())
    assert drawn_in_test() == drawn_in_test(checkpoint=None)


_STATE_METHODS = ("state_dict", "load_state_dict")


def _telling(kind: type, letter: str, tell: Callable[[str], None], *names: str) -> Any:
    """Return a class that tells when some of its methods are called, and does as usual."""

    def override(name: str) -> Callable[..., Any]:
        usual = getattr(kind, name, None)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            tell(f"{letter} {name}")
            return None if usual is None else usual(self, *args, **named)

        return method

    return type(kind.__name__, (kind,), {name: override(name) for name in names})


class Kept(Quiet):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"kept": 1}


@pytest.mark.parametrize(("number", "text"), [(2.0, "would be refused"), (-2, "must name its")])
def test_counters_that_a_hook_spoils_are_not_saved(
    tmp_path: Path, number: float, text: str
) -> None:
    class Spoiling(Quiet):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["training_state"]["global_iteration"] = number

    trainer = make_trainer(chkpt_root=tmp_path, chkpt_frequency=2, plugins=[Spoiling()])
    with pytest.raises(StateError, match=text):
        trainer.fit(Linear(), Numbers(4, 1))
    assert not [*tmp_path.rglob("*.pth")]


class KeepingEpochs(EpochLoop):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"kept": 2}


def _fit_telling(folder: Path, total_steps: int) -> list[str]:
    """Train with a checkpoint at the end; returns who saved, loaded and heard of it, in order."""
    told: list[str] = []
    events = ("on_load_checkpoint", "on_checkpoint_loaded", "on_save_checkpoint", "on_fit_start")
    tell, heard = told.append, events[:3]
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=total_steps,
        chkpt_root=folder,
        chkpt_frequency=total_steps,
        engine=_telling(Engine, "E", tell, *_STATE_METHODS, *heard)(torch.device("cpu")),
        plugins=[_telling(Kept, "P", tell, *_STATE_METHODS, *events)("plugin")],
        print_banner=False,
    )
    loop = _telling(KeepingEpochs, "L", tell, *_STATE_METHODS)()
    trainer.fit_loop.connect(epoch_loop=loop)
    model = _telling(Linear, "M", tell, *_STATE_METHODS, *events)()
    trainer.fit(model, _telling(Numbers, "D", tell, *heard)())
    return told


@pytest.mark.shows("K10", "K13", "K35")
def test_states_are_loaded_between_two_events_and_taken_before_one(tmp_path: Path) -> None:
    saving = [
        *("M state_dict", "P state_dict", "L state_dict", "E state_dict"),
        *(f"{letter} on_save_checkpoint" for letter in "PDME"),
    ]
    starting = ["P on_fit_start", "M on_fit_start"]
    assert _fit_telling(tmp_path, 2) == [*starting, *saving]
    assert _fit_telling(tmp_path, 4) == [
        *(f"{letter} on_load_checkpoint" for letter in "PDME"),
        *("E load_state_dict", "M load_state_dict", "P load_state_dict", "L load_state_dict"),
        *(f"{letter} on_checkpoint_loaded" for letter in "PDME"),
        *starting,
        *saving,
    ]


@pytest.mark.shows("R24")
def test_all_hooks_of_a_run_get_one_live_object() -> None:
    seen: dict[str, list[Context]] = {}
    hooks = PipelineHooks()
    for channel in CHANNELS:
        note = seen.setdefault(channel, []).append
        hooks.register(channel, HookContext.from_callable(before=note, after=note))

    class Reading(Quiet):
        def on_forward_end(self, context: Context) -> None:
            seen.setdefault("plugin", []).extend([context, self.context])

    make_trainer(total_steps=2, valid_frequency=1, plugins=[hooks, Reading("reading")]).fit(
        Linear(), Numbers(2, 1)
    )
    assert {name for name, found in seen.items() if found} == {*CHANNELS, "plugin"}
    assert len({id(context) for found in seen.values() for context in found}) == 1


class Doubling(Quiet):
    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch * 2


@pytest.mark.shows("H60")
def test_one_plugin_may_own_a_batch_and_a_second_one_is_an_error() -> None:
    """H60: checked when it registers, by whatever way."""
    seen: list[float] = []

    class Model(Linear):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            seen.append(batch.item())
            return super().train_step(batch, state)

    trainer = make_trainer(total_steps=2, plugins=[Doubling("one")])
    trainer.fit(Model(), Numbers())
    assert seen == [2.0, 2.0]
    with pytest.raises(ArgumentError, match=r"process_training_batch must have one owner"):
        trainer.plugins["two"] = Doubling("two")
