"""Segments of the forward order: the shared half of `uniform`, `blocks` and `chen`."""

from __future__ import annotations

from collections.abc import Sequence

from gcsolve.graph import Graph


def crossing_values(graph: Graph, segment_of: Sequence[int], last: int | None = None) -> frozenset[int]:
    """What a plan with one checkpoint per segment keeps.

    Args:
        graph: the step.
        segment_of: for each forward node its segment, -1 for none.
        last: a segment whose values are all kept: rerunning what the backward reads first saves nothing.

    Returns:
        forward values that are read in another segment than their own, all values made outside any segment, and all
        values of segment `last`.
    """
    kept: set[int] = set()
    for v, value in enumerate(graph.values):
        if value.producer >= graph.backward_start:
            continue
        own = segment_of[value.producer]
        read_elsewhere = any(segment_of[j] != own for j in graph.readers[v] if j < graph.backward_start)
        if own == -1 or own == last or read_elsewhere:
            kept.add(v)
    return frozenset(kept)
