"""One checkpoint per repeated module: what frameworks' per-layer switch (`gradient_checkpointing_enable`) does.

A block is an outermost entry of a module list, seen as a path with a number in it: "transformer.h.3.attn" belongs to
block "transformer.h.3". Kept are values read outside their block and everything made outside blocks; all else inside
a block is rerun when the backward reaches it. The list must repeat: a list with one entry is no block. Modules
numbered inside a block belong to it. With no numbered path the plan is `store_all`.

Differs from the frameworks' switch in one point: it never reruns what the backward does not read.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import ClassVar

from gcsolve.graph import Graph
from gcsolve.problem import Problem
from gcsolve.solver.base import Solution
from gcsolve.solver.search.kept_replay import judged_kept
from gcsolve.solver.search.segments import crossing_values


@dataclass(frozen=True)
class Blocks:
    name: ClassVar[str] = "blocks"

    def solve(self, problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.005) -> Solution:
        started = time.perf_counter()
        kept = crossing_values(problem.graph, block_of(problem.graph))
        return judged_kept(self.name, problem, kept, started=started, gap=gap)


def block_of(graph: Graph) -> list[int]:
    """For each forward node the number of its block, -1 for none."""
    paths = [node.module.split(".") for node in graph.nodes[: graph.backward_start]]
    entries: dict[str, set[str]] = {}  # prefix -> the numbers seen after it
    for path in paths:
        for depth, part in enumerate(path):
            if part.isdecimal():
                entries.setdefault(".".join(path[:depth]), set()).add(part)
    number: dict[str, int] = {}
    return [number.setdefault(name, len(number)) if (name := _block_name(path, entries)) else -1 for path in paths]


def _block_name(path: list[str], entries: dict[str, set[str]]) -> str:
    """The shortest prefix of `path` that is an entry of a list with at least two entries; "" for none."""
    for depth, part in enumerate(path):
        if part.isdecimal() and len(entries[".".join(path[:depth])]) > 1:
            return ".".join(path[: depth + 1])
    return ""


def twins(graph: Graph, groups: int = 1) -> dict[int, int]:
    """Forward value -> the value at the same place of the first block like its own (itself in that first block).

    The same place: same module path below the block, op, rank among such nodes, output and size. With more `groups`,
    the blocks are cut into so many runs and only blocks of the same run are alike.
    """
    block = block_of(graph)
    count = max(block, default=0) + 1
    first: dict[tuple[object, ...], int] = {}
    rank: dict[tuple[object, ...], int] = {}
    found: dict[int, int] = {}
    for i, number in enumerate(block):
        if number < 0:
            continue
        node = graph.nodes[i]
        path = re.sub(r"\d+", "*", node.module, count=1)
        place = rank[number, path, node.op] = rank.get((number, path, node.op), -1) + 1
        for k, v in enumerate(node.outputs):
            found[v] = first.setdefault(
                (number * groups // count, path, node.op, place, k, graph.values[v].size_bytes), v
            )
    return found
