"""Reads a plan from its JSON file: the model is traced again and compared with the file, then the file's schedule is used.

Tracing takes seconds. No op is measured and nothing is solved.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcsolve.capture.context import Context
from gcsolve.capture.trace import parse_example
from gcsolve.cost.base import CostModel
from gcsolve.cost.optimizer_memory import make_optimizer
from gcsolve.cost.registry import get_cost
from gcsolve.errors import ArgumentError, InvalidSchedule, PlanMismatch
from gcsolve.execution.signature import settled_signature
from gcsolve.lowering.costed import Costed
from gcsolve.lowering.lower import Lowered
from gcsolve.plan_record import SolverOptions
from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Free, Schedule
from gcsolve.serialization.schema import SCHEMA, wrong
from gcsolve.serialization.write import FORMAT, context_record, model_record, structure, tensor_record
from gcsolve.session import Session, Settings, TracedCall
from gcsolve.simulate import simulate
from gcsolve.solver.base import Certificate, Solution, Status
from gcsolve.solver.registry import SOLVERS
from gcsolve.util.progress import shown
from gcsolve.util.tree import Template, flatten, leaf_paths


@dataclass(frozen=True)
class SavedPlan:
    """The content of a file, and the session of the model for which it was read."""

    session: Session
    solution: Solution
    budget_bytes: int
    options: SolverOptions


def read_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    example_input: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    cost: str | CostModel | None = None,
    progress: bool | None = None,
) -> SavedPlan:
    """The plan that `write_plan` wrote to `path`; arguments and errors are those of `gcsolve.load_plan`."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={model!r} is not an nn.Module; pass the model that was planned")
    record = _read(path)
    _compare("torch release", record["torch"], str(torch.__version__), "plan again, or load under the planned release")
    _compare_models(record["model"], model_record(model))
    _compare_contexts(record["context"], context_record(Context.here()))
    settings = _settings(record["settings"], model, loss, optimizer, cost)
    args, kwargs = _example(record["input"]) if example_input is None else parse_example(example_input)
    with shown(progress, f"tracing {type(model).__name__}"):
        call = _traced(record, model, args, kwargs, settings)
    saved = record["settings"]
    solver = saved["solver"] if saved["solver"].lower() in SOLVERS else "auto"
    options = SolverOptions(solver, saved["time_limit_s"], saved["gap"])
    solution = _solution(record["solution"])
    assert solution.schedule is not None
    session = Session(model, args, kwargs, settings, call)
    try:
        replay = simulate(session.problem, solution.schedule)
    except InvalidSchedule as error:
        raise ArgumentError(f"path={str(path)!r} is damaged: its schedule cannot be run: {error}") from error
    if replay.peak_bytes != record["peak_bytes"]:
        raise PlanMismatch(
            f"the saved plan's peak is {record['peak_bytes']} bytes, and replayed here {replay.peak_bytes}"
        )
    return SavedPlan(session, solution, record["budget_bytes"], options)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's content, checked against the schema."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path={path!r} is not a path; pass the file that plan.save wrote")
    try:
        record = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ArgumentError(f"path={str(path)!r} is not a plan that plan.save wrote") from error
    mismatch = wrong({"format": int}, record)
    if not mismatch and record["format"] != FORMAT:
        raise PlanMismatch(
            f"{path} has format {record['format']}, this gcsolve ({version('gcsolve')}) reads {FORMAT}; plan again"
        )
    mismatch = mismatch or wrong(SCHEMA, record)
    if mismatch:
        raise ArgumentError(f"path={str(path)!r} is not a plan that plan.save wrote, or it is damaged: {mismatch}")
    return record


