"""What people train, at reduced size: bitwise the untouched model's results inside the budget, at the number predicted.

Every architecture is planned by the quickest method and trained for one step; of ten kinds, the full row of
`python benchmarks/zoo.py` is computed, with the solver's own plan, three steps and the usual rules beside it.
"""

from __future__ import annotations

import pytest

import gcsolve
from benchmarks.architectures import ARCHITECTURES, architecture
from benchmarks.zoo import checks, run_architecture

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]  # the model libraries' warnings about themselves

BATCH = 4
FULL = (
    "gemma",
    "mixtral",
    "mamba",
    "t5",
    "wav2vec2",
    "swin",
    "timm_efficientnetv2",
    "diffusion_transformer",
    "dlrm",
    "lora_llama",
)


@pytest.mark.parametrize("name", FULL)
def test_full_row(name: str) -> None:
    row = run_architecture(name, batch=BATCH, time_limit_s=1.0)
    assert "refused" not in row, row
    assert [what for what, holds in checks(name, row) if not holds] == []


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FULL])
def test_one_step_equal_within_budget_and_as_predicted(name: str) -> None:
    model, example, loss = architecture(name, BATCH)
    store_all = gcsolve.solve(model, example, budget=1.0, solver="store_all", loss=loss)
    plan = _reduced(store_all)
    assert plan.peak_bytes < store_all.peak_bytes
    report = plan.verify(steps=1, repeats=0)
    assert report.differences == ()
    assert report.measured_peak_bytes <= plan.budget_bytes
    assert abs(report.prediction_error) <= 0.02


def _reduced(store_all: gcsolve.Plan) -> gcsolve.Plan:
    """The greedy's plan at half the store-all peak, or half way between that peak and the least that it reaches."""
    try:
        return store_all.at(budget=0.5, solver="greedy", time_limit_s=2.0)
    except gcsolve.InfeasibleBudget as error:
        least_bytes = error.least_bytes
    assert least_bytes is not None
    return store_all.at(
        budget=f"{(least_bytes + store_all.baseline_peak_bytes) // 2}B", solver="greedy", time_limit_s=2.0
    )
