"""Sending: each point once, whatever fails in between, to MLflow and into offline runs of W&B."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios import cli
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.tracking.mlflow_run import clean
from helios.tracking.point_store import PointStore, as_pixels, store_picture
from helios.tracking.sender_process import Sender, SupersededError, connect, summarize
from helios.tracking.targets import MLflow, Target, WandB, from_plain, to_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from tests.support import tracked
from tests.support.synthetic_run import write_run

pytestmark = pytest.mark.usefixtures("stand_in_libraries")
_NAMES = ("loss", "valid/score", "odd (%)")


def _store(tmp_path: Path, target: Target, *, rows: int = 6, **facts: Any) -> TrackerFolder:
    """Store some rows, and a picture in the second one."""
    folder = TrackerFolder(tmp_path / "tracker")
    run = TrackedRun("", "small", to_plain(target), {"lr": 0.1}, created=1000, **facts)
    store = PointStore(folder, run, forks=True)
    store.open(None)
    for number in range(1, rows + 1):
        store.add(_row(number))
    place = {"time": 5, "epoch": 1, "iteration": rows}
    file = store_picture(folder.pictures, np.full((2, 3, 1), 7, np.uint8))
    store.add({**place, "picture": "a picture", "file": file})
    store.close("finished")
    return folder


def _row(number: int) -> dict[str, Any]:
    values = {"loss": 1 / number, "odd (%)": "NaN" if number == 3 else -number}
    if number % 2:
        values["valid/score"] = 5e-324 * number
    return {"time": 10**12 + number, "epoch": 1, "iteration": number, "values": values}


def _sender(folder: TrackerFolder) -> Sender:
    run = folder.read_run()
    return Sender(folder, run, connect(folder, run))


def _read(uri: str, run: Any) -> tracked.Curves:
    found = tracked.read_mlflow(uri, run.info.run_id, [clean(name) for name in _NAMES])
    return {name: found[clean(name)] for name in _NAMES}


@pytest.mark.shows("P68")
def test_everything_that_is_stored_is_read_back_with_its_bits_and_times(
    tmp_path: Path, uri: str
) -> None:
    folder = _store(tmp_path, MLflow(uri, run_name="mine"))
    sender = _sender(folder)
    sender.flush()
    sender.finish("finished")
    (run,) = tracked.find_runs(uri)
    assert _read(uri, run) == tracked.stored_curves(folder.path)
    assert (run.info.run_name, run.info.start_time) == ("mine", 1000)
    assert run.data.params == {"lr": "0.1"}
    (run,) = tracked.find_runs(uri)
    assert run.info.status == "FINISHED"
    files = tmp_path / "server.files" / run.info.run_id
    (picture,) = files.glob("pictures/a picture/00000006/*.png")
    assert picture.read_bytes() == next(folder.pictures.iterdir()).read_bytes()
    summary = json.loads((files / "summary.json").read_text())
    assert summary["numbers"]["loss"] == {"count": 6, "last": 1 / 6, "min": 1 / 6, "max": 1.0}


@pytest.mark.shows("P63")
def test_points_that_are_sent_again_are_stored_once(tmp_path: Path, uri: str) -> None:
    folder = _store(tmp_path, MLflow(uri))
    _sender(folder).flush()
    for content in ("", "{}", '{"key": "another", "sent": {"numbers": 9}}', None):
        path = folder.path / "sent.json"
        path.unlink() if content is None else path.write_text(content)
        sender = _sender(folder)
        sender.flush()
        assert sender.num_sent == 7
    (run,) = tracked.find_runs(uri)
    assert _read(uri, run) == tracked.stored_curves(folder.path)


@pytest.mark.shows("P64")
def test_what_is_acknowledged_is_not_sent_again(tmp_path: Path, uri: str) -> None:
    folder = _store(tmp_path, MLflow(uri))
    _sender(folder).flush()
    sender = _sender(folder)
    sender.flush()
    assert sender.num_sent == 0


@pytest.mark.shows("P64")
def test_a_server_that_fails_in_between_gets_the_rest_later(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helios.tracking.tracker_folder._READ_AT_ONCE", 100)
    folder = _store(tmp_path, MLflow(uri))
    down = tmp_path / "server.db.down"
    down.touch()
    sender = _sender(folder)
    with pytest.raises(ConnectionError):
        sender.flush()
    down.unlink()
    send, calls = sender._destination._send_numbers, []

    def fail(rows: Any) -> int:
        calls.append(rows)
        if len(calls) == 3:
            raise ConnectionError
        number = int(send(rows))
        if len(calls) == 5:
            # Sent, but the answer is lost.
            raise ConnectionError
        return number

    sender._destination._send_numbers = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.flush()
    assert 0 < folder.read_progress(folder.read_run().key).sent["numbers"] < folder.size
    sender.flush()
    (run,) = tracked.find_runs(uri)
    assert _read(uri, run) == tracked.stored_curves(folder.path)


def test_a_row_that_is_not_complete_waits(tmp_path: Path, uri: str) -> None:
    folder = _store(tmp_path, MLflow(uri))
    text = folder.points.read_bytes()
    folder.points.write_bytes(text[:-3])
    sender = _sender(folder)
    sender.flush()
    assert folder.read_progress(folder.read_run().key).sent["numbers"] < len(text) - 3
    folder.points.write_bytes(text)
    sender.flush()
    (run,) = tracked.find_runs(uri)
    assert _read(uri, run) == tracked.stored_curves(folder.path)


@pytest.mark.shows("P66")
def test_a_sender_of_an_earlier_course_sends_nothing_of_the_new_one(
    tmp_path: Path, uri: str
) -> None:
    folder = _store(tmp_path, MLflow(uri))
    sender = _sender(folder)
    store = PointStore(folder, folder.read_run(), forks=True)
    store.open(None)
    assert store.add(_row(1) | {"values": {"loss": 77.0}})
    store.close("finished")
    with pytest.raises(SupersededError):
        sender.flush()
    assert _read(uri, tracked.find_runs(uri)[0])["loss"] == []
    _sender(folder).flush()
    assert [len(_read(uri, run)["loss"]) for run in tracked.find_runs(uri)] == [0, 1]


@pytest.mark.shows("P123")
@pytest.mark.parametrize("server", ["mlflow", "wandb"])
def test_a_summary_has_the_best_validation_of_the_run(
    server: str, tmp_path: Path, uri: str
) -> None:
    runs, since = tmp_path / "runs", "2026-01-01T00:00:00"
    write_run(runs, {}, scores={"error": [3.0, 1.0, math.nan], "hits": [5.0, 6.0, math.inf]})
    target = MLflow(uri) if server == "mlflow" else WandB("project")
    folder = _store(tmp_path, target, run_folder=str(runs), since=since)
    sender = _sender(folder)
    sender.flush()
    sender.finish("finished")
    if server == "mlflow":
        (path,) = (tmp_path / "server.files").glob("*/summary.json")
        best = json.loads(path.read_text())["best"]
        assert (best["iteration"], best["scores"]) == (2, {"error": 1.0, "hits": 6.0})
        return
    (run,) = (folder.path / "wandb").iterdir()
    summary = json.loads(next(run.glob("*.wandb")).read_text())["summary"]
    best = {name: value for name, value in summary.items() if name.startswith("best.")}
    assert best == {"best.iteration": 2, "best.error": 1.0, "best.hits": 6.0}


@pytest.mark.shows("P68")
def test_a_summary_counts_and_ignores_nan() -> None:
    rows = [_row(number) for number in range(1, 5)]
    found = summarize(iter(rows))
    assert (found["epoch"], found["iteration"]) == (1, 4)
    assert found["numbers"]["odd (%)"] == {"count": 4, "last": -4, "min": -4, "max": -1}
    nothing = summarize(iter([{**rows[0], "values": {"a": "NaN"}}]))
    assert nothing["numbers"] == {"a": {"count": 1, "last": "NaN"}}


def test_names_that_mlflow_refuses_stay_different() -> None:
    names = ["a(", "a)", "a_", "a/b", "a//b", "/a/b", "./a", "", "é" * 300, "x" * 300, "y" * 250]
    cleaned = [clean(name) for name in names]
    assert len({*cleaned}) == len(names)
    assert cleaned[2:4] == ["a_", "a/b"]
    assert max(map(len, cleaned)) == 250


@pytest.mark.shows("P65")
def test_an_offline_run_has_every_point_once(tmp_path: Path) -> None:
    folder = _store(tmp_path, WandB("project"))
    root = folder.path / "wandb"
    for _ in range(3):
        # Each call writes the whole run, and removes the earlier one, also one of the same second.
        sender = _sender(folder)
        sender.flush()
        sender.finish("finished")
        (run,) = root.iterdir()
        found = tracked.history_curves(tracked.read_wandb(run))
        assert found == tracked.without_times(tracked.stored_curves(folder.path))
    assert run.name == f"offline-run-20260101_000000-{folder.read_run().key}"
    content = json.loads(next(run.glob("*.wandb")).read_text())
    assert content["config"] == {"lr": 0.1}
    assert content["summary"]["loss.min"] == 1 / 6
    assert content["history"][0]["_timestamp"] == (10**12 + 1) / 1000
    assert (run / "files" / content["history"][5]["a picture"]["path"]).is_file()


def test_helios_send_sends_once_and_says_where_to(
    tmp_path: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _store(tmp_path, MLflow(uri, "trial"))
    assert cli.main(["send", str(folder.path)]) == 0
    assert "experiment 'trial' on sqlite" in capsys.readouterr().out
    assert cli.main(["send", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 0
    (run,) = tracked.find_runs(uri, "trial")
    assert run.info.status == "FINISHED"


def test_helios_send_fails_with_the_cause(
    tmp_path: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["send", str(tmp_path)]) == 2
    assert "There is no tracker" in capsys.readouterr().err
    folder = _store(tmp_path, MLflow(uri))
    (tmp_path / "server.db.down").touch()
    assert cli.main(["send", str(folder.path)]) == 1
    assert "the server is down" in capsys.readouterr().err


def test_targets_are_checked() -> None:
    for wrong in (lambda: MLflow(""), lambda: MLflow("u", ""), lambda: WandB("")):
        with pytest.raises(ArgumentError, match="must not be empty"):
            wrong()
    with pytest.raises(ArgumentError, match="no credentials"):
        MLflow("https://me:secret@server")
    with pytest.raises(ArgumentTypeError, match="must be a str"):
        MLflow(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no target"):
        from_plain({"kind": "Other"})
    for target in (MLflow("u", "e"), WandB("p", folder=Path("x"))):
        assert from_plain(to_plain(target)) == target
        json.dumps(asdict(target))


def test_a_picture_is_the_same_file_whenever_it_is_stored(tmp_path: Path) -> None:
    from PIL import Image

    for channels in (1, 3, 4):
        pixels = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
        name = store_picture(tmp_path, pixels)
        assert store_picture(tmp_path, pixels.copy()) == name
        with Image.open(tmp_path / name) as image:
            assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)
    assert len(list(tmp_path.iterdir())) == 3


def test_pictures_are_checked() -> None:
    floats = np.array([[[0.0, 0.5, 1.0]]])
    assert as_pixels("p", floats, "CHW").tolist() == [[[0], [128], [255]]]
    assert as_pixels("p", floats, "HWC").shape == (1, 1, 3)
    for image, axes in (
        (floats * 2, "CHW"),
        (floats * math.nan, "CHW"),
        (floats, "HW"),
        (floats, "WHC"),
        (np.zeros((2, 4, 4)), "CHW"),
        (np.zeros((1, 0, 4)), "CHW"),
        (np.zeros((1, 2, 2), np.int64), "CHW"),
    ):
        with pytest.raises(UsageError, match="'p'"):
            as_pixels("p", image, axes)
