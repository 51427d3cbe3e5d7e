"""`gcsolve.fit`: the largest batch size whose training step fits a device's memory, without allocating the step.

For each batch size tried: the store-all peak, the least peak for which a schedule was found, and the overhead of the plan
that fits. If a batch size fits, smaller ones are taken to fit too, so a range is searched: powers of two up to the first
that does not fit, then interpolation between the largest that fits and the smallest that does not, where the straight line
through their least peaks meets the budget.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from gcsolve.cost.devices import get_device
from gcsolve.errors import ArgumentError, InfeasibleBudget
from gcsolve.lowering.costed import Costed
from gcsolve.lowering.node_facts import tensors_of
from gcsolve.plan_record import SolverOptions
from gcsolve.report.tables import text_table
from gcsolve.report.timeline import timeline
from gcsolve.session import Session, Settings, StepOptions, TracedCall, check_request
from gcsolve.simulate import simulate
from gcsolve.solver.base import Solver
from gcsolve.solver.floor import alive_at_least, peak_floor
from gcsolve.solver.front import solve_problem
from gcsolve.util.checks import whole
from gcsolve.util.factory import RETURNS, FactoryResult, call_factory, factory_name, parameters_of
from gcsolve.util.progress import shown
from gcsolve.util.sizes import size_text

MIN_ADVICE_SHARE = 0.15  # of the peak: kinds of bytes with a smaller share get no advice


@dataclass(frozen=True)
class FitRow:
    """One batch size. Bytes are predicted peaks of a whole step.

    Attributes:
        batch: the batch size.
        store_all_bytes: the peak when nothing is recomputed.
        least_bytes: the least peak for which a schedule was found, with any number of reruns. If `floor_bytes` is above the
            budget, no schedule is looked for, and this is `floor_bytes`.
        floor_bytes: no schedule at all has a lower peak (proven).
        peak_bytes, overhead: of the plan that fits; None if none does.
        peak_at: the op at the peak of the plan that fits, else of the schedule with the least peak, else the op that sets
            the floor.
        parts: (kind, bytes) at that peak, largest first; the logits and values of their size are a kind of their own.
        advice: what would lower that peak, the largest part first.
    """

    batch: int
    store_all_bytes: int
    least_bytes: int
    floor_bytes: int
    peak_bytes: int | None
    overhead: float | None
    peak_at: str
    parts: tuple[tuple[str, int], ...]
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None

    @property
    def hopeless(self) -> bool:
        """Whether it is proven that no schedule at all fits."""
        return not self.fits and self.least_bytes == self.floor_bytes


@dataclass(frozen=True)
class Fit:
    """The answer of `gcsolve.fit`: a row for each batch size tried, by rising batch size."""

    device: str
    budget_bytes: int
    rows: tuple[FitRow, ...]

    @property
    def largest_batch(self) -> int | None:
        """The largest batch size tried that fits; None if none does."""
        return max((row.batch for row in self.rows if row.fits), default=None)

    def summary(self) -> str:
        """The answer as text, a table with a line for each batch size, and what sets the limit."""
        largest = self.largest_batch
        limit = next((row for row in self.rows if not row.fits), self.rows[-1])
        answer = "none of the batch sizes tried fits" if largest is None else f"batch {largest} fits"
        columns = ("batch", "store-all", "least", "plan that fits", "overhead", "at the peak")
        parts = ", ".join(f"{kind} {size_text(size)}" for kind, size in limit.parts)
        missing = f"short of {size_text(limit.least_bytes - self.budget_bytes)}"
        missing += ", whatever is recomputed" if limit.hopeless else ""
        what = "its peak" if limit.fits else f"no plan: {missing}"
        return "\n".join(
            [
                f"{self.device}, {size_text(self.budget_bytes)} to use: {answer}",
                text_table(columns, [_cells(row) for row in self.rows], right=range(5)),
                f"batch {limit.batch}, {what}: {parts}",
                *(f"- {line}" for line in limit.advice),
            ]
        )

    def __str__(self) -> str:
        return self.summary()


def _cells(row: FitRow) -> tuple[str, ...]:
    """The cells of one line of the summary's table."""
    plan = ("none", "") if row.peak_bytes is None else (size_text(row.peak_bytes), f"{row.overhead:.2%}")
    least = f"{'≥ ' if row.hopeless else ''}{size_text(row.least_bytes)}"
    return (str(row.batch), size_text(row.store_all_bytes), least, *plan, row.peak_at)


