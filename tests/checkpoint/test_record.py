"""A record: every key once, capture and apply as each other's inverse, and its projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from helios.best import BestRule, BestSoFar, Validation
from helios.checkpoint import file_names
from helios.checkpoint.capture import (
    Trained,
    apply,
    apply_trained,
    capture,
    capture_trained,
    detach,
)
from helios.checkpoint.record import KEYS, REQUIRED, Record
from helios.checkpoint.reproducibility import Level
from helios.checkpoint.sidecar import Sidecar
from helios.core.loss_means import LossMeans, Viewer
from helios.errors import StateError
from helios.findings import Finding, FindingKind, Findings
from helios.state import Cursor, TrainingState
from helios.state_graph import owner_states
from helios.state_graph.discovery import Discovery
from helios.version import __version__

LEAST: dict[str, Any] = {
    "training_state": TrainingState(global_epoch=2, global_iteration=7).dict(),
    "cursor": Cursor(epoch=1, batch=3).dict(),
    "model": {},
    "rng": {},
    "num_replicas": 1,
}


def named(owner: Any, kind: FindingKind) -> list[str]:
    """Return the names of the findings of a run or a record."""
    names: list[str] = owner.findings.names(kind)
    return names


class Part:
    """Anything that gives a state and takes one."""

    def __init__(self, state: dict[str, Any], **attributes: Any) -> None:
        self.state = state
        self.loaded: Any = None
        self.__dict__.update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.loaded = (state_dict, fast_init)

    def capture(self) -> Any:
        return self.state

    def restore(self, states: Mapping[str, Any]) -> None:
        self.loaded = states


class Owners(Part):
    """Those of a plugin; of what others gave by themselves, it keeps the names."""

    def capture(self, own: Any = None) -> Any:
        self.seen = sorted(own)
        return self.state, {"plugin 'p': handle": "a file"}

    def prepare(self, states: Mapping[str, Any]) -> None:
        self.loaded = "prepared"

    def restore(self, states: Mapping[str, Any], *, is_inference: bool = False) -> None:
        assert is_inference or self.loaded == "prepared"
        self.loaded = (states, is_inference)

    def has_own_state(self, name: str) -> bool:
        return False

    def marks(self, states: Mapping[str, Any]) -> dict[str, bytes]:
        return {name: repr(state).encode() for name, state in states.items()}


@dataclasses.dataclass
class Team:
    """What a process sees of another one: it knows what that would say."""

    other: Callable[[Any], Any] | None = None
    num_replicas: int = 1
    num_processes: int = 1
    rank: int = 0
    local_replicas: tuple[int, ...] = (0,)

    @property
    def has_single_process(self) -> bool:
        return self.num_processes == 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self.other is None else [value, self.other(value)]

    def join_shards(self, tree: Any) -> Any:
        return tree


class Run:
    """Has one of each part."""

    def __init__(self, team: Team | None = None) -> None:
        self.state, self.cursor = TrainingState(global_iteration=5), Cursor(epoch=1, batch=2)
        self.best = BestSoFar(BestRule("loss", "min"), [Validation(4, {"loss": 0.5})])
        self.is_manual: bool | None = False
        self.is_resumed, self.is_discovered = False, True
        self.findings = Findings(
            [
                Finding(FindingKind.OBSTACLE, text="an obstacle"),
                Finding(FindingKind.UNSHARED, "meter"),
                Finding(FindingKind.MISSING, "data: Own", "a trial"),
                Finding(FindingKind.CLAIM, text="claimed by Own"),
            ]
        )
        self.saved_randomness: Any = None
        model = {"objects": {}, "values": {}, "missing": {"net.hook": "a function"}}
        self.model = Part(
            model,
            tables={"_loss_items": {"loss": torch.ones(1, requires_grad=True)}},
            discovery=Discovery(self),
        )
        self.plugin_states, self.loop_states = Part({"p": {"n": 1}}), Part({"fit": {"n": 2}})
        self.owner_states = Owners({"plugin 'p'": {"best": 3}})
        self.engine = Part({"open_micro_batches": 1})
        self.training_source = Part(
            {"position": 4},
            description={"length": 8},
            state_is_per_process=False,
            state_is_per_replica=False,
            length=8,
            pass_length=7,
        )
        self.replicas = team or Team()
        self.loss_means = LossMeans(lambda *_: None)


@pytest.mark.shows("S48")
def test_what_was_captured_is_applied() -> None:
    run, fresh = Run(), Run()
    run.loss_means.serve([Viewer.FILES])
    run.loss_means.add({"loss": 0.5}, 5)
    record = capture(run)
    fresh.loss_means.serve([Viewer.FILES])
    fresh.findings = Findings()
    fresh.model.tables = {"_loss_items": {"old": 1}}
    payload = record.to_payload()
    assert tuple(payload) == tuple(key for key in KEYS if key in payload)
    assert KEYS[:3] == ("schema", "version", "training_state")
    apply(Record.from_payload(payload), fresh, state=run.state, cursor=run.cursor)
    assert (fresh.state, fresh.cursor, fresh.is_resumed) == (run.state, run.cursor, True)
    own = {FindingKind.OBSTACLE, FindingKind.UNSHARED}
    assert [*fresh.findings] == [each for each in run.findings if each.kind in own]
    assert fresh.is_manual is False
    assert fresh.model.loaded == (run.model.state, False)
    assert fresh.engine.loaded == ({"open_micro_batches": 1}, False)
    assert fresh.training_source.loaded == ({"position": 4}, False)
    assert fresh.plugin_states.loaded == {"p": {"n": 1}}
    assert fresh.loop_states.loaded == {"fit": {"n": 2}}
    assert fresh.owner_states.loaded == ({"plugin 'p'": {"best": 3}}, False)
    assert run.owner_states.seen == ["engine", "loop 'fit'", "model", "plugin 'p'"]
    assert record.data["length"] == 7
    assert list(fresh.model.tables["_loss_items"]) == ["loss"]
    assert not fresh.model.tables["_loss_items"]["loss"].requires_grad
    assert fresh.saved_randomness is record.rng
    fresh.loss_means.add({"loss": 1.0}, 6)
    assert fresh.loss_means.pop_means(Viewer.FILES) == {"loss": 0.75}


def test_what_fits_no_resume_on_one_process_is_an_error_on_all() -> None:
    said: Any = ({}, {"net": "a layer more"}, [])
    with pytest.raises(StateError, match=r"net \(a layer more\)"):
        capture(Run(Team(lambda _: said, num_replicas=2)))


@pytest.mark.shows("S44")
def test_what_is_missing_is_joined_over_owners_and_processes() -> None:
    said = ({"data: Own": "of rank 1", "net.late": "late"}, {}, ["claimed by Other"])
    record = capture(Run(Team(lambda _: said, num_replicas=2)))
    assert record.findings.missing == {
        "data: Own": "of rank 1",
        "net.hook": "a function",
        "plugin 'p': handle": "a file",
        "net.late": "late",
    }
    assert named(record, FindingKind.CLAIM) == ["claimed by Own", "claimed by Other"]


def test_a_model_with_a_state_of_its_own_may_have_a_key_of_that_name() -> None:
    run = Run()
    run.is_discovered = False
    assert "net.hook" not in capture(run).findings.missing


@pytest.mark.shows("S58")
def test_what_an_owner_holds_on_one_process_goes_back_to_that_process() -> None:
    def other(value: Any) -> Any:
        if isinstance(value, dict) and "owners" in value:
            return value | {"owners": {"plugin 'p'": {"best": 9}}}
        return {"plugin 'p'": b"of rank 1"} if isinstance(value, dict) else value

    record = capture(Run(Team(other, num_replicas=2, num_processes=2)))
    assert record.owners == {"plugin 'p'": {"best": 3}}
    text = "the state of plugin 'p' differs between processes"
    assert named(record, FindingKind.OBSTACLE)[1:] == [text]
    for rank, best in enumerate((3, 9)):
        fresh = Run(Team(num_replicas=2, num_processes=2, rank=rank))
        apply(record, fresh, state=fresh.state, cursor=fresh.cursor)
        assert fresh.owner_states.loaded == ({"plugin 'p'": {"best": best}}, False)


def test_nobody_lacks_anything_by_default() -> None:
    run = Run()
    run.findings, run.training_source.missing = Findings(), {}
    run.owner_states = owner_states.Owners()
    run.model.state = {"objects": {}, "values": {}}
    record = capture(run)
    assert (record.findings.missing, record.owners) == ({}, {})


@pytest.mark.shows("S48")
def test_what_was_trained_is_given_to_inference() -> None:
    run, fresh = Run(), Run()
    trained = capture_trained(run)
    assert trained == Trained.of(capture(run))
    apply_trained(trained, fresh, is_inference=True)
    assert fresh.owner_states.loaded == ({"plugin 'p'": {"best": 3}}, True)
    assert fresh.model.loaded == (run.model.state, True)
    assert fresh.model.tables == trained.tables
    assert fresh.plugin_states.loaded == {"p": {"n": 1}}
    assert (fresh.loop_states.loaded, fresh.engine.loaded[0]) == (trained.loops, trained.engine)


@pytest.mark.shows("S48")
def test_a_file_that_says_little_gets_defaults() -> None:
    record = Record.from_payload(LEAST)
    assert record.place == (2, 7)
    assert (record.schema, record.version) == (file_names.SCHEMA, __version__)
    assert not [*record.findings, *record.owners]
    assert record.migrated_from is None
    assert set(REQUIRED) == LEAST.keys()


def test_keys_that_say_nothing_are_not_written() -> None:
    absent = {"log_path", "run_path", "events", "ledger", "migrated_from"}
    absent |= {"best_validations", "loss_means"}
    assert set(KEYS) - Record.from_payload(LEAST).to_payload().keys() == absent
    says = {"log_path": "a", "run_path": "b", "events": None, "ledger": {}, "migrated_from": ""}
    says |= {"best_validations": {}}
    says |= {"loss_means": {}}
    assert set(KEYS) == Record.from_payload(LEAST | says).to_payload().keys()


def test_what_hooks_add_is_kept_and_shown_to_them_again() -> None:
    snapshot = Record(**LEAST).snapshot()
    assert "options" not in snapshot
    snapshot["mine"] = 3
    record = Record.from_payload(snapshot)
    assert record.extra == {"mine": 3}
    assert record.to_payload()["mine"] == record.snapshot()["mine"] == 3


@pytest.mark.shows("S48")
@pytest.mark.parametrize("key", LEAST)
def test_a_key_that_a_hook_removes_is_named(key: str) -> None:
    rest = {name: value for name, value in LEAST.items() if name != key}
    with pytest.raises(StateError, match=f"lacks '{key}'. Do not remove keys in on_save_checkp"):
        Record.from_payload(rest)


@pytest.mark.shows("S48")
def test_a_sidecar_is_a_projection_of_the_record() -> None:
    record = dataclasses.replace(
        Record(**LEAST),
        findings=Findings(
            [
                Finding(FindingKind.MISSING, "net.seen", "a file"),
                Finding(FindingKind.CLAIM, text="claimed by Own"),
            ]
        ),
        options={"total_steps": 3},
        resumed_from="/there",
    )
    sidecar = Sidecar.of(
        record,
        run_name="run",
        level=Level.INCOMPLETE,
        metrics={"loss": 0.5},
        averages=["ema"],
        changes=["a change"],
        is_by_epoch=True,
    )
    assert (sidecar.epoch, sidecar.iteration, sidecar.num_replicas) == (2, 7, 1)
    assert (sidecar.level, sidecar.missing) == ("incomplete", {"net.seen": "a file"})
    assert (sidecar.claims, sidecar.options) == (["claimed by Own"], {"total_steps": 3})
    assert (sidecar.resumed_from, sidecar.changes) == ("/there", ["a change"])
    assert sidecar.count is None, "in mid-epoch"
    assert Sidecar.from_json(sidecar.to_json(), name="it") == sidecar


@pytest.mark.parametrize("keeps_model", [True, False])
def test_a_detached_record_shares_memory_with_itself_only(keeps_model: bool) -> None:
    tensor = torch.zeros(3)
    record = Record(**{**LEAST, "model": {"a": tensor}}, plugins={"p": tensor}, extra={"m": tensor})
    copied = detach(record, keeps_model=keeps_model, is_shown=True)
    tensor.fill_(1)
    assert copied.plugins["p"].sum() == copied.extra["m"].sum() == 0
    assert copied.plugins["p"] is copied.extra["m"]
    assert copied.model["a"].sum() == (0 if keeps_model else 3)
