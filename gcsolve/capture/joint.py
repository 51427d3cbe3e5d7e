"""The joint forward and backward graph of a flat module, and what each of its inputs and outputs means.

`torch.export` (non-strict) first, then AOTAutograd's joint trace of the exported module: on 46 of 47 architectures tried
this works where tracing the module directly failed on 11 (design notes, section 5).
"""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import fx, nn

from gcsolve._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    OutputType,
    TracingContext,
    aot_descriptors,
    aot_export_joint_with_descriptors,
    as_eager_kernels,
    backends_left_on,
    draws_kept,
    functorch_config,
    tracing,
    unordered_checks,
    view_like,
)
from gcsolve.capture.autocast import share_casts
from gcsolve.capture.custom_functions import KeptFunctions
from gcsolve.capture.generators import StandIns
from gcsolve.capture.module_state import held_tensors
from gcsolve.capture.reached import REACHED
from gcsolve.capture.recurrent import RECURRENT
from gcsolve.errors import TraceError


def fake_tensor(mode: FakeTensorMode, t: torch.Tensor) -> torch.Tensor:
    """A fake of `t` (real, fake of another mode, or meta; meta becomes CPU): same shape, strides, dtype, requires_grad."""
    device = torch.device("cpu") if t.device.type == "meta" else t.device
    with mode, torch.no_grad():
        made = torch.empty_strided(tuple(t.shape), tuple(t.stride()), dtype=t.dtype, device=device)
    return made.requires_grad_(t.requires_grad)


def fake_module(mode: FakeTensorMode, model: nn.Module, generators: Mapping[int, torch.Generator]) -> nn.Module:
    """A structural copy of `model` with fake parameters and buffers; the model itself is not touched.

    Args:
        generators: id -> what stands in the copy for a random generator of the model's.
    """
    memo: dict[int, Any] = dict(generators)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_tensor(mode, parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensor(mode, buffer)
    for key, (_, held) in held_tensors(model).items():
        memo.setdefault(key, held)  # what hangs on a module otherwise stays the very tensor it is
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class OutputPlan:
    """How one flat output of the model is made from what the forward graph returns.

    `kind`: "value" (the graph's own output), "input" (it is input `base`), "view_of_input", or "view_of_output" (a view
    of what the graph returns at position `base`). `position`: where the graph returns it.
    """

    kind: str
    position: int
    base: int
    requires_grad: bool


@dataclass(frozen=True)
class Joint:
    """The joint graph and what its inputs and outputs mean.

    `inputs`: one entry a forward placeholder: ("param", FQN), ("buffer", FQN), ("constant", name), ("input", index),
    ("attribute", name) for a tensor that is a module's plain attribute, ("source", index) and ("generator", name) for a
    random generator among the inputs or a module's attributes.
    `cast_weights`: (position in inputs, dtype) of each weight that autocast casts for all its uses, and keeps cast as long
    as its block lasts.
    `tangents`: for each tangent placeholder, the position of the forward output it belongs to.
    `outputs`: one entry a flat output of the model. `mutations`: (position in graph outputs, position in inputs).
    `gradients`: (position in graph outputs, position in inputs). The first `n_forward_outputs` graph outputs are the
    forward's. `constants`: tensors that the model made or holds outside its parameters and buffers. `parted`: flat outputs
    that share memory with another, but not their place in autograd.
    """

    graph_module: fx.GraphModule
    inputs: tuple[tuple[str, Any], ...]
    cast_weights: tuple[tuple[int, torch.dtype], ...]
    tangents: tuple[int, ...]
    outputs: tuple[OutputPlan, ...]
    mutations: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, int], ...]
    n_forward_outputs: int
    constants: dict[str, torch.Tensor]
    parted: frozenset[int] = frozenset()


