"""Will it fit? The step of a model at several batch sizes against one device's memory, nothing of it allocated.

For each batch size: the peak when everything is kept, the least peak a schedule was found for, and the overhead of the
plan that fits. What fits is taken to be monotone in the batch size, so a range is not walked through: powers of two up
to the first that does not fit, then between the last two, each time where a straight line through both least peaks
meets the budget.
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
from gcsolve.solver.front import solve_problem
from gcsolve.solver.minimum import alive_at_least, peak_floor
from gcsolve.util.checks import whole
from gcsolve.util.factory import RETURNS, FactoryResult, call_factory, factory_name, parameters_of
from gcsolve.util.progress import shown
from gcsolve.util.sizes import size_text

WORTH_SAYING = 0.15  # of the peak: what takes less is not advised about


@dataclass(frozen=True)
class FitRow:
    """One batch size. Bytes are predicted peaks of a whole step.

    `peak_bytes`, `overhead`: of the plan that fits, None when none does; `least_bytes`: the least peak found with any
    number of reruns; no schedule at all is below `floor_bytes`, and where that is above the budget nothing else is looked
    for (`least_bytes` is the floor then). `peak_at`: the op at the peak of the plan that fits, else of the one with the
    least peak, else the op that sets the floor; `parts`: (kind, bytes) there, largest first, the logits and what has their
    size apart from other activations; `advice`: what would lower that peak, most first.
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
        """Whether no schedule at all fits, proven."""
        return not self.fits and self.least_bytes == self.floor_bytes


@dataclass(frozen=True)
class Fit:
    """What `gcsolve.fit` found, by rising batch size."""

    device: str
    budget_bytes: int
    rows: tuple[FitRow, ...]

    @property
    def largest_batch(self) -> int | None:
        """The largest batch size tried that fits; None when none does."""
        return max((row.batch for row in self.rows if row.fits), default=None)

    def summary(self) -> str:
        """The answer, a table with a line a batch size, and what sets the limit."""
        fitting = self.largest_batch
        limit = next((row for row in self.rows if not row.fits), self.rows[-1])
        says = "none of the batch sizes tried fits" if fitting is None else f"batch {fitting} fits"
        heads = ("batch", "store-all", "least", "plan that fits", "overhead", "at the peak")
        parts = ", ".join(f"{kind} {size_text(size)}" for kind, size in limit.parts)
        short = size_text(limit.least_bytes - self.budget_bytes)
        proven = f"short of {short}, whatever is recomputed" if limit.hopeless else f"short of {short}"
        what = "its peak" if limit.fits else f"no plan: {proven}"
        return "\n".join(
            [
                f"{self.device}, {size_text(self.budget_bytes)} to use: {says}",
                text_table(heads, [_cells(row) for row in self.rows], right=range(5)),
                f"batch {limit.batch}, {what}: {parts}",
                *(f"- {line}" for line in limit.advice),
            ]
        )

    def __str__(self) -> str:
        return self.summary()


def _cells(row: FitRow) -> tuple[str, ...]:
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
        factory: called as `factory(batch=...)`, with `seq=` too when it is given; returns (model, example_input) or
            (model, example_input, loss). For a GPU it is called under `torch.device("meta")`, so that nothing is
            allocated; a factory that cannot be is called again without.
        batches: sizes to try. A range is searched, not walked through; any other iterable is tried to its last entry.
        seq: sequence length for the factory.
        budget_gb, budget: GB (1e9 bytes) or a size ("20GiB"); default: the device's memory less its reserve.
        solver, progress: as for `solve`.
        time_limit_s, gap: as for `solve`, for each batch size.
        step: optimizer, scope, cost, device, backward_from, gradient_accumulation, autocast_backward, as for `solve`; `loss`
            when the factory returns none.

    Returns:
        a `Fit`; its `summary()` names the largest batch that fits, where the peak sits and what would lower it.

    Raises:
        ArgumentError: no or impossible batch sizes; a factory that takes no `batch`, raises, or returns something else;
            otherwise as `solve`.
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
    asked = _keywords(factory, seq)
    memory: list[tuple[str, int]] = []  # device and budget, known once there is a model

    def tried(batch: int) -> FitRow:
        with shown(progress, f"batch {batch}"):
            model, example, loss = _made(factory, {"batch": batch, **asked}, device)
            if loss is not None and step.get("loss") is not None:
                raise ArgumentError("the factory returns a loss, and loss= is given too; leave one of them out")
            settings = Settings.checked(model, **{**step, "loss": loss or step.get("loss")})
            session = Session.of(model, example, settings)
            if not memory:
                memory.append((settings.device.name, session.budget_bytes(budget_gb, budget)))
            return _row(batch, session, memory[0][1], options)

    found: dict[int, FitRow] = {}
    for batch in _searched(sizes, found, memory) if isinstance(batches, range) else sizes:
        found[batch] = tried(batch)
    return Fit(*memory[0], tuple(found[b] for b in sorted(found)))


