"""Names of checkpoints: made, extended by the model, and found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helios.checkpoint import file_names
from helios.errors import ArgumentError, UsageError

NAMES = [
    "cifar10",
    "",
    "epoch_1_iter_2",
    "a_epoch_9_iter_9_epoch_8_iter_8",
    "läuft",
]


@pytest.mark.shows("H23")
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_found_again_whatever_the_run_is_called(name: str) -> None:
    stem = file_names.stem(name, 3, 100)
    assert stem == f"{name}_epoch_3_iter_100"
    assert file_names.parse(stem) == (3, 100)
    assert file_names.parse(Path("folder_epoch_1_iter_1") / f"{stem}.pth") == (3, 100)
    assert file_names.parse(file_names.apply_metadata(stem, "loss_0.5") + ".pth") == (3, 100)


@pytest.mark.parametrize("name", ["a/b", "a\\b", "../x", "a\0b", "x" * 250])
def test_a_run_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="save_name"):
        file_names.stem(name, 1, 1)


@pytest.mark.shows("C1")
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("model.pth", None),
        ("model_epoch_3.pth", None),
        ("model_epoch_x_iter_3.pth", None),
        ("epoch_0_iter_0.pth", (0, 0)),
        ("m_epoch_01_iter_0005_acc_0.9.pth", (1, 5)),
        ("m_epoch_1_iter_2_best.pth", (1, 2)),
        ("m_epoch_1_iter_2_epoch_3_iter_4.pth", (3, 4)),
        ("m_epoch_\u0663_iter_4.pth", None),
    ],
)
def test_any_pair_of_numbers_after_epoch_and_iter_is_read_and_the_last_counts(
    name: str, numbers: tuple[int, int] | None
) -> None:
    assert file_names.parse(name) == numbers


STEM = "run_epoch_3_iter_100"


@pytest.mark.shows("H22", "C2")
@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (STEM, STEM),
        ("", STEM),
        (STEM + "_acc_0.89", STEM + "_acc_0.89"),
        ("acc_0.89", STEM + "_acc_0.89"),
        (STEM + "-best", STEM + "-best"),
    ],
)
def test_metadata_replaces_the_name_if_it_begins_with_it_and_is_appended_else(
    returned: str, result: str
) -> None:
    assert file_names.apply_metadata(STEM, returned) == result


@pytest.mark.parametrize(
    "returned",
    [
        "a/b",
        "x" * 240,
        STEM + "0",
        "best_epoch_1_iter_2",
        3,
    ],
)
def test_metadata_that_would_lose_the_file_is_an_error(returned: Any) -> None:
    with pytest.raises(UsageError, match="append_metadata_to_chkpt_name"):
        file_names.apply_metadata(STEM, returned)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.shows("H23", "C1")
def test_the_last_checkpoint_has_the_highest_pair_and_not_the_highest_iteration(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "r_epoch_2_iter_5.pth", "r_epoch_10_iter_4.pth", "r_epoch_9_iter_99_x.pth")
    # No checkpoints: partial, damaged and foreign files, and folders.
    touch(tmp_path, "r_epoch_15_iter_5.pth.tmp", "r_epoch_16_iter_6.pth.damaged", "best.pth")
    (tmp_path / "r_epoch_19_iter_9.pth").mkdir()
    touch(tmp_path / "r_epoch_19_iter_9.pth", "r_epoch_99_iter_99.pth")
    assert file_names.find_last_checkpoint(tmp_path) == tmp_path / "r_epoch_10_iter_4.pth"
