"""The benchmarks that cannot run where they were written at least run their logic."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check


def test_the_gpu_check_runs_on_the_cpu(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gcsolve.cost.measured.MAX_OP_S", 0.0)
    assert gpu_check.main(["--device", "cpu", "--quick", "--repeats", "1"]) == 0
    text, _, told = capsys.readouterr().out.rstrip().rpartition("\n")
    (found,) = json.loads(told)
    assert {row["plan"] for row in found["rows"]} >= {"store_all", "70%", "blocks", "uniform_sqrt"}
    assert len(found["costs"]["ops"]) == 8
    assert "FAILS" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(capsys) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "no GPU is visible here" in capsys.readouterr().err