def _is_number(budget: Any) -> bool:
    try:
        float(budget)
    except (TypeError, ValueError):
        return False
    return True


def _checked(batches: Iterable[int]) -> list[int]:
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise ArgumentError(
            f"batches={batches!r} must be a list or range of whole numbers ≥ 1, as in range(1, 65) or [4, 8]"
        )
    listed = list(batches)
    if not listed:
        raise ArgumentError(f"batches={batches!r} is empty: it must be one or more whole numbers ≥ 1")
    return sorted({whole(f"batches[{i}]", b, least=1) for i, b in enumerate(listed)})


def _keywords(factory: Callable[..., Any], seq: int | None) -> dict[str, int]:
    if not callable(factory):
        raise ArgumentError(f"factory={factory!r} is not callable; pass a function of batch (and seq)")
    asked = {} if seq is None else {"seq": whole("seq", seq, least=1)}
    taken = parameters_of(factory)
    if taken is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return asked
    for name in ("batch", *asked):
        if name not in taken:
            raise ArgumentError(
                f"the factory takes {', '.join(taken) or 'nothing'}, not {name}=: write it as def "
                f"{factory_name(factory).rpartition(':')[2]}({', '.join(('batch', *asked))}), returning {RETURNS}"
            )
    if seq is None and "seq" in taken and taken["seq"].default is inspect.Parameter.empty:
        raise ArgumentError(
            f"the factory takes {', '.join(taken)}, and seq was not given: pass seq= (on the command line --seq)"
        )
    return asked


def _made(factory: Callable[..., Any], keywords: dict[str, int], device: Any) -> FactoryResult:
    """(model, example_input, loss) from the factory, on meta where the device is not this CPU."""
    if device is not None and get_device(device).kind != "cpu":
        # It may look at a number while it builds the model, which shows in errors of many kinds.
        with contextlib.suppress(Exception), torch.device("meta"):
            return call_factory(factory, keywords)
    return call_factory(factory, keywords)


def _searched(sizes: list[int], found: dict[int, FitRow], memory: list[tuple[str, int]]) -> Iterator[int]:
    """Sizes to try next, looking at what was found for those before."""
    at = 0
    while True:
        yield sizes[at]
        if not found[sizes[at]].fits or at == len(sizes) - 1:
            break
        at = min(2 * at + 1, len(sizes) - 1)
    high = at
    low = max((i for i, b in enumerate(sizes) if b in found and found[b].fits), default=-1)
    while low >= 0 and high - low > 1:
        below, above = found[sizes[low]].least_bytes, found[sizes[high]].least_bytes
        share = (memory[0][1] - below) / (above - below) if above > below else 0.5
        at = min(max(low + round(share * (high - low)), low + 1), high - 1)
        yield sizes[at]
        low, high = (at, high) if found[sizes[at]].fits else (low, at)