_KINDS = {
    OutputType.non_alias: "value",
    OutputType.unsafe_view_alias: "value",
    OutputType.custom_function_view: "value",
    OutputType.is_input: "input",
    OutputType.alias_of_input: "view_of_input",
    OutputType.alias_of_intermediate: "view_of_output",
    OutputType.alias_of_intermediate_save_as_output: "view_of_output",
    OutputType.alias_of_intermediate_base_is_user_output: "view_of_user_output",
}


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Eager's CPU dropout divides a mask of ones by 1-p in the dtype and multiplies; the fused op traced for it multiplies
    by 1/(1-p), which in float32 is another number for some p. At p=1 eager draws nothing."""
    if x.device.type != "cpu" or train is False:
        return NotImplemented
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype), torch.zeros_like(x, dtype=torch.bool)
    if x.dtype != torch.float32 or _same_scale(p):
        return NotImplemented
    mask = torch.ops.aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1.0 - p)
    return x * mask.to(x.dtype).div(1.0 - p), mask


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The same for its gradient; in half precision the fused backward does not round the scale, and eager does."""
    half = grad.dtype in (torch.bfloat16, torch.float16)
    single = grad.dtype == torch.float32 and scale > 0 and not _same_scale(1.0 - 1.0 / scale)
    if grad.device.type != "cpu" or not scale or not (half or single):
        return NotImplemented
    return grad * mask.to(grad.dtype).div(1.0 / scale)


def _same_scale(p: float) -> bool:
    """Whether 1/(1-p) rounded to float32 is 1 divided by 1-p in float32."""
    return numpy.float32(1.0 / (1.0 - p)) == numpy.float32(1.0) / numpy.float32(1.0 - p)


