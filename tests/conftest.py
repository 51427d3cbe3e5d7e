"""Quick tests first, heavy ones last, in as many processes as there are cores (4 at most; `-n 0`: in this one).

Each process computes on one thread: on more they would wait for each other. Tests marked `gpu` skip where there is no
CUDA device. Every measured peak asks for a search for garbage, so what outlives a test is left out of the later ones.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported
# Set here, for all the processes that this one starts: they collect the same tests, at midnight between two weeks too.
os.environ.setdefault("GCSOLVE_WEEK", str(datetime.date.today().isocalendar().week))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("heavy") is not None)  # stable: order is kept otherwise
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_teardown() -> None:
    """Leave what a test's imports and caches made out of later searches for garbage: through transformers they take 0.4 s."""
    gc.collect()
    gc.freeze()
