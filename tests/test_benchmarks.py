"""The benchmarks that cannot run where they were written at least run their logic."""

from __future__ import annotations

import functools
import json
import time

import pytest
import torch

from benchmarks import gpu_check, models
from benchmarks import solvers as solver_table


def test_the_gpu_check_runs_on_the_cpu(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gcsolve.cost.measured.MAX_OP_S", 0.0)
    assert gpu_check.main(["--device", "cpu", "--quick", "--repeats", "1"]) == 0
    text, _, told = capsys.readouterr().out.rstrip().rpartition("\n")
    (found,) = json.loads(told)
    assert {row["plan"] for row in found["rows"]} >= {"store_all", "70%", "blocks", "uniform_sqrt"}
    assert len(found["costs"]["ops"]) == 8
    assert "FAILS" not in text


def test_the_gpu_checks_other_models_are_not_lost_with_one(capsys, monkeypatch) -> None:
    def broken() -> models.Case:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "SMALL", {"first": broken, "second": broken})
    assert gpu_check.main(["--device", "cpu", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 checks hold" in out
    assert out.count("RuntimeError: out of memory") >= 2
    assert "FAILS: second: runs" in out


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


class AsIfAGpu(gpu_check.Machine):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.is_gpu = True


def test_the_gpu_checks_own_lines_for_a_gpu(capsys, monkeypatch, tmp_path) -> None:
    """A Hugging Face model through what only a GPU runs, torch.cuda's functions replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gcsolve.cost.measured.MAX_OP_S", 0.0)
    gpt2 = functools.partial(models.gpt2, layers=2, width=64, batch=1, length=16, vocabulary=100)
    monkeypatch.setattr(gpu_check, "SMALL", {"gpt2": gpt2})
    monkeypatch.setattr(gpu_check, "FRACTIONS", (0.9,))
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 10**6)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(gpu_check, "Machine", AsIfAGpu)
    assert gpu_check.main(["--device", "cpu", "--quick", "--repeats", "1"]) == 1  # no peak is 1 MB
    text, _, told = capsys.readouterr().out.rstrip().rpartition("\n")
    (found,) = json.loads(told)
    assert all(row["reserved_bytes"] == 10**6 and row["step_s"] > 0 for row in found["rows"])
    assert found["libraries"]["kept_bytes"] < 10**6
    assert "FAILS: gpt2, store_all: peak within" in text
    assert "gradients as near" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(capsys) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "no GPU is visible here" in capsys.readouterr().err


def test_the_solver_table_is_written_graph_by_graph(capsys, tmp_path, monkeypatch) -> None:
    raw = {"cost": [1] * 6, "bytes": [4, 4, 4, 1, 1, 1], "backward_start": 3}
    raw["edges"] = [(0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (0, 5), (4, 5)]
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_text(json.dumps(raw))
    monkeypatch.setattr(solver_table, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(solver_table, "KNOWN", {"a": {"0.9": 0.0}, "b": {"0.9": 50.0}})
    (tmp_path / "results").mkdir()
    solver_table.main(["--graphs", str(tmp_path), "--store"])
    solver_table.main(["--graphs", str(tmp_path), "--store", "--only", "b", "--solver", "auto"])
    found = json.loads((tmp_path / "results" / "solvers.json").read_text())["graphs"]
    assert {name: [row["solver"] for row in rows] for name, rows in found.items()} == {
        "a": ["auto", "one_epoch"],
        "b": ["auto", "one_epoch"],
    }
    row = found["b"][0]
    assert (row["overhead"], row["reached"], found["a"][0]["reached"]) == (pytest.approx(1 / 6), True, False)
    assert "2 of 4 known values reached" in (tmp_path / "results" / "solvers.txt").read_text()
