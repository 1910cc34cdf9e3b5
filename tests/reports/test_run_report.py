"""The page about a run: its numbers, its curves, and what it needs."""

from __future__ import annotations

import json
import math
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helios
from helios.cli import main
from helios.plugins import EarlyStopping
from tests.support.synthetic_run import write_ledger, write_run

STEPS, BATCH = 12, 4
X = torch.linspace(-1, 1, 24)


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=BATCH)
        self._train_dataset = self._create_dataset(X, params)
        self._valid_dataset = self._create_dataset(X, params)


class Line(helios.Model):
    """Learns a slope of 2, ever more slowly, and is validated against one of 1.5."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.75)

    def train_step(self, batch: torch.Tensor, state: Any) -> torch.Tensor:
        loss = (self.net(batch[:, None])[:, 0] - 2 * batch).square().mean()
        self.loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: torch.Tensor, step: int) -> dict[str, Any]:
        error = (self.net(batch[:, None])[:, 0] - 1.5 * batch).abs().sum()
        return {"error": (error, len(batch))}


def train(root: Path, total: int = STEPS, **options: Any) -> Path:
    helios.Trainer(
        train_unit="iteration",
        total_steps=total,
        valid_frequency=2,
        chkpt_frequency=4,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        plugins=[EarlyStopping("error", mode="min", patience=99)],
        **options,
    ).fit(Line("line"), Data())
    return root / "line"


def by_hand() -> dict[str, list[float]]:
    """Return losses, rates and errors of the same training, as a plain loop has them."""
    model = Line("hand")
    model.setup()
    found: dict[str, list[float]] = {"loss": [], "rate": [], "error": []}
    for step in range(STEPS):
        batch = X.split(BATCH)[step % len(X.split(BATCH))]
        loss = (model.net(batch[:, None])[:, 0] - 2 * batch).square().mean()
        found["loss"].append(loss.item())
        loss.backward()
        model.optimizer.step()
        found["rate"].append(model.optimizer.param_groups[0]["lr"])
        model.scheduler.step()
        model.optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                errors = (model.net(X[:, None])[:, 0] - 1.5 * X).abs()
            total = sum(part.sum().item() for part in errors.split(BATCH))
            found["error"].append(total / len(X))
    return found


class Page(HTMLParser):
    """Reads a page, and fails if its elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] if tag not in ("meta", "link") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f" {data.strip()}"


