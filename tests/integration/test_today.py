"""Trainings and checkpoints of commit e702e9a: every later version has their bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.checkpoint import loading
from helios.checkpoint.contents import open_contents
from tests.support.today import TODAY

RUNS = [(script, count) for script, counts in TODAY.runs.items() for count in counts]
RESUMES = [
    pytest.param(script, path, count, id=f"{path.stem}-{count}")
    for script, counts in TODAY.runs.items()
    for path in TODAY.checkpoints(script)
    for count in counts
]


@pytest.mark.shows("S49")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("script", "num_processes"), RUNS)
def test_a_frozen_script_gives_its_bits_from_the_start(
    script: str, num_processes: int, tmp_path: Path
) -> None:
    assert TODAY.run(script, tmp_path, num_processes) == TODAY.load(script)["whole"]


@pytest.mark.shows("S22", "S49")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("script", "path", "num_processes"), RESUMES)
def test_a_frozen_checkpoint_resumes_to_its_bits(
    script: str, path: Path, num_processes: int, tmp_path: Path
) -> None:
    expected = TODAY.load(script)[path.stem]
    assert TODAY.resume(script, path, tmp_path, num_processes) == expected


@pytest.mark.shows("S49")
@pytest.mark.parametrize("script", TODAY.runs)
def test_frozen_resumes_end_as_the_undisturbed_run(script: str) -> None:
    """Else what is frozen would be a fault."""
    whole, *resumed = TODAY.load(script).values()
    assert len(resumed) >= 2
    for result in resumed:
        for name in ("steps", "end"):
            count = len(result[name])
            assert count > 0
            assert result[name] == whole[name][-count:]


@pytest.mark.shows("S49")
@pytest.mark.parametrize("script", TODAY.runs)
def test_frozen_checkpoints_have_the_bytes_that_were_written(script: str) -> None:
    paths = TODAY.checkpoints(script)
    assert sorted(TODAY.load(script)) == sorted(["whole", *(path.stem for path in paths)])
    for path in paths:
        sidecar = loading.read_sidecar(path)
        assert open_contents(path).compare_bytes(sidecar)
        assert sidecar is not None
        assert sidecar.schema == 1


def test_what_is_frozen_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="never written again"):
        TODAY.freeze("manual", tmp_path)
