"""Everything that only a GPU can show, in one call of at most four minutes: `python benchmarks/gpu_check.py`.

GPT-2 medium, a Llama of 1B's shape (flash attention) and ResNet-50, random weights in bf16, nothing to download; plans at
70, 50 and 35 % of the store-all peak. For each: predicted peak against `torch.cuda.max_memory_allocated` (and what
`max_memory_reserved` says), the step's time against eager, one checkpoint a block and uniform √n (CUDA events,
interleaved, medians), gradients against eager within what eager runs differ by, what libraries keep of torch's memory
(cuBLAS's buffers), and the roofline's and the measured costs against the step's real time.

Prints a table and JSON, and writes both to benchmarks/results/gpu_check.txt and .json with device and date. The exit
status is 1 when a check fails. `--device cpu --quick` runs the same on a small model without a GPU and writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import platform
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks import models
from gcsolve.lowering.costed import LIBRARY_BUFFERS, storage_bytes
from gcsolve.ops.peak_meter import PeakMeter
from gcsolve.plan import Plan
from gcsolve.report.tables import text_table

RESULTS = Path(__file__).parent / "results"
FRACTIONS = (0.7, 0.5, 0.35)
RIVALS = ("blocks", "uniform_sqrt")
SOLVE_S = 5.0  # a budget: nine of them are a fifth of the four minutes
EAGER_RUNS = 4  # how far apart a step's gradients are differs from one pair of runs to the next

FULL: dict[str, Callable[[], models.Case]] = {
    "gpt2-medium": functools.partial(models.gpt2, layers=24, width=1024, batch=8, length=1024),
    "llama-1b": functools.partial(models.llama, layers=16, width=2048, batch=4, length=2048),
    "resnet50": functools.partial(models.resnet50, batch=64),
}
SMALL: dict[str, Callable[[], models.Case]] = {
    "mlp": functools.partial(models.mlp, layers=3, width=32, batch=8192),
}

Row = dict[str, Any]


class Machine:
    """Where it runs, and how time and memory are taken there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu and self.device.index is not None:
            torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name() if self.is_gpu else f"CPU ({platform.machine()})"

    def peak(self, run: Callable[[], Any], always: int) -> tuple[int, int]:
        """(allocated, reserved) bytes at the peak of one run; `always`: what lives before it, where no counter says."""
        gc.collect()
        if not self.is_gpu:
            with PeakMeter() as meter:
                run()
            return always + meter.peak_bytes, 0
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def allocated(self) -> int:
        """Bytes that torch's allocator has given out; 0 where no counter says."""
        gc.collect()
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def seconds(self, run: Callable[[], Any]) -> float:
        if not self.is_gpu:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3

    def interleaved(self, runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
        """Median seconds of each, all in turn in every round; the first round warms up."""
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(1 + repeats):
            for name, run in runs.items():
                found[name].append(self.seconds(run))
        return {name: statistics.median(taken[1:]) for name, taken in found.items()}


class Case:
    """A model and its example on the machine, in bf16."""

    def __init__(self, case: models.Case, machine: Machine) -> None:
        model, example, self.loss = case
        self.model = model.to(machine.device, torch.bfloat16)

        def placed(t: torch.Tensor) -> torch.Tensor:
            return t.to(machine.device, torch.bfloat16 if t.is_floating_point() else t.dtype)

        named = isinstance(example, dict)
        self.example = {k: placed(v) for k, v in example.items()} if named else tuple(map(placed, example))

    def step(self, module: nn.Module) -> Callable[[], None]:
        """One forward and backward that begins without gradients."""

        def run() -> None:
            module.zero_grad(set_to_none=True)
            result = module(**self.example) if isinstance(self.example, dict) else module(*self.example)
            (result if isinstance(result, torch.Tensor) else result.loss).backward()

        return run

    def gradients(self, module: nn.Module) -> list[torch.Tensor]:
        """From one seed, buffers as they were."""
        buffers = [b.clone() for b in self.model.buffers()]
        torch.manual_seed(1)
        self.step(module)()
        for b, old in zip(self.model.buffers(), buffers, strict=True):
            b.copy_(old)
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def always_bytes(self, rounded_to: int = 1) -> int:
        inputs = self.example.values() if isinstance(self.example, dict) else self.example
        always = (*self.model.parameters(), *self.model.buffers(), *inputs)
        return storage_bytes(always, lambda size: -(-size // rounded_to) * rounded_to)


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest difference of two sets of gradients, over the largest entry."""
    scale = max(float(x.abs().max()) for x in a) or 1.0
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True)) / scale


def run_model(name: str, case: Case, machine: Machine, repeats: int) -> dict[str, Any]:
    """Everything about one model."""
    solve = functools.partial(gcsolve.solve, case.model, case.example, loss=case.loss, progress=False)
    base = solve(budget=1.0, solver="store_all")
    measured = solve(budget=1.0, solver="store_all", cost="measured")
    plans: dict[str, Any] = {"store_all": base}
    refused: dict[str, str] = {}
    for fraction in FRACTIONS:
        try:
            plans[f"{fraction:.0%}"] = base.at(budget=fraction, solver="auto", time_limit_s=SOLVE_S, progress=False)
        except gcsolve.InfeasibleBudget as error:
            refused[f"{fraction:.0%}"] = str(error)
    for rival in RIVALS:
        solution = gcsolve.solve_problem(base.problem.with_budget(1), rival)
        plans[rival] = Plan.of(base.session, solution, solution.peak_bytes, base.solver_options)

    eager = [case.gradients(case.model) for _ in range(EAGER_RUNS)]
    noise = max(apart(a, b) for a, b in itertools.combinations(eager, 2))
    away = {}
    for label, plan in plans.items():
        gradients = case.gradients(plan.module)
        away[label] = min(apart(one, gradients) for one in eager)
        del gradients
    case.model.zero_grad(set_to_none=True)
    del eager
    kept = machine.allocated() - case.always_bytes(rounded_to=512)
    peaks = {}
    for label, module in {"eager": case.model, **{k: p.module for k, p in plans.items()}}.items():
        case.step(module)()  # libraries take what they keep now
        case.model.zero_grad(set_to_none=True)
        peaks[label] = machine.peak(case.step(module), case.always_bytes())
        case.model.zero_grad(set_to_none=True)
    runs = {"eager": case.step(case.model), **{k: case.step(p.module) for k, p in plans.items()}}
    times = machine.interleaved(runs, repeats)
    rows = [
        {
            "plan": label,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "allocated_bytes": peaks[label][0],
            "reserved_bytes": peaks[label][1],
            "overhead_predicted": plan.overhead,
            "overhead_measured": times[label] / times["store_all"] - 1,
            "overhead_by_measured_costs": overhead_in(plan, measured.problem.cost),
            "step_s": times[label],
            "gradients_apart": away[label],
        }
        for label, plan in plans.items()
    ]
    return {
        "model": name,
        "rows": rows,
        "refused": refused,
        "libraries": {
            "kept_bytes": kept if machine.is_gpu else 0,
            "predicted_bytes": dict(base.problem.graph.external)[LIBRARY_BUFFERS],
        },
        "eager": {"step_s": times["eager"], "allocated_bytes": peaks["eager"][0], "noise": noise},
        "costs": {
            "roofline_s": base.problem.total_cost,
            "measured_ops_s": measured.problem.total_cost,
            "step_s": times["store_all"],
            "ops": dearest(base, measured),
        },
        "summary": base.summary(),
    }


def overhead_in(plan: Any, costs: tuple[float, ...]) -> float:
    """The plan's overhead in other costs of the same graph."""
    runs = plan.schedule.runs(plan.problem.graph)
    return sum(c * (n - 1) for c, n in zip(costs, runs, strict=True)) / sum(costs)


def dearest(roofline: Any, measured: Any, most: int = 8) -> list[Row]:
    """The ops that take most of a step, with both costs' seconds."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node, a, b in zip(roofline.problem.graph.nodes, roofline.problem.cost, measured.problem.cost, strict=True):
        sums[node.op][0] += a
        sums[node.op][1] += b
    first = sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    return [{"op": op, "roofline_s": a, "measured_s": b} for op, (a, b) in first]


def checks(results: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    for found in results:
        if "error" in found:
            yield f"{found['model']}: runs", False
        for row in found.get("rows", ()):
            at = f"{found['model']}, {row['plan']}"
            yield (
                f"{at}: peak within -1 .. +2 % of measured",
                0.99 <= row["predicted_bytes"] / row["allocated_bytes"] <= 1.02,
            )
            if row["plan"].endswith("%"):
                # The CPU's generator state, a few kB while a random op is run again, is in no count.
                yield f"{at}: within its budget", row["allocated_bytes"] <= 1.002 * row["budget_bytes"]
            yield (
                f"{at}: gradients as near to eager's as another eager run",
                row["gradients_apart"] <= found["eager"]["noise"],
            )


def report(results: list[dict[str, Any]], machine: Machine, seconds: float) -> str:
    heads = ("plan", "predicted MB", "allocated MB", "reserved MB", "step s", "x eager", "overhead", "predicted", "by ops",
             "gradients apart")  # fmt: skip
    lines = [
        f"gcsolve {gcsolve.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, {machine.name}, {date.today()}, "
        f"{seconds:.0f} s in all"
    ]
    for found in results:
        if "error" in found:
            lines += ["", f"## {found['model']}", "", found["error"]]
            continue
        eager, costs = found["eager"], found["costs"]
        lines += [
            "",
            f"## {found['model']}",
            "",
            f"eager: {eager['allocated_bytes'] / 1e6:.1f} MB, {eager['step_s']:.4f} s, runs up to {eager['noise']:.2g} apart; "
            f"libraries keep {found['libraries']['kept_bytes'] / 1e6:.1f} MB, "
            f"{found['libraries']['predicted_bytes'] / 1e6:.1f} predicted",
            "",
            text_table(heads, [cells(row, eager) for row in found["rows"]], right=range(1, len(heads))),
            *(f"{label}: no plan: {text}" for label, text in found["refused"].items()),
            "",
            f"store-all step {costs['step_s']:.4f} s; ops by roofline {costs['roofline_s']:.4f} s, measured "
            f"{costs['measured_ops_s']:.4f} s",
            *(
                f"  {op['op']}: roofline {op['roofline_s']:.5f} s, measured {op['measured_s']:.5f} s"
                for op in costs["ops"]
            ),
        ]
    held = list(checks(results))
    failed = [what for what, holds in held if not holds]
    lines += ["", f"{len(held) - len(failed)} of {len(held)} checks hold", *(f"FAILS: {what}" for what in failed)]
    return "\n".join(lines)


def cells(row: Row, eager: Row) -> tuple[str, ...]:
    return (
        row["plan"],
        f"{row['predicted_bytes'] / 1e6:.1f}",
        f"{row['allocated_bytes'] / 1e6:.1f}",
        f"{row['reserved_bytes'] / 1e6:.1f}",
        f"{row['step_s']:.4f}",
        f"{row['step_s'] / eager['step_s']:.3f}",
        f"{row['overhead_measured']:.2%}",
        f"{row['overhead_predicted']:.2%}",
        f"{row['overhead_by_measured_costs']:.2%}",
        f"{row['gradients_apart']:.2g}",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predictions against a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is written")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    if torch.device(arguments.device).type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no GPU is visible here; --device cpu --quick runs the same on a small model")
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is what is asked about; some torch prefer cuDNN's
    machine, began = Machine(arguments.device), time.perf_counter()
    results = []
    for name, factory in (SMALL if arguments.quick else FULL).items():
        try:
            results.append(run_model(name, Case(factory(), machine), machine, arguments.repeats))
        except Exception:  # a GPU is lent for minutes: the other models' figures are not to be lost
            results.append({"model": name, "error": traceback.format_exc()})
        gc.collect()
    text = report(results, machine, time.perf_counter() - began)
    print(text)
    print(json.dumps(results))
    if machine.is_gpu and not arguments.quick:
        (RESULTS / "gpu_check.txt").write_text(text + "\n")
        (RESULTS / "gpu_check.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(holds for _, holds in checks(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