def make_page(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Return the page about a run, and what the command says as JSON."""
    capsys.readouterr()
    assert main(["report", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    return Path(facts["path"]).read_text("utf-8"), facts


def points_of(page: str, title: str) -> list[tuple[float, float]]:
    """Return the points of a curve on the page, in pixels."""
    figure = page.partition(f"<figcaption>{title}</figcaption>")[2].partition("</figure>")[0]
    path = re.search(r'<g class="curve">.*?<path d="(.*?)"', figure, re.DOTALL)
    assert path is not None
    pairs = re.findall(r"([-\d.]+) ([-\d.]+)", path[1])
    return [(float(x), float(y)) for x, y in pairs]


def drawn(page: str, title: str, low: float, high: float) -> list[float]:
    """Return the numbers of a curve on a linear scale, whose extremes are known."""
    heights = np.array([y for _, y in points_of(page, title)])
    shares = (heights.max() - heights) / np.ptp(heights)
    return list(low + shares * (high - low))


@pytest.mark.shows("P43")
def test_the_page_has_the_numbers_of_a_loop_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (8, STEPS):
        run = train(tmp_path, total)
    page, facts = make_page(run, capsys)
    known = by_hand()
    titles = {"loss: loss": "loss", "learning rate": "rate", "score: error": "error"}
    for title, name in titles.items():
        numbers, found = known[name], facts["curves"][title]
        assert (found["first"], found["last"]) == (numbers[0], numbers[-1])
        assert (found["min"], found["max"]) == (min(numbers), max(numbers))
        assert len(points_of(page, title)) == len(numbers)
    errors = known["error"]
    assert drawn(page, "score: error", min(errors), max(errors)) == pytest.approx(errors, rel=1e-4)
    rates = known["rate"]
    assert drawn(page, "learning rate", min(rates), max(rates)) == pytest.approx(rates, rel=1e-4)
    place = 2 * (1 + errors.index(min(errors)))
    assert facts["best"]["iteration"] == place
    assert f"best validation: {min(errors):.6g} at iteration {place}" in page
    assert page.count('<g class="best">') == 1
    assert len(facts["starts"]) == 2
    assert "total_steps: 8 -> 12" in facts["starts"][1]["changes"]
    assert facts["summary"]["Iterations"] == "12, epoch 2 (the run has ended)"
    assert facts["settings"]["options"]["total_steps"] == STEPS


@pytest.mark.shows("P43")
def test_peaks_stay_in_a_long_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = [math.sin(n / 99) for n in range(30_000)]
    numbers[12_345], numbers[23_456] = 9.0, -7.0
    write_ledger(tmp_path, numbers)
    page, facts = make_page(tmp_path, capsys)
    found = drawn(page, "loss: loss", -7.0, 9.0)
    assert len(found) < 1_500
    assert max(found) == pytest.approx(9.0)
    places = [x for x, _ in points_of(page, "loss: loss")]
    share = (np.array(places) - places[0]) / (places[-1] - places[0])
    own = np.rint(share * (len(numbers) - 1)).astype(int)
    assert np.array(numbers)[own] == pytest.approx(found, abs=1e-3)
    columns = np.minimum(np.arange(30_000) * 600 // 29_999, 599)
    for column in range(600):
        there = np.array(numbers)[columns == column]
        kept = np.array(numbers)[own[columns[own] == column]]
        assert (kept.min(), kept.max()) == (there.min(), there.max())
    assert (facts["curves"]["loss: loss"]["min"], facts["curves"]["loss: loss"]["max"]) == (-7, 9)


@pytest.mark.shows("P44")
def test_the_page_stands_alone_and_follows_the_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _ = make_page(train(tmp_path), capsys)
    rest = re.sub(r'xmlns(:\w+)?="[^"]*"|<link rel="icon" href="data:,">', "", text)
    assert not re.search(r"(?:src|srcset|action)\s*=|@import|<script|<iframe|https?:", rest)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    # The text of charts has the colour of the page.
    assert "currentColor" in text
    assert "#010203" not in text
    assert Page(text).tags.count("svg") == 3


@pytest.mark.shows("P44")
def test_texts_of_a_run_are_never_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "<script>alert(1)</script>\"'&`$x_$"
    facts = {"options": {bad: bad}, "command": [bad], "level": bad, "host": bad, "changes": [bad]}
    write_run(tmp_path / "run", facts, scores={bad: [1.0, 0.5]})
    write_ledger(tmp_path / "run", [1.0, 2.0], names=[bad])
    text, _ = make_page(tmp_path / "run", capsys)
    assert "<script" not in text
    assert bad in unescape(text)
    assert "script" not in Page(text).tags


@pytest.mark.shows("P62")
def test_lines_that_are_not_good_are_in_no_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ledger(tmp_path, [1.0, 2.0, 4.0])
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"at":[1,2,2]', b'"at":[2,2,2]')
    path.write_bytes(b"".join(lines))
    text, facts = make_page(tmp_path, capsys)
    assert "1 findings, the first" in facts["summary"]["Ledger"]
    assert len(points_of(text, "loss: loss")) == 2


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write_ledger(tmp_path / name, [1.0])
    for name in [*sys.modules]:
        if name.startswith("helios.reports."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for words in (["report", one], ["compare", one, two, "--plot", str(tmp_path / "a.png")]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "pip install 'helios-trainer[report]'" in line
    assert main(["compare", one, two]) == 0
    assert main(["ls", one]) == 0


@pytest.mark.shows("P44")
def test_many_losses_make_no_large_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"part {number}" for number in range(60)]
    write_ledger(tmp_path, [math.sin(n) for n in range(2_000)], names=names)
    text, _ = make_page(tmp_path, capsys)
    assert len(text.encode()) < 2_000_000
    assert "36 more curves are not drawn" in text