_AS_EAGER: Any = {
    torch.ops.aten.native_dropout.default: _dropout,
    torch.ops.aten.native_dropout_backward.default: _dropout_backward,
}


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
        stand_ins: the generators that the model may draw from.
        leaves: positions of the arguments that are leaves of autograd's graph and need a gradient.
        exported: export first, which takes more models and knows modules and source lines. It sees no autograd: a model
            that takes gradients in forward is traced directly, and so is one that sets the default dtype.
        on_cpu: tensors on the CPU stay there, and its kernels' own ways are followed.

    Raises:
        whatever torch raises; `trace.py` words it for the user.
        TraceError: the joint graph has an input or output of a kind gcsolve cannot serve exactly.
    """
    with contextlib.ExitStack() as around:
        around.enter_context(tracing(TracingContext(mode)))
        backward = "same_as_forward" if autocast_backward else "off"
        around.enter_context(functorch_config.patch(functionalize_rng_ops=False, backward_pass_autocast=backward))
        around.enter_context(as_eager_kernels({**RECURRENT, **REACHED} if on_cpu else None))
        around.enter_context(unordered_checks())
        around.enter_context(draws_kept())
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, about export and about the copy; the user can do nothing
        functions = around.enter_context(KeptFunctions())
        casts: dict[int, torch.dtype] = {}
        if exported:
            with functions.recording(), backends_left_on():
                program = torch.export.export(module, tuple(args), strict=False)
            module = program.module(check_guards=False)
            casts = share_casts(module, {at: args[at] for at in leaves})
        with contextlib.ExitStack() as stack:
            captured = aot_export_joint_with_descriptors(
                stack, module, tuple(args), decompositions=_AS_EAGER if on_cpu else {}
            )
    _share_constants(captured.graph_module.graph)
    return _with_generators(_described(captured, module, args, casts), stand_ins)


def _share_constants(graph: fx.Graph) -> None:
    """One node a tensor that the trace met elsewhere than among parameters, buffers and inputs, and views of it that share
    its storage: the trace makes a node and a storage for each use, and others for the views."""
    first: dict[Any, fx.Node] = {}
    sharing: set[fx.Node] = set()
    for node in tuple(graph.nodes):
        if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
            kept = first.setdefault(node.target, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
            sharing.add(kept)
        elif sharing.intersection(node.all_input_nodes) and _makes_views(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with next(iter(first.values())).meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            sharing.add(node)


def _makes_views(node: fx.Node) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and view_like(node.target))


def _with_generators(joint: Joint, stand_ins: StandIns) -> Joint:
    """Random generators in the graph become inputs, so that every call draws from the ones it finds."""
    graph = joint.graph_module.graph
    first = {}
    places: list[tuple[str, Any]] = []
    last = graph.find_nodes(op="placeholder")[len(joint.inputs) - 1]
    for node in graph.find_nodes(op="get_attr"):
        generator = getattr(joint.graph_module, str(node.target), None)
        if not isinstance(generator, torch.Generator):
            continue
        place = stand_ins.place(generator)
        if place not in first:
            with graph.inserting_after(last):
                first[place] = last = graph.placeholder(f"generator_{len(first)}")
            places.append(place)
        node.replace_all_uses_with(first[place])
        graph.erase_node(node)
    return replace(joint, inputs=(*joint.inputs, *places))


def _described(
    captured: Any, module: nn.Module, args: Sequence[torch.Tensor], casts: Mapping[int, torch.dtype]
) -> Joint:
    """AOTAutograd's descriptors and metadata as our own frozen record.

    Args:
        casts: as `share_casts` returns them.
    """
    metadata = captured._aot_state.fw_metadata
    gm: fx.GraphModule = captured.graph_module
    inputs: list[tuple[str, Any]] = []
    descriptions: list[Any] = []
    tangent_of: list[Any] = []
    constants: dict[str, torch.Tensor] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        what = node.meta["desc"]
        if isinstance(what, aot_descriptors.TangentAOTInput):
            tangent_of.append(what.output)
            continue
        descriptions.append(what)
        if isinstance(what, aot_descriptors.PlainAOTInput):
            inputs.append(("input", what.idx))
        elif isinstance(what, (aot_descriptors.ParamAOTInput, aot_descriptors.BufferAOTInput)):
            attribute = _attribute(module, what.target)
            if isinstance(attribute, torch.Tensor) and not isinstance(attribute, FakeTensor):
                constants[what.target] = attribute
                inputs.append(("constant", what.target))
            else:
                kind = "param" if isinstance(what, aot_descriptors.ParamAOTInput) else "buffer"
                inputs.append((kind, what.target))
        else:
            raise TraceError(
                f"the traced step has an input of kind {type(what).__name__}, which gcsolve cannot serve exactly; "
                "if two inputs share memory and one is changed in place, pass a clone of one of them"
            )

    found: Any = gm.graph.output_node().meta["desc"]
    made: Any = gm.graph.output_node().args[0]
    positions = {what.idx: at for at, what in enumerate(found) if isinstance(what, aot_descriptors.PlainAOTOutput)}
    bases: list[int] = []
    mutations: list[tuple[int, int]] = []
    gradients: list[tuple[int, int]] = []
    cast_weights: list[tuple[int, torch.dtype]] = []
    n_forward = 0
    for at, what in enumerate(found):
        if isinstance(what, aot_descriptors.GradAOTOutput):
            if made[at] is not None:
                weight = descriptions.index(what.grad_of)
                gradients.append((at, weight))
                kind, name = inputs[weight]
                dtype = casts.get(id(args[name] if kind == "input" else _attribute(module, name)))
                if dtype is not None and _is_cast_from(made[at], dtype):
                    cast_weights.append((weight, dtype))
            continue
        if what is None:  # the place of an input that needs no gradient
            continue
        n_forward += 1
        if isinstance(what, aot_descriptors.InputMutationAOTOutput):
            changed = descriptions.index(what.mutated_input)
            if (
                metadata.input_info[changed].requires_grad
                and not metadata.input_info[changed].mutations_hidden_from_autograd
            ):
                name = inputs[changed][1]
                raise TraceError(
                    f"forward changes {inputs[changed][0]} {name} in place, and it needs a gradient; gcsolve cannot hand "
                    "autograd both contents. Work on a clone of it in forward"
                )
            mutations.append((at, changed))
        elif isinstance(what, aot_descriptors.IntermediateBaseAOTOutput):
            bases.append(at)
        elif not isinstance(what, aot_descriptors.PlainAOTOutput):
            raise TraceError(
                f"the traced step has an output of kind {type(what).__name__}, which gcsolve cannot serve exactly"
            )
    _lay_tangents_densely(gm.graph)
    _draw_in_memory_order(gm.graph)
    return Joint(
        graph_module=gm,
        inputs=tuple(inputs),
        cast_weights=tuple(cast_weights),
        tangents=tuple(list(found).index(what) for what in tangent_of),
        outputs=tuple(_output_plan(info, i, positions, bases, made) for i, info in enumerate(metadata.output_info)),
        mutations=tuple(mutations),
        gradients=tuple(gradients),
        n_forward_outputs=n_forward,
        constants=constants,
    )


def summed_otherwise(joint: Joint) -> frozenset[int]:
    """The flat outputs that are views of one another, or an input or views of it, where three or more gradients meet at what
    they view. Autograd would sum those of the outputs before the planned backward begins, or after it; eager sums all of
    them in the order of the model's ops."""
    graph = joint.graph_module.graph
    made: Any = graph.output_node().args[0]
    starts = graph.find_nodes(op="placeholder")[len(joint.inputs) :]
    tangent = dict(zip(joint.tangents, starts, strict=True))
    gradient = {at: made[position] for position, at in joint.gradients}
    sharing: dict[tuple[str, int], set[int]] = {}
    for at, plan in enumerate(joint.outputs):
        if plan.requires_grad and plan.kind in ("input", "view_of_input"):
            sharing.setdefault(("input", plan.base), set()).add(at)
        elif plan.requires_grad:
            sharing.setdefault(("made", plan.position if plan.kind == "value" else plan.base), set()).add(at)
    found: set[int] = set()
    for (kind, place), outputs in sharing.items():
        if kind == "input" and place in gradient:
            inside = 2 if gradient[place].target is torch.ops.aten.add.Tensor else 1
        else:
            inside = place in tangent and any(u.target is torch.ops.aten.add.Tensor for u in tangent[place].users)
        if len(outputs) + inside > 2 and any(joint.outputs[at].kind != "value" for at in outputs):
            found |= outputs
    return frozenset(found)