def fit(
    factory: Callable[..., Any],
    batches: Iterable[int] = range(1, 65),
    *,
    seq: int | None = None,
    budget_gb: float | None = None,
    budget: str | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 20.0,
    gap: float = 0.005,
    progress: bool | None = None,
    **step: Unpack[StepOptions],
) -> Fit:
    """Find the largest batch size whose training step fits a device, and what it costs there.

    Args:
        factory: called as `factory(batch=...)`, and with `seq=` if it is given; returns (model, example_input) or
            (model, example_input, loss). For a GPU it is called under `torch.device("meta")`, so that nothing is
            allocated; if it raises there, it is called again without.
        batches: the batch sizes. A range is searched for the largest that fits; of any other iterable all are tried.
        seq: the sequence length, passed to the factory.
        budget_gb, budget: GB (1e9 bytes) or a size ("20GiB"); default: the device's memory less its reserve.
        solver, progress: as for `solve`.
        time_limit_s, gap: as for `solve`, for each batch size.
        step: optimizer, scope, cost, device, backward_from, gradient_accumulation, autocast_backward, as for `solve`; `loss`
            if the factory returns none.

    Returns:
        a `Fit`; its `summary()` names the largest batch that fits, where the peak sits and what would lower it.

    Raises:
        ArgumentError: there are no batch sizes or one is not a whole number ≥ 1; the factory takes no `batch`, raises, or
            returns something else; otherwise as `solve`.
        TraceError: as `solve`.

    Examples:
        >>> import torch, gcsolve
        >>> def mlp(batch):
        ...     return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(batch, 64)
        >>> gcsolve.fit(mlp, range(1, 20000), device="rtx4090", budget="40MB").largest_batch is not None
        True
    """
    if _is_number(budget):
        raise ArgumentError(
            f'budget={budget!r} is a share of a peak that differs by batch size; give a size, as in "20GiB", or budget_gb=20'
        )
    options = SolverOptions(solver, time_limit_s, gap)
    check_request(budget_gb, budget, options)
    device = step.get("device")
    sizes = _checked(batches)
    keywords = _keywords(factory, seq)
    memory: list[tuple[str, int]] = []  # (device, budget in bytes), known once there is a model

    def row_of(batch: int) -> FitRow:
        with shown(progress, f"batch {batch}"):
            model, example, loss = _call_on_meta(factory, {"batch": batch, **keywords}, device)
            if loss is not None and step.get("loss") is not None:
                raise ArgumentError("the factory returns a loss, and loss= is given too; leave one of them out")
            settings = Settings.checked(model, **{**step, "loss": loss or step.get("loss")})
            session = Session.of(model, example, settings)
            if not memory:
                memory.append((settings.device.name, session.budget_bytes(budget_gb, budget)))
            return _row(batch, session, memory[0][1], options)

    rows: dict[int, FitRow] = {}
    for batch in _searched(sizes, rows, memory) if isinstance(batches, range) else sizes:
        rows[batch] = row_of(batch)
    return Fit(*memory[0], tuple(rows[b] for b in sorted(rows)))


def _is_number(budget: Any) -> bool:
    """Whether the budget is a number or the text of one, and so not a size."""
    try:
        float(budget)
    except (TypeError, ValueError):
        return False
    return True


def _checked(batches: Iterable[int]) -> list[int]:
    """The distinct batch sizes, rising; else an `ArgumentError`."""
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise ArgumentError(
            f"batches={batches!r} must be a list or range of whole numbers ≥ 1, as in range(1, 65) or [4, 8]"
        )
    sizes = list(batches)
    if not sizes:
        raise ArgumentError(f"batches={batches!r} is empty: it must be one or more whole numbers ≥ 1")
    return sorted({whole(f"batches[{i}]", b, least=1) for i, b in enumerate(sizes)})


