"""The one definition of a valid schedule, its peak bytes and its overhead.

Running a node: its inputs must be live; while it runs, everything live plus its new outputs plus its workspace counts,
on top of the external bytes. Then the frees that follow it take effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral

from gcsolve.errors import InvalidSchedule
from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Free, Schedule


@dataclass(frozen=True)
class Replay:
    """What a schedule does, action by action.

    `peak_bytes`: largest total, external bytes included; `peak_action`: index of the compute at which it stands.
    `cost`: cost of all runs; `overhead`: (cost - cost of running each node once) / cost of running each node once.
    `bytes_at`: one total per action, external bytes included: while a compute runs, or right after a free.
    `breakdown`: pairs (kind, bytes) of what is live at the peak, which sum to `peak_bytes`. Each kind appears once. The
    pairs are not sorted by size: first the kinds of external bytes in the order of `graph.external`, then the other
    kinds of live values in the order of `graph.values`, then workspace (unless a kind of that name came before).
    """

    peak_bytes: int
    peak_action: int
    cost: float
    overhead: float
    bytes_at: tuple[int, ...] = field(repr=False)
    breakdown: tuple[tuple[str, int], ...]


def simulate(problem: Problem, schedule: Schedule) -> Replay:
    """Replay `schedule` on `problem`, checking every rule.

    Raises:
        InvalidSchedule: an input is not live; a value is freed that is not live, or freed while pinned and still to be
            read; a live value is made again; a node never runs or runs out of its kind's rules; an action is none, or of
            a node or value that there is not. The text names the action and the node.
    """
    graph = problem.graph
    _check_actions(problem, schedule)
    live: set[int] = set()
    ran = [0] * len(graph.nodes)
    unread = [len(r) for r in graph.readers]  # distinct readers of a value that have not run yet
    live_bytes = graph.external_bytes
    bytes_at: list[int] = []
    peak = graph.external_bytes
    peak_action = 0

    for at, action in enumerate(schedule.actions):
        if isinstance(action, Compute):
            node = graph.nodes[action.node]
            for v in node.inputs:
                if v not in live:
                    raise InvalidSchedule(
                        f"action {at}: {node.where()} reads {graph.values[v].name}, which is not live"
                    )
            if ran[action.node] and not node.rerunnable:
                raise InvalidSchedule(f"action {at}: {node.where()} may run only once")
            if not ran[action.node]:
                for v in node.inputs:
                    unread[v] -= 1
            ran[action.node] += 1
            extra = node.workspace_bytes
            for v in node.outputs:
                value = graph.values[v]
                if v not in live:
                    live.add(v)
                    live_bytes += value.size_bytes
                elif value.pinned:
                    extra += value.size_bytes
                else:
                    raise InvalidSchedule(f"action {at}: {node.where()} makes {value.name}, which is live already")
            now = live_bytes + extra
            if now > peak:
                peak, peak_action = now, at
        else:
            value = graph.values[action.value]
            if action.value not in live:
                raise InvalidSchedule(f"action {at}: frees {value.name}, which is not live")
            if value.pinned and unread[action.value]:
                raise InvalidSchedule(f"action {at}: frees {value.name}, which is pinned until its last reader has run")
            live.discard(action.value)
            live_bytes -= value.size_bytes
            now = live_bytes
        bytes_at.append(now)

    for i, count in enumerate(ran):
        if not count:
            raise InvalidSchedule(f"{graph.nodes[i].where()} never runs")
    rerun = math.fsum(problem.cost[i] * (count - 1) for i, count in enumerate(ran) if count > 1)
    base = problem.total_cost
    return Replay(
        peak,
        peak_action,
        base + rerun,
        rerun / base if base else 0.0,
        tuple(bytes_at),
        _breakdown(problem, schedule, peak_action),
    )


def _check_actions(problem: Problem, schedule: Schedule) -> None:
    """Every action is a `Compute` or a `Free` of something that is there."""
    if not isinstance(schedule, Schedule) or not isinstance(schedule.actions, tuple):
        raise InvalidSchedule(f"it is of type {type(schedule).__name__}, not a Schedule with a tuple of actions")
    nodes, values = len(problem.graph.nodes), len(problem.graph.values)
    for at, action in enumerate(schedule.actions):
        if isinstance(action, Compute):
            what, index, count = "node", action.node, nodes
        elif isinstance(action, Free):
            what, index, count = "value", action.value, values
        else:
            raise InvalidSchedule(f"action {at} is {action!r}, neither a Compute nor a Free")
        if type(index) is bool or not isinstance(index, (int, Integral)) or not 0 <= index < count:
            raise InvalidSchedule(f"action {at}: there is no {what} {index!r}; they are 0..{count - 1}")


def _breakdown(problem: Problem, schedule: Schedule, peak_action: int) -> tuple[tuple[str, int], ...]:
    """Bytes by kind while action `peak_action` runs."""
    graph = problem.graph
    kinds: dict[str, int] = {}
    for kind, size in graph.external:
        kinds[kind] = kinds.get(kind, 0) + size
    live: set[int] = set()
    workspace = 0
    for action in schedule.actions[: peak_action + 1]:
        if isinstance(action, Compute):
            node = graph.nodes[action.node]
            workspace = node.workspace_bytes + sum(graph.values[v].size_bytes for v in node.outputs if v in live)
            live.update(node.outputs)
        else:
            live.discard(action.value)
    for v in sorted(live):
        kinds[graph.values[v].kind] = kinds.get(graph.values[v].kind, 0) + graph.values[v].size_bytes
    kinds["workspace"] = kinds.get("workspace", 0) + workspace
    return tuple(kinds.items())
