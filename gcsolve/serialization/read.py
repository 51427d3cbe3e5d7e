"""A plan as a file: `plan.save(path)` and `gcsolve.load_plan(path, model)`.

The file is JSON and holds no code: the call (shapes and structure of the example input), the settings, what each op costs
and takes, and the schedule. Loading traces the model again (seconds), sees that it is the very step that was planned, and
writes out the schedule of the file; no op is measured and nothing is solved.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gcsolve
from gcsolve.api import Session, Settings, TracedCall
from gcsolve.capture.context import Context
from gcsolve.capture.trace import parse_example
from gcsolve.cost.base import CostModel, get_cost
from gcsolve.cost.optimizer_memory import make_optimizer
from gcsolve.errors import ArgumentError, InvalidSchedule, PlanMismatch
from gcsolve.execution.planned_module import settled_signature
from gcsolve.graph import Node
from gcsolve.lowering.costed import Costed, costed
from gcsolve.lowering.lower import Lowered, tensor_text
from gcsolve.plan import Asked, Plan
from gcsolve.problem import Problem
from gcsolve.schedule import Compute, Free, Schedule
from gcsolve.serialization.schema import SCHEMA, wrong
from gcsolve.simulate import simulate
from gcsolve.solver.base import Solution, Status
from gcsolve.solver.registry import SOLVERS
from gcsolve.util.progress import shown
from gcsolve.util.tree import Container, Leaf, Static, Template, flatten, leaf_paths

FORMAT = 2


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON; see `load_plan` for the way back.

    Raises:
        OSError: the file cannot be written.
    """
    session: Session = plan.session
    settings = session.settings
    tensors, template = flatten((session.args, session.kwargs), "example_input")
    costs = plan.costed
    solver = plan.asked.solver
    record = {
        "format": FORMAT,
        "gcsolve": gcsolve.__version__,
        "torch": str(torch.__version__),
        "model": _model_record(session.model),
        "context": _context_record(costs.trace.context),
        "input": {"tensors": [_tensor_record(t) for t in tensors], "template": _template_record(template)},
        "settings": {
            "loss": None
            if settings.loss is None
            else getattr(settings.loss, "__qualname__", repr(type(settings.loss))),
            "optimizer": _optimizer_record(settings.optimizer),
            "scope": settings.scope,
            "device": settings.device.name,
            "cost": settings.cost.name,
            "all_outputs": settings.all_outputs,
            "accumulate": settings.accumulate,
            "autocast_backward": settings.autocast_backward,
            "solver": solver if isinstance(solver, str) else solver.name,
            "time_limit_s": plan.asked.time_limit_s,
            "gap": plan.asked.gap,
        },
        "graph": {
            "external": plan.problem.graph.external,
            "cost_unit": plan.problem.cost_unit,
            "ops": [
                [node.op, node.workspace_bytes, cost, flops, *_structure(costs.lowered, node)]
                for node, cost, flops in zip(plan.problem.graph.nodes, plan.problem.cost, costs.flops, strict=True)
            ],
            "estimated_workspace": costs.estimated_workspace,
            "estimated_cost": costs.estimated_cost,
            "costed_by_bytes": costs.costed_by_bytes,
        },
        "budget_bytes": plan.budget_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "solution": _solution_record(plan.solution),
    }
    Path(path).write_text(json.dumps(record, separators=(",", ":")) + "\n")