def _keywords(factory: Callable[..., Any], seq: int | None) -> dict[str, int]:
    """The factory's keywords beside `batch`: `seq` if it is given. Raises `ArgumentError` for a factory without them."""
    if not callable(factory):
        raise ArgumentError(f"factory={factory!r} is not callable; pass a function of batch (and seq)")
    keywords = {} if seq is None else {"seq": whole("seq", seq, least=1)}
    parameters = parameters_of(factory)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return keywords
    for name in ("batch", *keywords):
        if name not in parameters:
            raise ArgumentError(
                f"the factory takes {', '.join(parameters) or 'nothing'}, not {name}=: write it as def "
                f"{factory_name(factory).rpartition(':')[2]}({', '.join(('batch', *keywords))}), returning {RETURNS}"
            )
    if seq is None and "seq" in parameters and parameters["seq"].default is inspect.Parameter.empty:
        raise ArgumentError(
            f"the factory takes {', '.join(parameters)}, and seq was not given: pass seq= (on the command line --seq)"
        )
    return keywords


def _call_on_meta(factory: Callable[..., Any], keywords: dict[str, int], device: Any) -> FactoryResult:
    """(model, example_input, loss) from the factory; on meta if the device is not a CPU and the factory works there."""
    if device is not None and get_device(device).kind != "cpu":
        # A factory that reads a tensor's value while it builds the model fails on meta, with errors of many kinds.
        with contextlib.suppress(Exception), torch.device("meta"):
            return call_factory(factory, keywords)
    return call_factory(factory, keywords)


def _searched(sizes: list[int], rows: dict[int, FitRow], memory: list[tuple[str, int]]) -> Iterator[int]:
    """The batch sizes to try, one after the other; the caller puts the row of each into `rows` before it asks for the next."""
    high = 0
    while True:
        yield sizes[high]
        if not rows[sizes[high]].fits or high == len(sizes) - 1:
            break
        high = min(2 * high + 1, len(sizes) - 1)
    low = max((i for i, b in enumerate(sizes) if b in rows and rows[b].fits), default=-1)
    while low >= 0 and high - low > 1:
        below, above = rows[sizes[low]].least_bytes, rows[sizes[high]].least_bytes
        share = (memory[0][1] - below) / (above - below) if above > below else 0.5
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        yield sizes[middle]
        low, high = (middle, high) if rows[sizes[middle]].fits else (low, middle)


def _row(batch: int, session: Session, allowed_bytes: int, options: SolverOptions) -> FitRow:
    """Solve the session's step for the budget, and describe the peak of the plan, or of the least schedule found."""
    call = session.call
    problem = call.costed.problem
    floor, node = peak_floor(problem)
    if floor > allowed_bytes:
        return _row_at_floor(batch, call, floor, node)
    least = solve_problem(problem.with_budget(floor), "greedy", time_limit_s=options.time_limit_s)
    schedule, peak, overhead, least_bytes = least.schedule, None, None, least.peak_bytes
    try:
        solution = session.solution(allowed_bytes, options)
        schedule, peak, overhead = solution.schedule, solution.peak_bytes, solution.overhead
        least_bytes = min(least_bytes, solution.peak_bytes)
    except InfeasibleBudget as error:
        least_bytes = min(least_bytes, error.least_bytes or least_bytes)
    assert schedule is not None
    replay = simulate(problem, schedule)
    lifetimes = timeline(problem, schedule)
    action: Any = schedule.actions[replay.peak_action]
    live = [life.value for life in lifetimes.alive(lifetimes.peak)]
    peak_at, parts, advice = _peak_description(call.costed, action.node, live, dict(replay.breakdown))
    return FitRow(
        batch=batch,
        store_all_bytes=call.store_all_bytes,
        least_bytes=least_bytes,
        floor_bytes=floor,
        peak_bytes=peak,
        overhead=overhead,
        peak_at=peak_at,
        parts=parts,
        advice=advice,
    )


