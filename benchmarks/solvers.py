"""Solution quality and speed of every solver: one table, graph x budget x solver.

    python benchmarks/solvers.py [--graphs DIR] [--problems DIR] [--only GRAPH ...] [--solver NAME ...] [--budget SHARE ...]
    python benchmarks/solvers.py --graphs DIR --store

Without arguments it runs on layered graphs made here. `--graphs` names a folder of JSON files (`cost`, `bytes`,
`edges`, `backward_start`), `--problems` a folder of pickled `Problem`s (only open your own: pickle runs code).
Budgets are shares of the store-all peak above external bytes; "min" is the least feasible budget and 2 %. "one_epoch" is
`retention` with at most one rerun a value, to a gap of 0.001 %.

`--store` runs `auto` and "one_epoch" on the graphs of `KNOWN` at the budgets given there, and writes
benchmarks/results/solvers.json and .txt after each graph, whose rows there it replaces: --only, --budget and --solver say
which.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gcsolve
from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Solver
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import least_kept_budget
from gcsolve.solver.registry import solvers
from gcsolve.solver.retention import Retention

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
PROVES = {
    Certificate.ANY_SCHEDULE: "any",
    Certificate.ASCENDING: "ascending",
    Certificate.ONE_RERUN: "one rerun",
}
ONE_EPOCH = "one_epoch"
ONE_EPOCH_GAP = 1e-5
STORED = ("auto", ONE_EPOCH)
KNOWN: dict[str, dict[str, float | None]] = {
    "VGG16": {"0.9": 1.968, "0.85": 1.968},
    "UNet": {"0.9": 1.129, "0.8": 1.984, "0.7": 2.967, "0.6": 4.451, "0.5": 6.967, "0.45": 9.321, "0.4": 13.788},
    "MobileNet": {
        "0.9": 0.163,
        "0.8": 0.370,
        "0.7": 0.626,
        "0.6": 1.067,
        "0.5": 1.635,
        "0.4": 2.468,
        "0.3": 4.572,
        "0.27": None,
        "0.25": None,
    },
    "ResNet50": {
        "0.9": 0.108,
        "0.8": 0.279,
        "0.7": 0.564,
        "0.6": 0.963,
        "0.5": 1.499,
        "0.4": 2.334,
        "0.3": 3.741,
        "0.25": 4.767,
        "0.18": None,
        "0.15": None,
    },
    "RL100": {"0.9": 0.789, "0.8": 2.296, "0.6": None, "0.5": None},
    "RL1000": {"0.9": None, "0.8": None, "0.5": None},
}
"""graph -> budget -> overhead in % of the best plan known from elsewhere with at most one rerun a value; None: none is."""
KNOWN_DIGITS = 0.0005


def layered(blocks: int, ops: int) -> Problem:
    """Blocks of `ops` forward ops each, wide inside and narrow between; the backward mirrors the forward."""
    nodes: list[Node] = []
    values: list[Value] = []
    costs: list[float] = []

    def run(inputs: set[int], size: int, cost: float, module: str, rerunnable: bool) -> int:
        values.append(Value(f"v{len(values)}", size, len(nodes)))
        nodes.append(Node(f"n{len(nodes)}", tuple(sorted(inputs)), (len(values) - 1,), 0, rerunnable, "op", module))
        costs.append(cost)
        return len(values) - 1

    x = run(set(), 256, 1.0, "embed", True)
    forward = []
    for block in range(blocks):
        entry = x
        for k in range(ops):
            size = 256 if k == ops - 1 else 512 + 256 * (k % 3)
            inputs = {x, entry} if k == ops - 1 else {x}
            cost = 20.0 if k % 4 == 1 else 1.0
            forward.append((x, y := run(inputs, size, cost, f"h.{block}", True), cost))
            x = y
    start = len(nodes)
    gradient = x
    for read, made, cost in reversed(forward):
        gradient = run({gradient, read, made}, values[read].size_bytes, 2 * cost, "", False)
    graph = Graph(tuple(nodes), tuple(values), start, (("parameters", 4096),))
    return Problem(graph, tuple(costs), 0)


def load(graphs: Path | None, problems: Path | None) -> Iterator[tuple[str, Problem]]:
    if graphs is None and problems is None:
        yield "layered 12 x 12", layered(12, 12)
        yield "layered 48 x 12", layered(48, 12)
        yield "layered 100 x 15", layered(100, 15)
    for path in sorted(graphs.glob("*.json")) if graphs else ():
        raw = json.loads(path.read_text())
        yield (
            path.stem,
            Problem.from_arrays(
                raw["cost"], raw["bytes"], [tuple(e) for e in raw["edges"]], raw["backward_start"], budget_bytes=0
            ),
        )
    for path in sorted(problems.glob("*.pkl")) if problems else ():
        yield path.stem, pickle.loads(path.read_bytes())


def run(problem: Problem, graph: str, budget: str, solver: str, *, gap: float, time_limit_s: float) -> Row:
    """One solve, as it stands in the table; `problem` has the budget."""
    method: str | Solver = Retention(epochs=False, find_least=False) if solver == ONE_EPOCH else solver
    external = problem.graph.external_bytes
    gap = min(gap, ONE_EPOCH_GAP) if solver == ONE_EPOCH else gap
    began = time.process_time()
    solution = solve_problem(problem, method, gap=gap, time_limit_s=time_limit_s)
    known = KNOWN.get(graph, {}).get(budget)
    planned = solution.schedule is not None
    return {
        "budget": budget,
        "solver": solver,
        "status": solution.status.name,
        "overhead": solution.overhead if planned else None,
        "bound": solution.lower_bound,
        "any_bound": solution.any_bound,
        "certificate": "-" if solution.max_runs else PROVES.get(solution.certificate, "-"),
        "gap": solution.gap if planned else None,
        "peak": (solution.peak_bytes - external) / (store_all_bytes(problem) - external) if planned else None,
        "seconds": solution.solve_s,
        "cpu_seconds": time.process_time() - began,
        "known": known,
        "reached": None if known is None else planned and 100 * solution.overhead <= known + KNOWN_DIGITS,
    }


def store_all_bytes(problem: Problem) -> int:
    return simulate(problem, schedule_from_order(problem.graph, range(len(problem.graph.nodes)))).peak_bytes


HEADS = (
    *(("graph", 17), ("budget", 6), ("solver", 12), ("status", 10), ("overhead", 9), ("bound", 8), ("any", 8)),
    *(("gap", 8), ("peak", 6), ("seconds", 7), ("CPU s", 6), ("known", 8), ("reached", 7), ("bound holds for", 0)),
)
LEFT = 4
"""Columns that begin at the left."""


def text(graph: str, row: Row) -> str:
    known = "-" if row["known"] is None else f"{row['known']:.3f}%"
    reached = {None: "-", True: "yes", False: "NO"}[row["reached"]]
    shares = [percent(row[key]) for key in ("overhead", "bound", "any_bound", "gap")]
    peak = percent(row["peak"], 1)
    times = f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}"
    cells = (graph, row["budget"], row["solver"], row["status"], *shares, peak, *times, known, reached)
    return line((*cells, row["certificate"]))


def percent(share: float | None, digits: int = 3) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def line(cells: tuple[str, ...]) -> str:
    padded = [
        cell.ljust(width) if at < LEFT or not width else cell.rjust(width)
        for at, (cell, (_, width)) in enumerate(zip(cells, HEADS, strict=True))
    ]
    return " ".join(padded)


def report(results: dict[str, Any]) -> str:
    lines = [results["where"], "", line(tuple(title for title, _ in HEADS))]
    lines += [text(name, row) for name, rows in results["graphs"].items() for row in rows]
    judged = [row["reached"] for rows in results["graphs"].values() for row in rows if row["reached"] is not None]
    return "\n".join([*lines, "", f"{sum(judged)} of {len(judged)} known values reached"])


def where() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    ).stdout.strip()
    return f"gcsolve {gcsolve.__version__} ({commit}), Python {platform.python_version()}, {os.cpu_count()} CPU cores, 1 thread"


def stored() -> dict[str, Any]:
    path = RESULTS / "solvers.json"
    return json.loads(path.read_text()) if path.exists() else {"graphs": {}}


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """`new`, and those of `old` that are of another budget or solver; largest budgets first."""
    rows = {(row["budget"], row["solver"]): row for row in [*old, *new]}
    return sorted(rows.values(), key=lambda row: (-float(row["budget"]), row["solver"]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--only", nargs="+", metavar="GRAPH", help="default: all")
    parser.add_argument("--solver", nargs="+", choices=[*solvers(), ONE_EPOCH])
    parser.add_argument("--budget", nargs="+")
    parser.add_argument("--gap", type=float, default=0.005)
    parser.add_argument("--time-limit-s", type=float, default=60.0)
    parser.add_argument("--store", action="store_true", help="only graphs and budgets of KNOWN; write the results")
    asked = parser.parse_args(argv)
    print(line(tuple(title for title, _ in HEADS)))
    for name, problem in load(asked.graphs, asked.problems):
        if (asked.only and name not in asked.only) or (asked.store and name not in KNOWN):
            continue
        external = problem.graph.external_bytes
        room = store_all_bytes(problem) - external
        budgets = asked.budget or (list(KNOWN[name]) if asked.store else ["0.8", "0.6", "0.4", "min"])
        rows = []
        for budget in budgets:
            share = 1.02 * (least_kept_budget(problem).bytes - external) / room if budget == "min" else float(budget)
            allowed = problem.with_budget(external + round(share * room))
            for solver in asked.solver or (STORED if asked.store else solvers()):
                if solver == ONE_EPOCH and problem.graph.backward_start == len(problem.graph.nodes):
                    continue  # no backward: that class keeps everything
                rows.append(run(allowed, name, budget, solver, gap=asked.gap, time_limit_s=asked.time_limit_s))
                print(text(name, rows[-1]), flush=True)
        if asked.store:
            results: dict[str, Any] = {**stored(), "where": where()}
            results["graphs"][name] = merged(results["graphs"].get(name, []), rows)
            (RESULTS / "solvers.json").write_text(json.dumps(results, indent=1) + "\n")
            (RESULTS / "solvers.txt").write_text(report(results) + "\n")


if __name__ == "__main__":
    main()