def _row(batch: int, session: Session, allowed: int, options: SolverOptions) -> FitRow:
    made = session.call
    problem = made.costed.problem
    floor, at = peak_floor(problem)
    if floor > allowed:
        return _row_at_floor(batch, made, floor, at)
    least = solve_problem(problem.with_budget(floor), "greedy", time_limit_s=options.time_limit_s)
    shown_schedule, peak, overhead, least_bytes = least.schedule, None, None, least.peak_bytes
    try:
        solution = session.solution(allowed, options)
        shown_schedule, peak, overhead = solution.schedule, solution.peak_bytes, solution.overhead
        least_bytes = min(least_bytes, solution.peak_bytes)
    except InfeasibleBudget as error:
        least_bytes = min(least_bytes, error.least_bytes or least_bytes)
    assert shown_schedule is not None
    replay = simulate(problem, shown_schedule)
    line = timeline(problem, shown_schedule)
    action: Any = shown_schedule.actions[replay.peak_action]
    live = [life.value for life in line.alive(line.peak)]
    return FitRow(
        batch, made.store_all_bytes, least_bytes, floor, peak, overhead,
        *_told(made.costed, action.node, live, dict(replay.breakdown)),
    )  # fmt: skip


def _row_at_floor(batch: int, made: TracedCall, floor: int, at: int) -> FitRow:
    """The row of a batch that no schedule makes fit: what node `at` needs at the least (-1: what always lives)."""
    graph = made.costed.problem.graph
    kinds: dict[str, int] = {}
    live = alive_at_least(graph, at)
    for kind, size in (*graph.external, *((graph.values[v].kind, graph.values[v].size_bytes) for v in live)):
        kinds[kind] = kinds.get(kind, 0) + size
    if at >= 0:
        kinds["workspace"] = graph.nodes[at].workspace_bytes
    on_the_way = floor - sum(kinds.values())  # more than the node itself takes: what leads to its inputs
    kinds["activations"] = kinds.get("activations", 0) + on_the_way
    return FitRow(batch, made.store_all_bytes, floor, floor, None, None, *_told(made.costed, at, live, kinds))


def _told(
    costed: Costed, at: int, live: Sequence[int], kinds: dict[str, int]
) -> tuple[str, tuple[tuple[str, int], ...], tuple[str, ...]]:
    """(where the peak is, what it consists of, what would lower it): node `at` runs while the values `live` are there."""
    nodes = costed.problem.graph.nodes
    where = nodes[at].where() if at >= 0 else "every moment of the step"
    parts = _parts(costed, live, kinds)
    return where, parts, _advice(parts, sum(size for _, size in parts), where, at == len(nodes) - 1)


# --- where the peak sits and what would lower it -----------------------------------------------------------------------

LOGITS = "logits and their gradient"


def _parts(costed: Costed, live: Sequence[int], kinds: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """(kind, bytes) at the peak, largest first, with values of the logits' shape as a kind of their own."""
    graph, scores = costed.problem.graph, _logits_elements(costed)
    kinds, logits = dict(kinds), 0
    for value in [graph.values[v] for v in live] if scores else ():
        origin = costed.lowered.origin[value.producer]
        made = [t.numel() for t in tensors_of(origin)] if origin is not None else []
        if scores in made and value.kind in kinds:
            logits += value.size_bytes
            kinds[value.kind] -= value.size_bytes
    told = {**kinds, LOGITS: logits}
    return tuple(sorted(((k, n) for k, n in told.items() if n), key=lambda part: -part[1]))


def _logits_elements(costed: Costed) -> int:
    """Elements of what the loss's softmax is taken of; 0 without one."""
    found = [n for n in costed.lowered.origin if n is not None and str(n.target).startswith("aten._log_softmax.")]
    return max((t.numel() for n in found for t in tensors_of(n)), default=0)


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


def _advice(parts: tuple[tuple[str, int], ...], peak: int, where: str, in_optimizer: bool) -> tuple[str, ...]:
    lines = []
    for kind, size in parts:
        if size < WORTH_SAYING * peak:
            continue
        does = _ADVICE.get(kind)
        if kind == "workspace":
            does = "a fused optimizer (fused=True)" if in_optimizer else f"another kernel than that of {where}"
        if does:
            lines.append(f"{kind}: {size / peak:.0%} of the peak; what would lower it: {does}")
    return tuple(lines)
