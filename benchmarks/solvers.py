"""Solution quality and speed of every solver: one table, graph x budget x solver.

    python benchmarks/solvers.py [--graphs DIR] [--problems DIR] [--solver NAME ...] [--budget SHARE ...]

Without arguments it runs on layered graphs made here. `--graphs` names a folder of JSON files (`cost`, `bytes`,
`edges`, `backward_start`), `--problems` a folder of pickled `Problem`s (only open your own: pickle runs code).
Budgets are shares of the store-all peak above external bytes; "min" is the least feasible budget and 2 %.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

from gcsolve.graph import Graph, Node, Value
from gcsolve.problem import Problem
from gcsolve.schedule import schedule_from_order
from gcsolve.simulate import simulate
from gcsolve.solvers.base import ANY_SCHEDULE, ASCENDING, ONE_RERUN, Solution
from gcsolve.solvers.front import solve_problem
from gcsolve.solvers.minimum import minimum_peak
from gcsolve.solvers.registry import solvers

PROVES = {ANY_SCHEDULE: "any", ASCENDING: "ascending", ONE_RERUN: "one rerun"}


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


def row(graph: str, budget: str, solution: Solution, share: float) -> str:
    bounds = f"{solution.lower_bound:9.3%} {solution.any_bound:9.3%} {solution.gap:8.3%}"
    numbers = f"{solution.overhead:9.3%} {bounds} {share:7.1%}"
    if solution.schedule is None:
        numbers = " ".join("-".rjust(width) for width in (9, 9, 9, 8, 7))
    proves = PROVES.get(solution.certificate, "-")
    name = f"{solution.solver:13} {solution.status.name:11}"
    return f"{graph:17} {budget:>6} {name} {numbers} {solution.solve_s:8.2f} {proves}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--solver", nargs="+", default=list(solvers()))
    parser.add_argument("--budget", nargs="+", default=["0.8", "0.6", "0.4", "min"])
    parser.add_argument("--gap", type=float, default=0.005)
    parser.add_argument("--time-limit-s", type=float, default=60.0)
    asked = parser.parse_args()
    head = ("overhead", 9), ("bound", 9), ("any", 9), ("gap", 8), ("peak", 7), ("seconds", 8)
    columns = " ".join(title.rjust(width) for title, width in head)
    print(f"{'graph':17} {'budget':>6} {'solver':13} {'status':11} {columns} bound holds for")
    for name, problem in load(asked.graphs, asked.problems):
        external = problem.graph.external_bytes
        stored = schedule_from_order(problem.graph, range(len(problem.graph.nodes)))
        room = simulate(problem, stored).peak_bytes - external
        for budget in asked.budget:
            if budget == "min":
                allowed = round(1.02 * (minimum_peak(problem).bytes - external))
            else:
                allowed = round(float(budget) * room)
            for solver in asked.solver:
                solution = solve_problem(
                    problem.with_budget(external + allowed), solver, gap=asked.gap, time_limit_s=asked.time_limit_s
                )
                share = (solution.peak_bytes - external) / room if room else 0.0
                print(row(name, budget, solution, share), flush=True)


if __name__ == "__main__":
    main()
