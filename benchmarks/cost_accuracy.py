"""Measured costs against measured steps: `python benchmarks/cost_accuracy.py` (one thread, some fifteen minutes).

For six models (reduced, so that a step takes about a second), with `cost="measured"`: plans at 60 and 40 % of the
store-all peak (where no plan is that small, at the least budget + 2 %). Predicted: 1 + overhead, a plan's step time over
store-all's. Measured: in every round each plan and store-all run in turn; the median over the rounds of the ratio, and
beside it the middle half of those ratios. Store-all is run twice a round: a plan is held against the mean of the two, and
their ratio is the noise of the machine. Also the predicted peak against the measured one, and what the roofline predicted.

Ops are measured afresh (no cache from earlier runs), and malloc is told to keep its memory (glibc): by default it gives
some back to the system and takes it again, in one step more than in the next. One thread, and CPU seconds of the
process: on a machine that others use, wall time says little. To hold it to one core as well:
`taskset -c 1 python benchmarks/cost_accuracy.py`. Results go to benchmarks/results/cost_accuracy.json and .txt;
models named by --models replace their part of it. The exit status is 1 when a check fails. --quick: one small model,
nothing written.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks import models
from gcsolve.ops.peak_meter import interleaved_samples
from gcsolve.report.tables import text_table

RESULTS = Path(__file__).parent / "results"
FRACTIONS = (0.6, 0.4)
SOLVE_S = 15.0
WITHIN = 0.05  # predicted ratio / measured ratio
PEAK_WITHIN = 0.01

REDUCED: dict[str, Callable[[], models.Case]] = {
    "gpt2": functools.partial(models.gpt2, layers=4, width=256, batch=4, length=512, vocabulary=2048),
    "llama": functools.partial(models.llama, layers=4, width=256, batch=4, length=512, vocabulary=2048),
    "resnet50": functools.partial(models.resnet50, batch=8, size=160, blocks=(1, 1, 1, 1)),
    "vit_small": functools.partial(models.vit_small, batch=8, depth=4),
    "unet": functools.partial(models.unet, batch=1, size=160),
    "mlp": functools.partial(models.mlp, layers=6, width=512, batch=2048),
}
QUICK = {"mlp": functools.partial(models.mlp, layers=3, width=128, batch=512)}
HEADS = (
    "model",
    "budget",
    "predicted",
    "measured",
    "middle half",
    "error",
    "fastest",
    "itself",
    "middle half",
    "roofline",
    "peak MB",
    "measured MB",
    "step s",
    "of ops s",
)

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

Row = dict[str, Any]


def rows_of(name: str, case: models.Case, repeats: int) -> Iterator[Row]:
    """One row a budget."""
    model, example, loss = case
    options: dict[str, Any] = {"loss": loss, "progress": False}
    base = gcsolve.solve(model, example, budget=1.0, solver="store_all", cost="measured", **options)
    roofline = gcsolve.solve(model, example, budget=1.0, solver="store_all", **options)
    plans = [(label, plan) for label, plan in budgets(base)]
    runs = [step(p.module, example) for p in (base, *(plan for _, plan in plans), base)]
    once, *samples, twice = interleaved_samples(runs, repeats, clock=time.process_time)
    beside = [statistics.fmean(pair) for pair in zip(once, twice, strict=True)]
    for (label, plan), seconds in zip(plans, samples, strict=True):
        report = plan.verify(steps=1, repeats=0)
        yield {
            "model": name,
            "budget": label,
            "predicted": 1 + plan.overhead,
            "measured": quartiles(ratios(seconds, beside)),
            "fastest": fastest(seconds) / fastest([*once, *twice]),
            "itself": quartiles(ratios(twice, once)),
            "roofline": 1 + extra(plan, roofline.problem.cost),
            "peak_bytes": plan.peak_bytes,
            "measured_bytes": report.measured_peak_bytes,
            "step_s": statistics.median(beside),
            "ops_s": base.problem.total_cost,
            "equal": not report.differences,
        }


def ratios(seconds: list[float], base: list[float]) -> list[float]:
    """Round by round, as what disturbs one run of a round likely disturbs the others."""
    return [s / b for s, b in zip(seconds, base, strict=True)]


def fastest(seconds: list[float]) -> float:
    """Mean of the three fastest: what a busy machine adds is never less than nothing."""
    return statistics.fmean(sorted(seconds)[:3])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def budgets(base: gcsolve.Plan) -> Iterator[tuple[str, gcsolve.Plan]]:
    for fraction in FRACTIONS:
        try:
            yield f"{fraction:.0%}", base.at(budget=fraction, solver="auto", time_limit_s=SOLVE_S, progress=False)
        except gcsolve.InfeasibleBudget:
            least = base.minimum_budget(time_limit_s=SOLVE_S)
            yield (
                "least+2%",
                base.at(
                    budget=f"{int(1.02 * least.one_rerun_bytes)}B", solver="auto", time_limit_s=SOLVE_S, progress=False
                ),
            )
            return


def extra(plan: gcsolve.Plan, costs: tuple[float, ...]) -> float:
    """The plan's overhead in other costs."""
    runs = plan.schedule.runs(plan.problem.graph)
    return sum(c * (n - 1) for c, n in zip(costs, runs, strict=True)) / sum(costs)