def load_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    example_input: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    cost: str | CostModel | None = None,
    progress: bool | None = None,
) -> Plan:
    """The plan that `plan.save(path)` wrote, for the same model in this process: same schedule, same peak, not solved again.

    Args:
        path: the file.
        model: the model that was planned (its weights may differ).
        example_input: as for `solve`; needed only where the call had arguments that JSON does not hold. Without it,
            `plan.verify` runs on zeros of the planned shapes.
        loss: the function given to `solve`, if one was: code is not in the file.
        optimizer: as for `solve`; needed only where it was none of torch.optim's.
        cost: as for `solve`; needed only where it was an object of yours.
        progress: show what is being done; default: only when somebody watches.

    Returns:
        a `Plan`, equal to the saved one in everything that was planned.

    Raises:
        PlanMismatch: model, mode, autocast, torch release, input or traced graph are not those of the file; the text says
            which tensor or op differs first, and how it was and is.
        ArgumentError: the file is not a saved plan or is damaged, or something that it cannot hold has to be given.
        OSError: the file cannot be read.

    Examples:
        >>> import tempfile, torch, gcsolve
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> plan = gcsolve.solve(model, torch.randn(256, 64), budget=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(f"{folder}/plan.json")
        ...     again = gcsolve.load_plan(f"{folder}/plan.json", model)
        >>> again.schedule == plan.schedule
        True
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={model!r} is not an nn.Module; pass the model that was planned")
    record = _read(path)
    _compare("torch release", record["torch"], str(torch.__version__), "plan again, or load under the planned release")
    _compare_models(record["model"], _model_record(model))
    _compare_contexts(record["context"], _context_record(Context.here()))
    settings = _settings(record["settings"], model, loss, optimizer, cost)
    args, kwargs = _example(record["input"]) if example_input is None else parse_example(example_input)
    with shown(progress, f"tracing {type(model).__name__}"):
        made = _traced(record, model, args, kwargs, settings)
    known = record["settings"]
    asked = Asked(
        known["solver"] if known["solver"].lower() in SOLVERS else "auto", known["time_limit_s"], known["gap"]
    )
    solution = _solution(record["solution"])
    assert solution.schedule is not None
    try:
        simulate(made.costed.problem, solution.schedule)
    except InvalidSchedule as error:
        raise ArgumentError(f"path={str(path)!r} is damaged: its schedule cannot be run: {error}") from error
    plan = Session(model, args, kwargs, settings, made).planned(solution, record["budget_bytes"], asked)
    if plan.peak_bytes != record["peak_bytes"]:
        raise PlanMismatch(
            f"the saved plan's peak is {record['peak_bytes']} bytes, and replayed here {plan.peak_bytes}"
        )
    return plan


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path={path!r} is not a path; pass the file that plan.save wrote")
    try:
        record = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ArgumentError(f"path={str(path)!r} is not a plan that plan.save wrote") from error
    damaged = wrong({"format": int}, record)
    if not damaged and record["format"] != FORMAT:
        raise PlanMismatch(
            f"{path} has format {record['format']}, this gcsolve ({gcsolve.__version__}) reads {FORMAT}; plan again"
        )
    damaged = damaged or wrong(SCHEMA, record)
    if damaged:
        raise ArgumentError(f"path={str(path)!r} is not a plan that plan.save wrote, or it is damaged: {damaged}")
    return record


def _traced(
    record: dict[str, Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> TracedCall:
    """The call traced again, with the numbers of the file instead of measured ones."""
    started = time.perf_counter()
    tensors, template = flatten((args, kwargs), "example_input")
    _compare_inputs(record["input"]["tensors"], tensors, template)
    traced = settings.trace(model, args, kwargs)
    plain = get_cost("flops", settings.device)  # replaced below; a measured model would run ops for nothing
    fresh = costed(
        traced, model, tensors, device=settings.device, cost=plain, optimizer=settings.optimizer, scope=settings.scope,
        accumulate=settings.accumulate, measure=False,
    )  # fmt: skip
    saved = record["graph"]
    _compare_graphs(saved, fresh.lowered)
    ops = saved["ops"]
    nodes = tuple(replace(node, workspace_bytes=op[1]) for node, op in zip(fresh.problem.graph.nodes, ops, strict=True))
    graph = replace(fresh.problem.graph, nodes=nodes)
    made = Costed(
        traced,
        replace(fresh.lowered, graph=graph),
        Problem(graph, tuple(op[2] for op in ops), 0, saved["cost_unit"]),
        tuple(op[3] for op in ops),
        tuple(saved["estimated_workspace"]),
        tuple(saved["costed_by_bytes"]),
        tuple(saved["estimated_cost"]),
    )
    key = settled_signature(model, traced, tensors, template)
    return TracedCall(made, record["baseline_peak_bytes"], key, time.perf_counter() - started)


# --- what must be the same ---------------------------------------------------------------------------------------------


def _model_record(model: nn.Module) -> dict[str, Any]:
    tensors = [("parameter", model.named_parameters()), ("buffer", model.named_buffers())]
    return {
        "class": type(model).__qualname__,
        "training": model.training,
        "tensors": [
            [f"{kind} {name}", str(t.dtype), list(t.shape), t.requires_grad]
            for kind, named in tensors
            for name, t in named
        ],
    }


def _context_record(context: Context) -> list[Any]:
    return [str(context.default_dtype), [[kind, str(dtype)] for kind, dtype in context.regions]]


def _structure(lowered: Lowered, node: Node) -> list[Any]:
    """What a schedule depends on beside cost and workspace: [rerunnable, values read, values made], of each made [bytes,
    pinned, kind, its dtype and shape for a person to read]. Names and source lines may change."""
    made = [(lowered.graph.values[v], lowered.tensor_of.get(v)) for v in node.outputs]
    values = [[v.size_bytes, v.pinned, v.kind, "" if t is None else tensor_text(t)] for v, t in made]
    return [node.rerunnable, list(node.inputs), values]


def _compare(what: str, saved: Any, here: Any, then: str) -> None:
    if saved != here:
        raise PlanMismatch(f"the plan was saved with {what} {saved}, and here it is {here}; {then}")


def _compare_contexts(saved: list[Any], here: list[Any]) -> None:
    """Names the context to enter: the default dtype to set, or the autocast block."""
    _compare("default dtype", saved[0], here[0], f"call torch.set_default_dtype({saved[0]}) first")
    inside, around = (" and ".join(f'torch.autocast("{k}", {d})' for k, d in regions) for _, regions in (saved, here))
    then = f"call load_plan inside `with {inside}:`" if inside else "call load_plan outside the autocast block"
    if saved != here:
        raise PlanMismatch(
            f"the plan was made under {inside or 'no autocast'}, and here is {around or 'no autocast'}; {then}"
        )


def _compare_models(saved: dict[str, Any], here: dict[str, Any]) -> None:
    then = "load it for the model that was planned"
    _compare("model class", saved["class"], here["class"], then)
    mode = f"call model.{'train' if saved['training'] else 'eval'}() first"
    _compare("training mode", saved["training"], here["training"], mode)
    for was, now in zip(saved["tensors"], here["tensors"], strict=False):
        _compare("a", was[0], now[0], then)
        _compare(was[0], _tensor_told(was[1:]), _tensor_told(now[1:]), then)
    counts = len(saved["tensors"]), len(here["tensors"])
    _compare("number of parameters and buffers", *counts, then)


def _compare_inputs(saved: list[Any], tensors: list[torch.Tensor], template: Template) -> None:
    then = "give an input like the planned one, or plan again"
    paths = leaf_paths(template)
    for k, (saved_one, tensor) in enumerate(zip(saved, tensors, strict=False)):
        was, now = (_tensor_told([r[0], r[1], r[4]]) for r in (saved_one, _tensor_record(tensor)))
        _compare(re.sub(r"^example_input\[[01]\]\[(?:(\d+)|'(\w+)')\]", r"argument \1\2", paths[k]), was, now, then)
    _compare("number of input tensors", len(saved), len(tensors), then)


def _tensor_told(record: list[Any]) -> str:
    dtype, shape, requires_grad = record
    return f"{dtype.removeprefix('torch.')}{shape}{', requires_grad' if requires_grad else ''}"


def _compare_graphs(saved: dict[str, Any], lowered: Lowered) -> None:
    """Names the first op that differs, with what it was."""
    advice = "the model's code, settings, modes or inputs are not those that were planned; plan again"
    for (kind, was), (_, now) in zip(saved["external"], lowered.graph.external, strict=False):
        _compare(f"{kind} of", f"{was} bytes", f"{now} bytes", advice)
    made: list[tuple[int, str]] = []  # of each value so far: the op that makes it, and its text
    for i, (op, node) in enumerate(zip(saved["ops"], lowered.graph.nodes, strict=False)):
        if op[0] != node.op:
            raise PlanMismatch(f"op {i} of the step was {op[0]} and is {node.where()} here: {advice}")
        was, now = op[4:], _structure(lowered, node)
        made += [(i, value) for value in map(_value_told, now[2])]
        for what, a, b in zip(_DIFFERS, was, now, strict=True):
            if a != b:
                raise PlanMismatch(f"op {i} of the step, {node.where()}, {what(a, b, made)}: {advice}")
    counts = len(saved["ops"]), len(lowered.graph.nodes)
    if counts[0] != counts[1]:
        raise PlanMismatch(f"the traced step is another ({counts[0]} ops, here {counts[1]}): {advice}")


def _value_told(value: list[Any]) -> str:
    """A made value as in "float32[8, 32] (1024 bytes)"."""
    size, pinned, kind, text = value
    return f"{text or 'a value'} ({size} bytes{', ' + kind if kind != 'activations' else ''}{', pinned' if pinned else ''})"


def _reads_told(reads: list[int], made: list[tuple[int, str]]) -> str:
    """What is read, as in "float32[8, 32] (1024 bytes) of op 3"."""
    return " and ".join(f"{made[v][1]} of op {made[v][0]}" for v in reads if v < len(made)) or "nothing"


# Of each entry of `_structure`: how it differs, in words, given what was saved, what is here, and the values made so far.
_DIFFERS: tuple[Callable[[Any, Any, list[tuple[int, str]]], str], ...] = (
    lambda was, now, _: (
        f"could{'' if was else ' not'} be run again when the plan was saved, and can{'' if now else 'not'} here"
    ),
    lambda was, now, made: (
        f"read {_reads_told(was, made)} when the plan was saved, and reads {_reads_told(now, made)} here"
    ),
    lambda was, now, _: (
        f"made {', '.join(map(_value_told, was)) or 'nothing'} when the plan was saved, and makes "
        f"{', '.join(map(_value_told, now)) or 'nothing'} here"
    ),
)


# --- settings and example input ----------------------------------------------------------------------------------------


def _settings(
    saved: dict[str, Any], model: nn.Module, loss: Any, optimizer: Any, cost: str | CostModel | None
) -> Settings:
    if (saved["loss"] is None) != (loss is None):
        said = f"with loss={saved['loss']}; pass that function" if loss is None else "without a loss; leave loss= out"
        raise ArgumentError(f"the plan was saved {said}")
    if optimizer is None:
        optimizer = _optimizer(saved["optimizer"])
    try:
        found = cost or saved["cost"]
        return Settings.checked(
            model, loss=loss, optimizer=optimizer, scope=saved["scope"], device=saved["device"], cost=found,
            grad_outputs="all" if saved["all_outputs"] else "auto", accumulate=saved["accumulate"],
            autocast_backward=saved["autocast_backward"],
        )  # fmt: skip
    except ArgumentError as error:
        if "cost=" not in str(error):
            raise
        raise ArgumentError(f"the plan was saved with costs of {saved['cost']!r}; pass that object as cost=") from error


def _optimizer_record(optimizer: Any) -> Any:
    """None, a number, or [name in torch.optim, its settings]; {"class": name} for one that JSON cannot hold."""
    if optimizer is None or isinstance(optimizer, (int, float)):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    plain = {} if isinstance(optimizer, type) else optimizer.defaults
    told = {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}
    if getattr(torch.optim, kind.__name__, None) is kind and _is_json(told):
        return [kind.__name__, told if plain else None]
    return {"class": kind.__qualname__}


def _optimizer(saved: Any) -> Any:
    if isinstance(saved, dict):
        raise ArgumentError(
            f"the plan was saved with optimizer {saved['class']}, which is not torch's; pass it as optimizer="
        )
    if not isinstance(saved, list):
        return saved
    kind = getattr(torch.optim, saved[0])
    if saved[1] is None:
        return kind
    made = make_optimizer(kind, [nn.Parameter(torch.zeros(1))])
    made.defaults.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved[1].items()})
    return made


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _tensor_record(t: torch.Tensor) -> list[Any]:
    return [str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()), str(t.device), t.requires_grad]


def _template_record(template: Template) -> Any:
    """The structure as JSON; {"opaque": type} where it holds what JSON does not."""
    if isinstance(template, Leaf):
        return {"tensor": template.index, "path": template.path}
    if isinstance(template, Static):
        return _static_record(template.value)
    if not isinstance(template, Container):
        return {"opaque": type(template).__name__}
    children = [_template_record(child) for child in template.children]
    if type(template.like) in (tuple, list):
        return {type(template.like).__name__: children}
    if type(template.like) is dict and all(isinstance(k, str) for k in template.keys):
        return {"dict": dict(zip(template.keys, children, strict=True))}
    return {"opaque": type(template.like).__name__}


def _static_record(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_static_record(v) for v in value]}
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return {"dict": {k: _static_record(v) for k, v in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    return {"opaque": type(value).__name__}


def _example(saved: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the planned structure and shapes, zeros in them."""
    tensors = []
    for dtype, shape, stride, device, requires_grad in saved["tensors"]:
        made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        tensors.append(made.zero_().requires_grad_(requires_grad))
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
    (kind, content), *_ = record.items()
    if kind == "opaque":
        raise ArgumentError(
            f"the planned call had a {content} among its arguments, which is not in the file; pass example_input="
        )
    return _REBUILD[kind](content, tensors)


# --- the answer --------------------------------------------------------------------------------------------------------


def _solution_record(solution: Solution) -> dict[str, Any]:
    assert solution.schedule is not None
    actions = [a.node if isinstance(a, Compute) else -1 - a.value for a in solution.schedule.actions]
    told = {name: getattr(solution, name) for name in Solution.__dataclass_fields__}
    return {**told, "status": solution.status.name, "schedule": actions}


def _solution(saved: dict[str, Any]) -> Solution:
    actions = tuple(Compute(a) if a >= 0 else Free(-1 - a) for a in saved["schedule"])
    told = {name: saved[name] for name in Solution.__dataclass_fields__}
    return Solution(**{**told, "status": Status[saved["status"]], "schedule": Schedule(actions)})
