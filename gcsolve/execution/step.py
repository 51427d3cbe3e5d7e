"""Running an emitted plan under autograd: one `autograd.Function` around the two graphs.

What it must get right: saved values live exactly as long as the schedule says (autograd's own list of them is emptied
before backward starts), no autocast and no autograd inside (both are in the graphs already), mutated inputs written once,
outputs that alias inputs handed out as such, and a clear refusal of what was not planned for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gcsolve._torch import below_autograd, disable_autocast
from gcsolve.capture.autocast import first_cast_in_backward
from gcsolve.capture.context import Context
from gcsolve.capture.joint import GraphOutput, InputItself, ViewOfInput, ViewOfOutput
from gcsolve.capture.trace import Trace
from gcsolve.errors import CallError
from gcsolve.execution.emit import Emitted
from gcsolve.execution.gradient_handoff import Handing
from gcsolve.lowering.node_facts import source_line


@dataclass(frozen=True)
class Step:
    """An emitted plan and what its flat inputs and outputs mean: everything needed to run it on tensors."""

    trace: Trace
    emitted: Emitted
    tangent_likes: tuple[torch.Tensor, ...]
    backward_under: dict[Any, fx.Node | None] = field(
        default_factory=dict, compare=False
    )  # autocast -> op that it casts

    @functools.cached_property
    def origins(self) -> tuple[frozenset[int], ...]:
        """Of each gradient, the outputs whose gradients it is made of (of a rounding: none): where the loss uses none of them,
        there is none, as in eager, and an optimizer leaves that parameter alone."""
        joint = self.trace.joint
        graph = joint.graph_module.graph
        of: dict[fx.Node, frozenset[int]] = dict.fromkeys(graph.nodes, frozenset())
        starts = graph.find_nodes(op="placeholder")[len(joint.inputs) :]
        of |= {node: frozenset([position]) for node, position in zip(starts, joint.tangents, strict=True)}
        for node in graph.nodes:
            of[node] = of[node].union(*(of[read] for read in node.all_input_nodes))
        made: Any = graph.output_node().args[0]
        return tuple(of.get(made[position], frozenset()) for position, _ in joint.gradients)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat outputs of the model for the tensors of `Joint.inputs`, differentiable like the untouched model's."""
        joint = self.trace.joint
        wanted = {at for _, at in joint.gradients}
        returned = _Function.apply(_Call(self, inputs), *(t for i, t in enumerate(inputs) if i in wanted))
        outputs: list[torch.Tensor] = []
        for plan, differentiable in zip(joint.outputs, self.trace.differentiable, strict=True):
            match plan:
                case GraphOutput():
                    value = returned[plan.position]
                case InputItself():
                    value = inputs[plan.input]
                case ViewOfInput():
                    value = _viewed(inputs[plan.input], returned[plan.position])
                case ViewOfOutput():
                    value = _viewed(returned[plan.base], returned[plan.position])
            outputs.append(value.detach() if value.requires_grad and not differentiable else value)
        return self._guard_unplanned(outputs)

    def refuse_other_autocast(self, kinds: set[str]) -> None:
        """A backward under another autocast than planned for, on those kinds of devices, where that makes a difference.

        Raises:
            CallError: it does, and how to plan for it.
        """
        now, planned = (
            tuple(region for region in context.regions if region[0] in kinds)
            for context in (Context.here(), self.trace.backward_context)
        )
        if now == planned:
            return
        if planned:
            raise CallError(
                "this backward is called outside the autocast block, and the plan is for a backward inside it "
                "(autocast_backward=True), where eager casts otherwise. Call it inside, or plan without autocast_backward"
            )
        if now not in self.backward_under:
            self.backward_under[now] = first_cast_in_backward(self.trace.joint.graph_module.graph, now)
        node = self.backward_under[now]
        if node is not None:
            raise CallError(
                f"this backward is called inside an autocast block, where eager casts within backward formulas too "
                f"({node.target}{_at(node)}), and the plan is for a backward outside it. Call it outside, as torch advises, "
                "or plan with gcsolve.solve(..., autocast_backward=True)"
            )

    def _guard_unplanned(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs planned without a gradient refuse one instead of silently dropping it."""
        t = self.trace
        unplanned = [k for k in range(len(outputs)) if t.differentiable[k] and not t.takes_gradient[k]]
        if unplanned:
            anchor = next(o for k, o in enumerate(outputs) if t.takes_gradient[k])
            names = tuple(t.output_paths[k] for k in unplanned)
            guarded = _Unplanned.apply(names, anchor, *(outputs[k] for k in unplanned))
            for k, value in zip(unplanned, guarded, strict=True):
                outputs[k] = value
        return outputs


def _viewed(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The view of `base` that lies where `like` does, for autograd: gradients of one number that stands in many places are
    summed as those of an expanded tensor, and a complex view of real numbers (or the reverse) is one."""
    stride, offset = like.stride(), like.storage_offset()
    size = [1 if s == 0 else n for n, s in zip(like.shape, stride, strict=True)]
    if base.dtype == like.dtype:
        made = base.as_strided(size, stride, offset)
    elif like.is_complex():
        made = torch.view_as_complex(base.as_strided((*size, 2), (*(2 * s for s in stride), 1), 2 * offset))
    else:
        made = (torch.view_as_real(base) if base.is_complex() else base.view(like.dtype)).as_strided(
            size, stride, offset
        )
    return made.expand(like.shape) if made.shape != like.shape else made


@dataclass
class _Call:
    """One call: the step and its inputs, handed around autograd as a plain object."""

    step: Step
    inputs: Sequence[torch.Tensor] | None

    def take(self) -> list[torch.Tensor]:
        assert self.inputs is not None
        taken, self.inputs = list(self.inputs), None
        return taken


class _Function(torch.autograd.Function):
    """Forward graph now, backward graph when the gradients come."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, inputs = call.step, call.take()
        joint, emitted = step.trace.joint, step.emitted
        with disable_autocast():
            with torch.enable_grad(), below_autograd():  # kernels that ask the grad mode must act as in training
                results = emitted.forward.forward(list(inputs))
            n = joint.n_forward_outputs
            for position, at in joint.mutations:
                inputs[at].copy_(results[position])
        ctx.set_materialize_grads(False)  # else autograd makes zeros for outputs that no gradient was planned for
        ctx.step = step
        weights = {at: inputs[at] for _, at in joint.gradients}
        ctx.handing = Handing(ctx, weights, dict(joint.cast_weights), emitted.sums)
        # What a step writes, a rerun reads without regard to its content (a BatchNorm's running statistics): another call may
        # have written it meanwhile, which autograd refuses of what it saves.
        written = {at for _, at in joint.mutations}
        ctx.written = {at: inputs[at] for at in emitted.backward_inputs if at in written}
        ctx.save_for_backward(*results[n:], *(inputs[at] for at in emitted.backward_inputs if at not in written))
        # Neither what is written already nor an input itself, which autograd would detach where it stands.
        unsaid = {position for position, _ in joint.mutations}
        unsaid |= {plan.position for plan in joint.outputs if isinstance(plan, InputItself)}
        returned = _in_one_memory(
            [None if p in unsaid else r for p, r in enumerate(results[:n])],
            [plan.position for at, plan in enumerate(joint.outputs) if at in joint.parted],
            inputs,
        )
        tangents = set(joint.tangents)
        ctx.mark_non_differentiable(
            *(r for p, r in enumerate(returned) if p not in tangents and isinstance(r, torch.Tensor))
        )
        return tuple(returned)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise CallError(
                "this backward runs with create_graph=True: a planned module has no second derivative. "
                "Call the original model for that loss, or drop create_graph"
            )
        step: Step = ctx.step
        joint, emitted = step.trace.joint, step.emitted
        step.refuse_other_autocast({g.device.type for g in gradients if g is not None})
        boxed: list[Any] = list(ctx.saved_tensors)
        for at in ctx.written:  # in the order of the backward's inputs
            boxed.insert(emitted.n_saved + emitted.backward_inputs.index(at), ctx.written[at])
        ctx.maybe_clear_saved_tensors()
        there = {position for position in joint.tangents if gradients[position] is not None}
        for position, like in zip(joint.tangents, step.tangent_likes, strict=True):
            boxed.append(_laid_out(gradients[position], like))
        del gradients
        handed = ctx.handing.take()
        begun = frozenset(emitted.sums) & handed.keys()
        boxed += [handed] if emitted.sums else []
        with torch.no_grad(), disable_autocast():
            made = emitted.backward.forward(boxed)
        by_input = {
            at: g if not origins or there & origins or at in begun else None
            for (_, at), g, origins in zip(joint.gradients, made, step.origins, strict=True)
        }
        by_input = ctx.handing.hand_on(by_input, handed)
        return (None, *(by_input[at] for at in sorted(by_input)))


def _in_one_memory(returned: list[Any], parted: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
    """Parted outputs (`Joint.parted`) as views, so that autograd refuses to change one in place behind another's back."""
    there = [t for t in inputs if isinstance(t, torch.Tensor)] if parted else []
    viewed = {t.untyped_storage().data_ptr(): t for t in there}
    for position in parted:
        value = returned[position]
        base = viewed.setdefault(value.untyped_storage().data_ptr(), value)
        returned[position] = _viewed(base, value)
    return returned


def _at(node: fx.Node) -> str:
    line = source_line(node)
    return f" of {line}" if line else ""


def _laid_out(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The gradient with the strides it was traced with; zeros where the caller's loss did not use the output.

    One number spread over all places (what `out.sum().backward()` sends) is handed on as it is: any view of it can be
    made, and eager's kernels see it so too.
    """
    size, stride = tuple(like.shape), tuple(like.stride())
    if gradient is None:
        return torch.empty_strided(size, stride, dtype=like.dtype, device=like.device).zero_()
    if tuple(gradient.stride()) == stride or all(
        s == 0 or n == 1 for n, s in zip(size, gradient.stride(), strict=True)
    ):
        return gradient
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class _Unplanned(torch.autograd.Function):
    """Identity whose backward refuses: a gradient arrived at an output that was planned without one."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.names = names
        ctx.set_materialize_grads(False)
        return tuple(o.view_as(o) for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        named = [name for name, g in zip(ctx.names, gradients, strict=True) if g is not None]
        if named:
            raise CallError(
                f"a gradient arrived at {', '.join(named)}, which was planned without one because the model also returns a "
                "scalar loss; call gcsolve.solve(..., backward_from='all') for a plan that takes it"
            )
        return (None, None, *(None for _ in gradients))


def tangent_likes(trace: Trace) -> tuple[torch.Tensor, ...]:
    """Fake tensors with the shape, strides, dtype and device that the traced backward expects of each output gradient."""
    placeholders = trace.joint.graph_module.graph.find_nodes(op="placeholder")[len(trace.joint.inputs) :]
    return tuple(n.meta["val"] for n in placeholders)