def _traced(
    record: dict[str, Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> TracedCall:
    """The call, traced again, with workspace, costs and FLOPs from the file."""
    started = time.perf_counter()
    tensors, template = flatten((args, kwargs), "example_input")
    _compare_inputs(record["input"]["tensors"], tensors, template)
    traced = settings.trace(model, args, kwargs)
    plain = get_cost("flops", settings.device)  # replaced below; "measured" would run ops in vain
    fresh = settings.costs(traced, model, tensors, cost=plain, measure=False)
    saved = record["graph"]
    _compare_graphs(saved, fresh.lowered)
    ops = saved["ops"]
    nodes = tuple(replace(node, workspace_bytes=op[1]) for node, op in zip(fresh.problem.graph.nodes, ops, strict=True))
    graph = replace(fresh.problem.graph, nodes=nodes)
    costed = Costed(
        trace=traced,
        lowered=replace(fresh.lowered, graph=graph),
        problem=Problem(graph, tuple(op[2] for op in ops), 0, saved["cost_unit"]),
        flops=tuple(op[3] for op in ops),
        estimated_workspace=tuple(saved["estimated_workspace"]),
        costed_by_bytes=tuple(saved["costed_by_bytes"]),
        estimated_cost=tuple(saved["estimated_cost"]),
    )
    key = settled_signature(model, traced, tensors, template)
    return TracedCall(costed, record["baseline_peak_bytes"], key, time.perf_counter() - started)


# --- comparisons of the file with the model --------------------------------------------------------------------------


def _compare(what: str, saved: Any, here: Any, advice: str) -> None:
    """Raise `PlanMismatch` if the two differ."""
    if saved != here:
        raise PlanMismatch(f"the plan was saved with {what} {saved}, and here it is {here}; {advice}")


def _compare_contexts(saved: list[Any], here: list[Any]) -> None:
    """Compare `context_record`s; the error says which default dtype to set, or which autocast block to enter."""
    _compare("default dtype", saved[0], here[0], f"call torch.set_default_dtype({saved[0]}) first")
    inside, around = (" and ".join(f'torch.autocast("{k}", {d})' for k, d in regions) for _, regions in (saved, here))
    advice = f"call load_plan inside `with {inside}:`" if inside else "call load_plan outside the autocast block"
    if saved != here:
        raise PlanMismatch(
            f"the plan was made under {inside or 'no autocast'}, and here is {around or 'no autocast'}; {advice}"
        )


def _compare_models(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare `model_record`s."""
    advice = "load it for the model that was planned"
    _compare("model class", saved["class"], here["class"], advice)
    mode = f"call model.{'train' if saved['training'] else 'eval'}() first"
    _compare("training mode", saved["training"], here["training"], mode)
    for was, now in zip(saved["tensors"], here["tensors"], strict=False):
        _compare("a", was[0], now[0], advice)
        _compare(was[0], _tensor_text(was[1:]), _tensor_text(now[1:]), advice)
    counts = len(saved["tensors"]), len(here["tensors"])
    _compare("number of parameters and buffers", *counts, advice)


def _compare_inputs(saved: list[Any], tensors: list[torch.Tensor], template: Template) -> None:
    """Compare the records of the saved input tensors with `tensors`; the error names the argument."""
    advice = "give an input like the planned one, or plan again"
    paths = leaf_paths(template)
    for k, (record, tensor) in enumerate(zip(saved, tensors, strict=False)):
        was, now = (_tensor_text([r[0], r[1], r[4]]) for r in (record, tensor_record(tensor)))
        _compare(re.sub(r"^example_input\[[01]\]\[(?:(\d+)|'(\w+)')\]", r"argument \1\2", paths[k]), was, now, advice)
    _compare("number of input tensors", len(saved), len(tensors), advice)


def _tensor_text(record: list[Any]) -> str:
    """[dtype, shape, requires_grad] as in "float32[8, 32], requires_grad"."""
    dtype, shape, requires_grad = record
    return f"{dtype.removeprefix('torch.')}{shape}{', requires_grad' if requires_grad else ''}"


def _compare_graphs(saved: dict[str, Any], lowered: Lowered) -> None:
    """Compare the saved graph with the traced one; the error names the first op that differs, and how it was and is."""
    advice = "the model's code, settings, modes or inputs are not those that were planned; plan again"
    for (kind, was), (_, now) in zip(saved["external"], lowered.graph.external, strict=False):
        _compare(f"{kind} of", f"{was} bytes", f"{now} bytes", advice)
    values: list[tuple[int, str]] = []  # of each value written so far: the index of its op, and its text
    for i, (op, node) in enumerate(zip(saved["ops"], lowered.graph.nodes, strict=False)):
        if op[0] != node.op:
            raise PlanMismatch(f"op {i} of the step was {op[0]} and is {node.where()} here: {advice}")
        was, now = op[4:], structure(lowered, node)
        values += [(i, text) for text in map(_value_text, now[2])]
        for difference, a, b in zip(_DIFFERENCES, was, now, strict=True):
            if a != b:
                raise PlanMismatch(f"op {i} of the step, {node.where()}, {difference(a, b, values)}: {advice}")
    counts = len(saved["ops"]), len(lowered.graph.nodes)
    if counts[0] != counts[1]:
        raise PlanMismatch(f"the traced step is another ({counts[0]} ops, here {counts[1]}): {advice}")


def _value_text(value: list[Any]) -> str:
    """A value of `structure` as in "float32[8, 32] (1024 bytes)"."""
    size, pinned, kind, text = value
    return f"{text or 'a value'} ({size} bytes{', ' + kind if kind != 'activations' else ''}{', pinned' if pinned else ''})"


def _reads_text(reads: list[int], values: list[tuple[int, str]]) -> str:
    """The values that an op reads, as in "float32[8, 32] (1024 bytes) of op 3"."""
    return " and ".join(f"{values[v][1]} of op {values[v][0]}" for v in reads if v < len(values)) or "nothing"


# For each entry of `structure`: a function of the saved entry, the one here and the values written so far, that says in words
# how the two differ.
_DIFFERENCES: tuple[Callable[[Any, Any, list[tuple[int, str]]], str], ...] = (
    lambda was, now, _: (
        f"could{'' if was else ' not'} be run again when the plan was saved, and can{'' if now else 'not'} here"
    ),
    lambda was, now, values: (
        f"read {_reads_text(was, values)} when the plan was saved, and reads {_reads_text(now, values)} here"
    ),
    lambda was, now, _: (
        f"made {', '.join(map(_value_text, was)) or 'nothing'} when the plan was saved, and makes "
        f"{', '.join(map(_value_text, now)) or 'nothing'} here"
    ),
)


# --- settings and example input --------------------------------------------------------------------------------------


def _settings(
    saved: dict[str, Any], model: nn.Module, loss: Any, optimizer: Any, cost: str | CostModel | None
) -> Settings:
    """The saved settings, with what the caller of `load_plan` passes because JSON does not hold it."""
    if (saved["loss"] is None) != (loss is None):
        advice = f"with loss={saved['loss']}; pass that function" if loss is None else "without a loss; leave loss= out"
        raise ArgumentError(f"the plan was saved {advice}")
    if optimizer is None:
        optimizer = _optimizer(saved["optimizer"])
    try:
        return Settings.checked(
            model, loss=loss, optimizer=optimizer, scope=saved["scope"], device=saved["device"], cost=cost or saved["cost"],
            backward_from=saved["backward_from"], gradient_accumulation=saved["gradient_accumulation"],
            autocast_backward=saved["autocast_backward"],
        )  # fmt: skip
    except ArgumentError as error:
        if "cost=" not in str(error):
            raise
        raise ArgumentError(f"the plan was saved with costs of {saved['cost']!r}; pass that object as cost=") from error


def _optimizer(saved: Any) -> Any:
    """The optimizer of an `_optimizer_record`."""
    if isinstance(saved, dict):
        raise ArgumentError(
            f"the plan was saved with optimizer {saved['class']}, which is not torch's; pass it as optimizer="
        )
    if not isinstance(saved, list):
        return saved
    kind = getattr(torch.optim, saved[0])
    if saved[1] is None:
        return kind
    optimizer = make_optimizer(kind, [nn.Parameter(torch.zeros(1))])
    optimizer.defaults.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved[1].items()})
    return optimizer


def _example(saved: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the planned structure, shapes and dtypes, filled with zeros."""
    tensors = []
    for dtype, shape, stride, device, requires_grad in saved["tensors"]:
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        tensors.append(tensor.zero_().requires_grad_(requires_grad))
    args, kwargs = _rebuilt(saved["template"], tensors)
    return args, kwargs


_REBUILD: dict[str, Callable[[Any, list[torch.Tensor]], Any]] = {
    "tensor": lambda index, tensors: tensors[index],
    "value": lambda value, _: value,
    "dtype": lambda name, _: getattr(torch, name),
    "list": lambda children, tensors: [_rebuilt(c, tensors) for c in children],
    "tuple": lambda children, tensors: tuple(_rebuilt(c, tensors) for c in children),
    "dict": lambda children, tensors: {k: _rebuilt(c, tensors) for k, c in children.items()},
}


def _rebuilt(record: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    """The argument whose `_template_record` this is."""
    (kind, content), *_ = record.items()
    if kind == "opaque":
        raise ArgumentError(
            f"the planned call had a {content} among its arguments, which is not in the file; pass example_input="
        )
    return _REBUILD[kind](content, tensors)


# --- the solution ----------------------------------------------------------------------------------------------------


def _solution(saved: dict[str, Any]) -> Solution:
    """The solution of a `_solution_record`."""
    actions = tuple(Compute(a) if a >= 0 else Free(-1 - a) for a in saved["schedule"])
    fields = {name: saved[name] for name in Solution.__dataclass_fields__}
    enumerations = {"status": Status[saved["status"]], "certificate": Certificate(saved["certificate"])}
    return Solution(**{**fields, **enumerations, "schedule": Schedule(actions)})
