"""Every architecture of `architectures.py`, planned and trained, as one table: `python benchmarks/zoo.py`.

Each is planned at half its store-all peak, or a little above its least budget where that is higher, trained for three
optimizer steps beside the untouched model and compared bitwise. Each runs in a process of its own. Results go to
benchmarks/results/zoo.json and .txt; models named by --models replace their part of it. The exit status is 1 when a check
fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks.architectures import ARCHITECTURES, architecture
from benchmarks.main_job import RESULTS, Row, mb, say, table, where

RIVALS = ("uniform", "blocks")


# --- one architecture ------------------------------------------------------------------------------------------------


def run_architecture(name: str, batch: int, time_limit_s: float = 10.0) -> Row:
    """Plan, train and measure one of them; a refusal is a row with the error's text.

    Args:
        batch: examples a step.
        time_limit_s: for the solver, and again for the search of the least budget.
    """
    model, example, loss = architecture(name, batch)
    try:
        store_all = gcsolve.solve(model, example, budget=1.0, solver="store_all", loss=loss, progress=False)
    except gcsolve.GcsolveError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    budget = chosen_budget(store_all, time_limit_s)
    plan = store_all.at(budget=f"{budget}B", solver="auto", time_limit_s=time_limit_s, progress=False)
    report = plan.verify(steps=3, repeats=0)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ops": len(plan.problem.graph.nodes),
        "store_all_bytes": store_all.baseline_peak_bytes,
        "eager_bytes": report.eager_peak_bytes,
        "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": report.measured_peak_bytes,
        "equal": not report.differences,
        "differences": list(report.differences[:5]),
        "overhead": plan.overhead,
        "rivals": {rival: rival_overhead(plan, rival, time_limit_s) for rival in RIVALS},
        "any_bound": plan.any_bound,
        "trace_s": plan.trace_s,
        "solve_s": plan.solution.solve_s,
    }


def chosen_budget(store_all: gcsolve.Plan, time_limit_s: float) -> int:
    """Half of the store-all peak; where that cannot be met, the least budget + 5 %, or half way from the least to the
    store-all peak if that is lower (weights that dwarf the activations leave less room than 5 %)."""
    peak = store_all.baseline_peak_bytes
    least = store_all.minimum_budget(time_limit_s).one_rerun_bytes
    return max(peak // 2, min(least + least // 20, (least + peak) // 2))


def rival_overhead(plan: gcsolve.Plan, solver: str, time_limit_s: float) -> float | None:
    """Another method's overhead at the plan's budget; None where it has no plan that fits."""
    found = gcsolve.solve_problem(plan.problem, solver, time_limit_s=time_limit_s)
    fits = found.schedule is not None and found.peak_bytes <= plan.budget_bytes
    return found.overhead if fits else None


# --- checks: what the table must show --------------------------------------------------------------------------------


def checks(name: str, row: Row) -> Iterator[tuple[str, bool]]:
    """(what, whether it holds) for a row that is no refusal."""
    ratio = row["predicted_bytes"] / row["measured_bytes"]
    yield f"{name}: 3 steps bitwise equal ({'; '.join(row['differences'])})", row["equal"]
    yield f"{name}: measured peak within budget", row["measured_bytes"] <= row["budget_bytes"]
    yield f"{name}: predicted within 2 % of measured ({ratio:.4f})", abs(ratio - 1) <= 0.02
    rivals = [o for o in row["rivals"].values() if o is not None]
    yield f"{name}: overhead ≤ uniform's and blocks'", all(row["overhead"] <= o + 1e-9 for o in rivals)


# --- text ------------------------------------------------------------------------------------------------------------

HEADS = (
    "architecture",
    "ops",
    "store-all MB",
    "/ untouched",
    "budget",
    "equal",
    "kept",
    "predicted/measured",
    "overhead",
    *RIVALS,
    "bound (any)",
    "trace s",
    "solve s",
)


def cells(name: str, row: Row) -> list[str]:
    if "refused" in row:
        return [name, "", "", "", "", "refused", *[""] * (len(HEADS) - 6)]
    rivals = [row["rivals"][rival] for rival in RIVALS]
    return [
        name,
        str(row["ops"]),
        mb(row["store_all_bytes"]),
        f"{row['store_all_bytes'] / row['eager_bytes']:.3f}",
        f"{row['budget_bytes'] / row['store_all_bytes']:.0%}",
        "yes" if row["equal"] else "NO",
        "yes" if row["measured_bytes"] <= row["budget_bytes"] else "NO",
        f"{row['predicted_bytes'] / row['measured_bytes']:.4f}",
        f"{row['overhead']:.2%}",
        *("none fits" if o is None else f"{o:.2%}" for o in rivals),
        f"{row['any_bound']:.2%}",
        f"{row['trace_s']:.1f}",
        f"{row['solve_s']:.1f}",
    ]


def report(results: dict[str, Any]) -> str:
    rows: dict[str, Row] = {name: results["rows"][name] for name in ARCHITECTURES if name in results["rows"]}
    planned = {name: row for name, row in rows.items() if "refused" not in row}
    held = [check for name, row in planned.items() for check in checks(name, row)]
    failed = [what for what, holds in held if not holds]
    equal = sum(row["equal"] for row in planned.values())
    return "\n".join(
        [
            results["where"],
            "",
            *table(HEADS, [cells(name, row) for name, row in rows.items()]),
            "",
            f"{len(planned)} of {len(rows)} planned; {equal} of them bitwise equal over 3 optimizer steps",
            *(f"REFUSED {name}: {row['refused']}" for name, row in rows.items() if "refused" in row),
            f"{len(held) - len(failed)} of {len(held)} checks hold",
            *(f"FAILS {what}" for what in failed),
        ]
    )


# --- running ---------------------------------------------------------------------------------------------------------


def in_a_process(name: str, batch: int) -> Row:
    command = [sys.executable, __file__, "--child", name, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every architecture of the zoo, planned and trained, as one table.")
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), metavar="NAME", help="default: all")
    parser.add_argument("--batch", type=int, default=8, help="examples a step")
    parser.add_argument("--child", choices=list(ARCHITECTURES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(run_architecture(arguments.child, arguments.batch)))
        return 0

    path = RESULTS / "zoo.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    results["where"] = f"{where()}; batch {arguments.batch}"
    for name in arguments.models or ARCHITECTURES:
        results["rows"][name] = in_a_process(name, arguments.batch)
        say(" | ".join(cells(name, results["rows"][name])))
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".txt").write_text(report(results) + "\n")
    print(report(results))
    every = [check for name, row in results["rows"].items() if "refused" not in row for check in checks(name, row)]
    return 0 if all(holds for _, holds in every) else 1


if __name__ == "__main__":
    sys.exit(main())
