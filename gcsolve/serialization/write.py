"""A plan written to a file: JSON without code.

It holds the call (shapes and structure of the example input), the settings, what each op costs and takes, and the schedule.
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
from gcsolve.lowering.lower import Lowered
from gcsolve.lowering.node_facts import tensor_text
from gcsolve.plan_record import PlanRecord
from gcsolve.schedule import Compute
from gcsolve.session import Session
from gcsolve.solver.base import Solution
from gcsolve.util.tree import Container, Leaf, Static, Template, flatten

FORMAT = 3


def write_plan(plan: PlanRecord, session: Session, path: str | os.PathLike[str]) -> None:
    """Write `plan`, which `session` made, to `path` as JSON; `read.py` has the way back.

    Raises:
        OSError: the file cannot be written.
    """
    settings = session.settings
    tensors, template = flatten((session.args, session.kwargs), "example_input")
    costs = plan.costed
    solver = plan.solver_options.solver
    record = {
        "format": FORMAT,
        "gcsolve": version("gcsolve"),
        "torch": str(torch.__version__),
        "model": model_record(session.model),
        "context": context_record(costs.trace.context),
        "input": {"tensors": [tensor_record(t) for t in tensors], "template": _template_record(template)},
        "settings": {
            "loss": None
            if settings.loss is None
            else getattr(settings.loss, "__qualname__", repr(type(settings.loss))),
            "optimizer": _optimizer_record(settings.optimizer),
            "scope": settings.scope,
            "device": settings.device.name,
            "cost": settings.cost.name,
            "backward_from": settings.backward_from,
            "gradient_accumulation": settings.gradient_accumulation,
            "autocast_backward": settings.autocast_backward,
            "solver": solver if isinstance(solver, str) else solver.name,
            "time_limit_s": plan.solver_options.time_limit_s,
            "gap": plan.solver_options.gap,
        },
        "graph": {
            "external": plan.problem.graph.external,
            "cost_unit": plan.problem.cost_unit,
            "ops": [
                [node.op, node.workspace_bytes, cost, flops, *structure(costs.lowered, node)]
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


def model_record(model: nn.Module) -> dict[str, Any]:
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
    return [str(context.default_dtype), [[kind, str(dtype)] for kind, dtype in context.regions]]


def structure(lowered: Lowered, node: Node) -> list[Any]:
    """What a schedule depends on beside cost and workspace: [rerunnable, values read, values made], of each made [bytes,
    pinned, kind, its dtype and shape for a person to read]. Names and source lines may change."""
    made = [(lowered.graph.values[v], lowered.tensor_of.get(v)) for v in node.outputs]
    values = [[v.size_bytes, v.pinned, v.kind, "" if t is None else tensor_text(t)] for v, t in made]
    return [node.rerunnable, list(node.inputs), values]


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


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tensor_record(t: torch.Tensor) -> list[Any]:
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


def _solution_record(solution: Solution) -> dict[str, Any]:
    assert solution.schedule is not None
    actions = [a.node if isinstance(a, Compute) else -1 - a.value for a in solution.schedule.actions]
    told = {name: getattr(solution, name) for name in Solution.__dataclass_fields__}
    return {**told, "status": solution.status.name, "certificate": str(solution.certificate), "schedule": actions}
