"""Fixtures that run around every test: a fixed start, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator

import pytest

from tests.support import tier


def pytest_configure(config: pytest.Config) -> None:
    """Let helpers see which tier runs; a process that only starts others needs no PyTorch."""
    tier.choose(config.option.markexpr)
    if config.getoption("dist", "no") == "no":
        _prepare()


def _prepare() -> None:
    # What is imported and collected stays, so looking for garbage in it is a waste of time.
    gc.disable()
    # To import inductor would start processes that stay, in PyTorch 2.6.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    # CPU sums depend on the number of threads, and several test processes share the cores.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in the package only; to look for them in the tests takes seconds."""
    found = yield
    return [each for each in found if type(each) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Leave out, in the default tier, cases of tests that are marked as sampled."""
    if not tier.is_full():
        kept = tier.sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    yield
    items[:] = tier.deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the process: the modules that were imported."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Spare it also what has outlived a full collection, such as modules imported by a test."""
    count = gc.get_stats()[-1]["collections"]
    if count != _Collections.seen:
        gc.freeze()
        _Collections.seen = count


class _Collections:
    seen = 0


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run tests as a plain script, which has no handlers, unless they read what pytest captures."""
    root = logging.getLogger()
    found = list(root.handlers)
    if "caplog" in pyfuncitem.fixturenames:
        return (yield)
    root.handlers.clear()
    try:
        return (yield)
    finally:
        root.handlers[:] = found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks settings, threads, processes or handlers into the next one."""
    from tests import leaks

    leaks.reset_generators()
    leaks.forget_interruptions()
    before = leaks.take_snapshot()
    yield
    if found := before.leaks():
        pytest.fail("This test leaves behind: " + "; ".join(found), pytrace=False)