def _row_at_floor(batch: int, call: TracedCall, floor: int, node: int) -> FitRow:
    """The row of a batch size that no schedule makes fit.

    Args:
        floor: bytes that every schedule needs.
        node: index of the node that needs them; -1: they are what is alive during the whole step.
    """
    graph = call.costed.problem.graph
    bytes_by_kind: dict[str, int] = {}
    live = alive_at_least(graph, node)
    for kind, size in (*graph.external, *((graph.values[v].kind, graph.values[v].size_bytes) for v in live)):
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
    if node >= 0:
        bytes_by_kind["workspace"] = graph.nodes[node].workspace_bytes
    # The floor may be above what the node itself needs: then it is set on the way to the node's inputs.
    beyond_node = floor - sum(bytes_by_kind.values())
    bytes_by_kind["activations"] = bytes_by_kind.get("activations", 0) + beyond_node
    peak_at, parts, advice = _peak_description(call.costed, node, live, bytes_by_kind)
    return FitRow(
        batch=batch,
        store_all_bytes=call.store_all_bytes,
        least_bytes=floor,
        floor_bytes=floor,
        peak_bytes=None,
        overhead=None,
        peak_at=peak_at,
        parts=parts,
        advice=advice,
    )


def _peak_description(
    costed: Costed, node: int, live: Sequence[int], bytes_by_kind: dict[str, int]
) -> tuple[str, tuple[tuple[str, int], ...], tuple[str, ...]]:
    """`peak_at`, `parts` and `advice` of a row, at the moment when `node` runs and the values `live` are alive."""
    nodes = costed.problem.graph.nodes
    peak_at = nodes[node].where() if node >= 0 else "every moment of the step"
    parts = _parts(costed, live, bytes_by_kind)
    return peak_at, parts, _advice(parts, sum(size for _, size in parts), peak_at, node == len(nodes) - 1)


# --- where the peak sits and what would lower it ---------------------------------------------------------------------

LOGITS = "logits and their gradient"


def _parts(costed: Costed, live: Sequence[int], bytes_by_kind: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """(kind, bytes) at the peak, largest first, where values with as many elements as the logits are a kind of their own."""
    graph, logits_elements = costed.problem.graph, _logits_elements(costed)
    parts = {**bytes_by_kind, LOGITS: 0}
    for value in [graph.values[v] for v in live] if logits_elements else ():
        origin = costed.lowered.origin[value.producer]
        elements = [t.numel() for t in tensors_of(origin)] if origin is not None else []
        if logits_elements in elements and value.kind in bytes_by_kind:
            parts[LOGITS] += value.size_bytes
            parts[value.kind] -= value.size_bytes
    return tuple(sorted(((kind, size) for kind, size in parts.items() if size), key=lambda part: -part[1]))


def _logits_elements(costed: Costed) -> int:
    """The number of elements of the largest log-softmax in the step, which has the logits' shape; 0 without one."""
    softmaxes = [n for n in costed.lowered.origin if n is not None and str(n.target).startswith("aten._log_softmax.")]
    return max((t.numel() for n in softmaxes for t in tensors_of(n)), default=0)


_ADVICE = {
    LOGITS: "compute the loss in chunks of tokens, so that only a chunk's logits live",
    "parameters": "hold them in 16 bits, or freeze and quantize a base and train adapters",
    "optimizer": "an optimizer with less state (8 bits, SGD), or train fewer parameters",
    "master weights": "an optimizer that rounds stochastically in 16 bits, without 32-bit copies",
    "gradients": "train fewer parameters, or step each parameter as its gradient is made",
    "accumulated gradients": "accumulate in 16 bits, or over fewer parameters",
    "activations": "a smaller batch with accumulated gradients, or a shorter sequence",
    "outputs": "return the loss alone, not what it was computed from",
    "inputs": "a smaller batch",
}


def _advice(parts: tuple[tuple[str, int], ...], peak: int, peak_at: str, in_optimizer: bool) -> tuple[str, ...]:
    """A line for each large part of the peak: its share, and what would lower it."""
    lines = []
    for kind, size in parts:
        if size < MIN_ADVICE_SHARE * peak:
            continue
        remedy = _ADVICE.get(kind)
        if kind == "workspace":
            remedy = "a fused optimizer (fused=True)" if in_optimizer else f"another kernel than that of {peak_at}"
        if remedy:
            lines.append(f"{kind}: {size / peak:.0%} of the peak; what would lower it: {remedy}")
    return tuple(lines)
