"""What people train, at reduced size: bitwise the untouched model's results inside the budget, at the number predicted.

`python benchmarks/zoo.py` prints the same, and more architectures, as a table.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks.architectures import ARCHITECTURES, SIMILAR
from benchmarks.zoo import checks, run_architecture

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore")  # the model libraries', about themselves
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in SIMILAR])
def test_equal_within_budget_and_as_predicted(name: str) -> None:
    row = run_architecture(name, batch=4, time_limit_s=1.0)
    assert "refused" not in row, row
    assert [what for what, holds in checks(name, row) if not holds] == []


def test_forty_architectures_at_least() -> None:
    assert len(ARCHITECTURES) - len(SIMILAR) >= 40
    assert set(ARCHITECTURES) >= SIMILAR
