"""Writes a plan to a JSON file, which holds no code.

The file has the call (shapes and structure of the example input), the settings, each op's cost and bytes, and the schedule.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcsolve.capture.context import Context
from gcsolve.graph import Node
from gcsolve.lowering.costed import Costed
from gcsolve.lowering.lower import Lowered
from gcsolve.lowering.node_facts import tensor_text
from gcsolve.plan_record import PlanRecord, SolverOptions
from gcsolve.problem import Problem
from gcsolve.schedule import Compute
from gcsolve.session import Session, Settings
from gcsolve.solver.base import Solution
from gcsolve.util.tree import Container, Leaf, Static, Template, flatten

FORMAT = 3


def write_plan(plan: PlanRecord, session: Session, path: str | os.PathLike[str]) -> None:
    """Write `plan`, a plan of `session`, to `path` as JSON; `read_plan` (read.py) reads it.

    Raises:
        OSError: the file cannot be written.
    """
    settings = session.settings
    tensors, template = flatten((session.args, session.kwargs), "example_input")
    costs = plan.costed
    record = {
        "format": FORMAT,
        "gcsolve": version("gcsolve"),
        "torch": str(torch.__version__),
        "model": model_record(session.model),
        "context": context_record(costs.trace.context),
        "input": {"tensors": [tensor_record(t) for t in tensors], "template": _template_record(template)},
        "settings": _settings_record(settings, plan.solver_options),
        "graph": _graph_record(plan.problem, costs),
        "budget_bytes": plan.budget_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "solution": _solution_record(plan.solution),
    }
    Path(path).write_text(json.dumps(record, separators=(",", ":")) + "\n")


def _settings_record(settings: Settings, options: SolverOptions) -> dict[str, Any]:
    """What the caller of `gcsolve.solve` chose; functions and objects by name."""
    loss = settings.loss
    return {
        "loss": None if loss is None else getattr(loss, "__qualname__", repr(type(loss))),
        "optimizer": _optimizer_record(settings.optimizer),
        "scope": settings.scope,
        "device": settings.device.name,
        "cost": settings.cost.name,
        "backward_from": settings.backward_from,
        "gradient_accumulation": settings.gradient_accumulation,
        "autocast_backward": settings.autocast_backward,
        "solver": options.solver if isinstance(options.solver, str) else options.solver.name,
        "time_limit_s": options.time_limit_s,
        "gap": options.gap,
    }


def _graph_record(problem: Problem, costs: Costed) -> dict[str, Any]:
    """The step's external bytes, and of each op [name, workspace bytes, cost, FLOPs, *structure]."""
    return {
        "external": problem.graph.external,
        "cost_unit": problem.cost_unit,
        "ops": [
            [node.op, node.workspace_bytes, cost, flops, *structure(costs.lowered, node)]
            for node, cost, flops in zip(problem.graph.nodes, problem.cost, costs.flops, strict=True)
        ],
        "estimated_workspace": costs.estimated_workspace,
        "estimated_cost": costs.estimated_cost,
        "costed_by_bytes": costs.costed_by_bytes,
    }


def model_record(model: nn.Module) -> dict[str, Any]:
    """Class and mode of the model, and of each parameter and buffer [kind and name, dtype, shape, requires_grad]."""
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


def context_record(context: Context) -> list[Any]:
    """[default dtype, [[device type, dtype] of each autocast region]]."""
    return [str(context.default_dtype), [[kind, str(dtype)] for kind, dtype in context.regions]]


def structure(lowered: Lowered, node: Node) -> list[Any]:
    """What a schedule depends on, beside cost and workspace: [rerunnable, indices of the values read, values written].

    Each value written is [bytes, pinned, kind, dtype and shape as text]. Names and source lines are not part of it.
    """
    outputs = [(lowered.graph.values[v], lowered.tensor_of.get(v)) for v in node.outputs]
    values = [[v.size_bytes, v.pinned, v.kind, "" if t is None else tensor_text(t)] for v, t in outputs]
    return [node.rerunnable, list(node.inputs), values]


def _optimizer_record(optimizer: Any) -> Any:
    """None, a number, [class in torch.optim, its settings or None]; {"class": name} of an optimizer that JSON cannot hold."""
    if optimizer is None or isinstance(optimizer, (int, float)):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    defaults = {} if isinstance(optimizer, type) else optimizer.defaults
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}
    if getattr(torch.optim, kind.__name__, None) is kind and _is_json(settings):
        return [kind.__name__, settings if defaults else None]
    return {"class": kind.__qualname__}


def _is_json(value: Any) -> bool:
    """Whether JSON holds the value as it is."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tensor_record(t: torch.Tensor) -> list[Any]:
    """[dtype, shape, strides, device, requires_grad]."""
    return [str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()), str(t.device), t.requires_grad]


def _template_record(template: Template) -> Any:
    """The structure as JSON; {"opaque": type} in place of what JSON does not hold."""
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
    """`_template_record` of a value without tensors."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_static_record(v) for v in value]}
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return {"dict": {k: _static_record(v) for k, v in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    return {"opaque": type(value).__name__}


def _solution_record(solution: Solution) -> dict[str, Any]:
    """The solution's fields; of the schedule, node i's run as i and value v's free as -1 - v."""
    assert solution.schedule is not None
    actions = [a.node if isinstance(a, Compute) else -1 - a.value for a in solution.schedule.actions]
    fields = {name: getattr(solution, name) for name in Solution.__dataclass_fields__}
    return {**fields, "status": solution.status.name, "certificate": str(solution.certificate), "schedule": actions}