def _is_cast_from(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is torch.ops.aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype == dtype


def _lay_tangents_densely(graph: fx.Graph) -> None:
    """The gradient of an output that is part of something larger (a slice, one token of each sequence) is traced with that
    output's strides, in a storage as large as the whole. A loss sends it densely, and eager takes it so. Where a view reads
    it, its strides matter, and stay; not those of an expanded output (torch 2.12), which no gradient could be laid in."""
    for node in graph.find_nodes(op="placeholder"):
        if not isinstance(node.meta["desc"], aot_descriptors.TangentAOTInput):
            continue
        tangent = node.meta["val"]
        for user in list(node.users):  # of a parted output
            if user.target is torch.ops.aten.view.default and user.meta["val"].shape == tangent.shape:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
        unseen = all(isinstance(user.target, OpOverload) and not view_like(user.target) for user in node.users)
        dense, there = tangent.numel() * tangent.element_size(), tangent.untyped_storage().nbytes()
        if there < dense or (there > dense and unseen):
            with tangent.fake_mode, torch.no_grad():
                node.meta["val"] = torch.empty_like(tangent)


def _draw_in_memory_order(graph: fx.Graph) -> None:
    """Eager's `bernoulli_` (in dropouts that work in place, and others) fills a channels-last tensor as it lies in memory; the
    functional op that it is traced as would fill it row by row."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        filled = node.args[0]
        like = filled.meta["val"]
        order = sorted(range(like.dim()), key=lambda d: -like.stride(d))
        if like.is_contiguous() or not like.permute(order).is_contiguous():
            continue
        tags = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}

        def permuted(of: fx.Node, dims: list[int], tags: dict[str, Any] = tags) -> fx.Node:
            made = graph.call_function(torch.ops.aten.permute.default, (of, dims))
            with of.meta["val"].fake_mode, torch.no_grad():
                made.meta = {**tags, "val": of.meta["val"].permute(dims)}
            return made

        with graph.inserting_before(node):
            node.args = (permuted(filled, order), *node.args[1:])
        with like.fake_mode, torch.no_grad():
            node.meta["val"] = torch.empty(node.args[0].meta["val"].shape, dtype=like.dtype, device=like.device)
        with graph.inserting_after(node):
            back = permuted(node, [order.index(d) for d in range(like.dim())])
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def _output_plan(
    info: Any, index: int, positions: dict[int, int], bases: list[int], made: Sequence[fx.Node]
) -> OutputPlan:
    kind = _KINDS[info.output_type]
    if kind.startswith("view"):
        _refuse_lazy(made[positions[index]])
    base = -1 if info.base_idx is None else int(info.base_idx)
    if kind == "view_of_output":
        base = bases[base]
    elif kind == "view_of_user_output":
        kind, base = "view_of_output", positions[base]
    return OutputPlan(kind, positions[index], base, bool(info.requires_grad))


def _refuse_lazy(node: fx.Node) -> None:
    """A view that also conjugates or negates what it views, when it is read, which no strides tell."""
    while isinstance(node.target, OpOverload) and view_like(node.target):
        if node.target in (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default):
            raise TraceError(
                "the model returns the conjugate of something else that it returns or was given, as a view of it (conj, or the "
                "imag of a conjugate), which a planned step cannot hand out. Return it with .resolve_conj() or .clone()"
            )
        node = node.all_input_nodes[0]


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