def step(module: torch.nn.Module, example: Any) -> Callable[[], None]:
    """One forward and backward from clean gradients."""
    positional, named = ((), example) if isinstance(example, dict) else (example, {})

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        result = module(*positional, **named)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()

    return run


def error(row: Row) -> float:
    """Predicted ratio over measured, less one."""
    return row["predicted"] / row["measured"][1] - 1


def keep_memory() -> None:
    """Let malloc hand nothing back to the system in this process, nor take large blocks from it one by one."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        malloc = ctypes.CDLL(None)
        malloc.mallopt(M_MMAP_MAX, 0)
        malloc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def checks(rows: list[Row]) -> Iterator[tuple[str, bool]]:
    for row in rows:
        at = f"{row['model']} at {row['budget']}"
        yield f"{at}: predicted step time ratio within 5 % of measured", abs(error(row)) <= WITHIN
        yield f"{at}: predicted peak within 1 %", abs(row["peak_bytes"] / row["measured_bytes"] - 1) <= PEAK_WITHIN
        yield f"{at}: bitwise equal", row["equal"]


def cells(row: Row) -> tuple[str, ...]:
    def spread(name: str) -> tuple[str, str]:
        low, middle, high = row[name]
        return f"{middle:.4f}", f"{low:.3f} .. {high:.3f}"

    return (
        row["model"],
        row["budget"],
        f"{row['predicted']:.4f}",
        *spread("measured"),
        f"{error(row):+.2%}",
        f"{row['fastest']:.4f}",
        *spread("itself"),
        f"{row['roofline']:.4f}",
        f"{row['peak_bytes'] / 1e6:.1f}",
        f"{row['measured_bytes'] / 1e6:.1f}",
        f"{row['step_s']:.3f}",
        f"{row['ops_s']:.3f}",
    )


def report(rows: list[Row], repeats: int) -> str:
    held = list(checks(rows))
    failed = [what for what, holds in held if not holds]
    return "\n".join(
        [
            f"gcsolve {gcsolve.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} thread, CPU seconds, medians of {repeats} interleaved runs",
            "",
            "Step time as a multiple of store-all's: predicted from measured ops; measured (the rounds' median ratio, the",
            "middle half of them, the three fastest runs against store-all's); store-all's own against itself in the same",
            "rounds; predicted by the roofline. Then the step's peak, and the store-all step's seconds, measured and summed",
            "from its ops.",
            "",
            text_table(HEADS, [cells(row) for row in rows], right=range(2, len(HEADS))),
            "",
            f"{len(held) - len(failed)} of {len(held)} checks hold",
            *(f"FAILS: {what}" for what in failed),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predicted step time ratios against measured ones.")
    parser.add_argument("--models", nargs="+", choices=list(REDUCED), help="default: all")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved runs (default: 15)")
    parser.add_argument("--quick", action="store_true", help="one small model; nothing is written")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_memory()
    chosen = QUICK if arguments.quick else {name: REDUCED[name] for name in arguments.models or REDUCED}
    stored = RESULTS / "cost_accuracy.json"
    known: dict[str, list[Row]] = json.loads(stored.read_text()) if stored.exists() and not arguments.quick else {}
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["XDG_CACHE_HOME"] = fresh
        for name, factory in chosen.items():
            known[name] = list(rows_of(name, factory(), arguments.repeats))
            gc.collect()
    rows = [row for name in chosen for row in known[name]]
    if not arguments.quick:
        rows = [row for name in REDUCED for row in known.get(name, ())]
        stored.write_text(json.dumps(known, indent=1) + "\n")
        (RESULTS / "cost_accuracy.txt").write_text(report(rows, arguments.repeats) + "\n")
    print(report(rows, arguments.repeats))
    return 0 if all(holds for _, holds in checks(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
