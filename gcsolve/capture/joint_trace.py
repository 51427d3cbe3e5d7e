"""Flat module -> `Joint`: its forward and backward traced together, as eager runs them.

The module is exported first (`torch.export`, non-strict), and AOTAutograd then traces the exported module with its
backward. Of 47 architectures tried, 46 can be traced so; without the export, 11 of them cannot.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from gcsolve._torch import (
    FakeTensorMode,
    OpOverload,
    TracingContext,
    aot_descriptors,
    aot_export_joint_with_descriptors,
    tracing,
    view_like,
)
from gcsolve.capture.autocast import share_casts
from gcsolve.capture.custom_functions import FunctionCalls
from gcsolve.capture.descriptors import as_joint
from gcsolve.capture.generators import StandIns
from gcsolve.capture.joint import GeneratorInput, Joint
from gcsolve.capture.module_state import held_tensors
from gcsolve.capture.patches import During, patched
from gcsolve.capture.substitutions import When, substitutes


def fake_tensor(mode: FakeTensorMode, t: torch.Tensor) -> torch.Tensor:
    """A fake of `t` (real, fake of another mode, or meta; meta becomes CPU): same shape, strides, dtype, requires_grad."""
    device = torch.device("cpu") if t.device.type == "meta" else t.device
    with mode, torch.no_grad():
        fake = torch.empty_strided(tuple(t.shape), tuple(t.stride()), dtype=t.dtype, device=device)
    return fake.requires_grad_(t.requires_grad)


def fake_module(mode: FakeTensorMode, model: nn.Module, generators: Mapping[int, torch.Generator]) -> nn.Module:
    """A structural copy of `model` with fake parameters and buffers; the model itself is not touched.

    Args:
        generators: id of a random generator of the model -> the generator that replaces it in the copy.
    """
    memo: dict[int, Any] = dict(generators)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_tensor(mode, parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensor(mode, buffer)
    for key, (_, tensor) in held_tensors(model).items():
        memo.setdefault(key, tensor)  # a tensor that hangs on a module in another way stays the very tensor it is
    return copy.deepcopy(model, memo)


def capture_joint(
    module: nn.Module,
    args: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    stand_ins: StandIns,
    *,
    leaves: Collection[int],
    exported: bool,
    on_cpu: bool,
    autocast_backward: bool,
) -> Joint:
    """Trace forward and backward of `module(*args)` together, without running it. All tensors are fake.

    Autocast, when active around the call, is active in forward, so its casts are ops of the graph; backward is traced
    without it, as torch advises to call it (outside the block), unless `autocast_backward`.

    Args:
        stand_ins: what replaces the generators that the model may draw from.
        leaves: positions of the arguments that are leaves of autograd's graph and need a gradient.
        exported: export first, which takes more models and knows modules and source lines. It sees no autograd: a model
            that takes gradients in forward is traced directly, and so is one that sets the default dtype.
        on_cpu: tensors on the CPU stay there: the graph has the ops that eager's CPU kernels stand for.

    Raises:
        Exception: whatever torch raises; `trace.py` rewords it for the user.
        TraceError: the joint graph has an input or output of a kind gcsolve cannot serve exactly.
    """
    with contextlib.ExitStack() as around:
        around.enter_context(tracing(TracingContext(mode)))
        backward = "same_as_forward" if autocast_backward else "off"
        kernels = substitutes(When.DISPATCHED) if on_cpu else None
        around.enter_context(patched(During.CAPTURE, backward_autocast=backward, kernels_of_cpu=kernels))
        functions = around.enter_context(FunctionCalls())
        casts: dict[int, torch.dtype] = {}
        if exported:
            with functions.recording():
                program = torch.export.export(module, tuple(args), strict=False)
            module = program.module(check_guards=False)
            casts = share_casts(module, {at: args[at] for at in leaves})
        with contextlib.ExitStack() as stack:
            decompositions: Any = substitutes(When.DECOMPOSED) if on_cpu else {}
            captured = aot_export_joint_with_descriptors(stack, module, tuple(args), decompositions=decompositions)
    graph = captured.graph_module.graph
    _share_constants(graph)
    joint = as_joint(captured, module, args, casts)
    _lay_tangents_densely(graph)
    _draw_in_memory_order(graph)
    return _with_generators(joint, stand_ins)


def _share_constants(graph: fx.Graph) -> None:
    """Give each constant (a tensor that is no parameter, buffer or input) one node, and its views that node's storage.

    The trace makes a node and a fake storage for each use of it, and further storages for the views.
    """
    node_of: dict[Any, fx.Node] = {}
    in_constants: set[fx.Node] = set()  # the constants and their views
    for node in tuple(graph.nodes):
        if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
            constant = node_of.setdefault(node.target, node)
            if constant is not node:
                node.replace_all_uses_with(constant)
                graph.erase_node(node)
            in_constants.add(constant)
        elif in_constants.intersection(node.all_input_nodes) and _is_view(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with next(iter(node_of.values())).meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            in_constants.add(node)


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and view_like(node.target))


def _with_generators(joint: Joint, stand_ins: StandIns) -> Joint:
    """Make inputs of the random generators in the graph, so that every call draws from those that it is given."""
    graph = joint.graph_module.graph
    placeholder_of: dict[GeneratorInput, fx.Node] = {}
    last = joint.primal_nodes[-1]
    for node in graph.find_nodes(op="get_attr"):
        generator = getattr(joint.graph_module, str(node.target), None)
        if not isinstance(generator, torch.Generator):
            continue
        place = stand_ins.place(generator)
        if place not in placeholder_of:
            with graph.inserting_after(last):
                last = graph.placeholder(f"generator_{len(placeholder_of)}")
            placeholder_of[place] = last
        node.replace_all_uses_with(placeholder_of[place])
        graph.erase_node(node)
    return replace(joint, inputs=(*joint.inputs, *placeholder_of))


def _lay_tangents_densely(graph: fx.Graph) -> None:
    """Let gradients of outputs be dense where they are traced as parts of something larger.

    The gradient of an output that is a slice (one token of each sequence, say) is traced with that output's strides, in a
    storage as large as the whole. A loss sends it densely, and eager takes it so. Where a view reads it, its strides
    matter, and stay; but not those of an expanded output (torch 2.12), in which no gradient could be laid out.
    """
    for node in graph.find_nodes(op="placeholder"):
        if not isinstance(node.meta["desc"], aot_descriptors.TangentAOTInput):
            continue
        tangent = node.meta["val"]
        for user in list(node.users):  # of a parted output
            if user.target is torch.ops.aten.view.default and user.meta["val"].shape == tangent.shape:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
        strides_unread = all(isinstance(user.target, OpOverload) and not view_like(user.target) for user in node.users)
        dense_bytes, storage_bytes = tangent.numel() * tangent.element_size(), tangent.untyped_storage().nbytes()
        if storage_bytes < dense_bytes or (storage_bytes > dense_bytes and strides_unread):
            with tangent.fake_mode, torch.no_grad():
                node.meta["val"] = torch.empty_like(tangent)


def _draw_in_memory_order(graph: fx.Graph) -> None:
    """Let `bernoulli` draw a channels-last tensor's numbers in the order in which they lie in memory.

    Eager's `bernoulli_` (of dropouts that work in place, among others) does so; the functional op that stands for it in a
    trace would draw row by row.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        source = node.args[0]
        like = source.meta["val"]
        order = sorted(range(like.dim()), key=lambda d: -like.stride(d))
        if like.is_contiguous() or not like.permute(order).is_contiguous():
            continue
        tags = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}

        def permuted(of: fx.Node, dims: list[int], tags: dict[str, Any] = tags) -> fx.Node:
            view = graph.call_function(torch.ops.aten.permute.default, (of, dims))
            with of.meta["val"].fake_mode, torch.no_grad():
                view.meta = {**tags, "val": of.meta["val"].permute(dims)}
            return view

        with graph.inserting_before(node):
            node.args = (permuted(source, order), *node.args[1:])
        with like.fake_mode, torch.no_grad():
            node.meta["val"] = torch.empty(node.args[0].meta["val"].shape, dtype=like.dtype, device=like.device)
        with graph.inserting_after(node):
            back = permuted(node, [order.index(d) for d in range(like.dim())])
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
