"""Running an emitted plan under autograd: one `autograd.Function` around the two graphs.

What it must get right:

- saved values live exactly as long as the schedule says: autograd's own list of them is emptied before backward starts;
- no autocast and no autograd inside: what they do is in the graphs already;
- mutated inputs are written once;
- outputs that are inputs, or views of inputs or of other outputs, are handed out as such;
- what was not planned for is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import fx

from gcsolve._torch import below_autograd, disable_autocast
from gcsolve.capture.autocast import first_cast_in_backward
from gcsolve.capture.context import Context
from gcsolve.capture.joint import GraphOutput, InputItself, ViewOfInput, ViewOfOutput
from gcsolve.capture.trace import Trace
from gcsolve.errors import CallError
from gcsolve.execution.emit import Emitted
from gcsolve.execution.gradient_handoff import GradientHandoff
from gcsolve.lowering.node_facts import source_line


@dataclass(frozen=True)
class Step:
    """An emitted plan and what its flat inputs and outputs stand for: everything needed to run it on tensors.

    Attributes:
        casts_in_backward: autocast regions around a backward -> the first op of the backward that they would cast (None:
            there is none), as far as it has been looked for.
    """

    trace: Trace
    emitted: Emitted
    casts_in_backward: dict[Any, fx.Node | None] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def tangent_likes(self) -> tuple[torch.Tensor, ...]:
        """Fake tensors with the shape, strides, dtype and device that the backward expects of each output gradient."""
        return tuple(node.meta["val"] for node in self.trace.joint.tangent_nodes)

    @functools.cached_property
    def contributors(self) -> tuple[frozenset[int], ...]:
        """For each input gradient: the forward results whose gradients contribute to it.

        Where the loss uses none of them, the input gets no gradient, as in eager, and an optimizer leaves that parameter
        alone. The set is empty for a gradient that depends on no tangent (the zeros of a rounding).
        """
        joint = self.trace.joint
        nodes = joint.graph_module.graph.nodes
        tangents_of: dict[fx.Node, frozenset[int]] = dict.fromkeys(nodes, frozenset())
        tangents_of |= {node: frozenset([at]) for node, at in zip(joint.tangent_nodes, joint.tangents, strict=True)}
        for node in nodes:
            tangents_of[node] = tangents_of[node].union(*(tangents_of[arg] for arg in node.all_input_nodes))
        gradients = (joint.results[position] for position, _ in joint.gradients)
        return tuple(frozenset() if node is None else tangents_of[node] for node in gradients)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat outputs of the model for the tensors of `Joint.inputs`, differentiable like the untouched model's."""
        joint = self.trace.joint
        differentiated = {index for _, index in joint.gradients}
        leaves = (t for index, t in enumerate(inputs) if index in differentiated)
        returned = _PlannedStep.apply(_Call(self, inputs), *leaves)
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
                case _:
                    assert_never(plan)
            outputs.append(value.detach() if value.requires_grad and not differentiable else value)
        return self._guard_unplanned(outputs)

    def refuse_other_autocast(self, kinds: set[str]) -> None:
        """Refuse a backward under another autocast than planned for, where that makes a difference.

        Args:
            kinds: of the devices whose autocast matters ("cpu", "cuda").

        Raises:
            CallError: it makes one; the text says how to plan for it.
        """
        present, planned = (
            tuple(region for region in context.regions if region[0] in kinds)
            for context in (Context.here(), self.trace.backward_context)
        )
        if present == planned:
            return
        if planned:
            raise CallError(
                "this backward is called outside the autocast block, and the plan is for a backward inside it "
                "(autocast_backward=True), where eager casts otherwise. Call it inside, or plan without autocast_backward"
            )
        if present not in self.casts_in_backward:
            self.casts_in_backward[present] = first_cast_in_backward(self.trace.joint.graph_module.graph, present)
        node = self.casts_in_backward[present]
        if node is not None:
            line = source_line(node)
            raise CallError(
                f"this backward is called inside an autocast block, where eager casts within backward formulas too "
                f"({node.target}{f' of {line}' if line else ''}), and the plan is for a backward outside it. Call it outside, "
                "as torch advises, or plan with gcsolve.solve(..., autocast_backward=True)"
            )

    def _guard_unplanned(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs planned without a gradient refuse one instead of silently dropping it."""
        takes, differentiable = self.trace.takes_gradient, self.trace.differentiable
        unplanned = [k for k in range(len(outputs)) if differentiable[k] and not takes[k]]
        if unplanned:
            anchor = next(output for k, output in enumerate(outputs) if takes[k])
            names = tuple(self.trace.output_paths[k] for k in unplanned)
            guarded = _Unplanned.apply(names, anchor, *(outputs[k] for k in unplanned))
            for k, value in zip(unplanned, guarded, strict=True):
                outputs[k] = value
        return outputs


@dataclass
class _Call:
    """One call: the step and its inputs. Autograd passes it on as a plain object, not as tensors of its graph."""

    step: Step
    inputs: Sequence[torch.Tensor] | None

    def take(self) -> list[torch.Tensor]:
        """The inputs, which this object holds no longer."""
        assert self.inputs is not None
        inputs, self.inputs = list(self.inputs), None
        return inputs


class _PlannedStep(torch.autograd.Function):
    """The forward graph in the forward, the backward graph when the gradients come."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, inputs = call.step, call.take()
        joint, emitted = step.trace.joint, step.emitted
        with disable_autocast():
            with torch.enable_grad(), below_autograd():  # kernels that ask the grad mode must act as in training
                results = emitted.forward.forward(list(inputs))
            n = joint.n_forward_outputs
            for position, index in joint.mutations:
                inputs[index].copy_(results[position])
        ctx.set_materialize_grads(False)  # else autograd makes zeros for outputs that no gradient was planned for
        ctx.step = step
        weights = {index: inputs[index] for _, index in joint.gradients}
        ctx.handoff = GradientHandoff(ctx, weights, dict(joint.cast_weights), emitted.continued)
        # What a step writes, a rerun reads without regard to its content (a BatchNorm's running statistics): another call may
        # have written it meanwhile, which autograd refuses of what it saves.
        mutated = {index for _, index in joint.mutations}
        ctx.mutated = {index: inputs[index] for index in emitted.backward_inputs if index in mutated}
        ctx.save_for_backward(*results[n:], *(inputs[i] for i in emitted.backward_inputs if i not in mutated))
        # Autograd is given neither new contents, which are written already, nor inputs, which it would detach in place.
        withheld = {position for position, _ in joint.mutations}
        withheld |= {plan.position for plan in joint.outputs if isinstance(plan, InputItself)}
        returned = _as_views(
            [None if position in withheld else result for position, result in enumerate(results[:n])],
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
        for index in ctx.mutated:  # in the order of the backward's inputs
            boxed.insert(emitted.n_saved + emitted.backward_inputs.index(index), ctx.mutated[index])
        ctx.maybe_clear_saved_tensors()
        arrived = {position for position in joint.tangents if gradients[position] is not None}
        for position, like in zip(joint.tangents, step.tangent_likes, strict=True):
            boxed.append(_laid_out(gradients[position], like))
        del gradients
        later_sums = ctx.handoff.receive()
        continued = frozenset(emitted.continued) & later_sums.keys()
        boxed += [later_sums] if emitted.continued else []
        with torch.no_grad(), disable_autocast():
            results = emitted.backward.forward(boxed)
        by_input = {
            index: gradient if not contributors or arrived & contributors or index in continued else None
            for (_, index), gradient, contributors in zip(joint.gradients, results, step.contributors, strict=True)
        }
        by_input = ctx.handoff.pass_on(by_input, later_sums)
        return (None, *(by_input[index] for index in sorted(by_input)))


class _Unplanned(torch.autograd.Function):
    """Identity whose backward refuses: a gradient arrived at an output that was planned without one."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.names = names
        ctx.set_materialize_grads(False)
        return tuple(o.view_as(o) for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        arrived = [name for name, g in zip(ctx.names, gradients, strict=True) if g is not None]
        if arrived:
            raise CallError(
                f"a gradient arrived at {', '.join(arrived)}, which was planned without one because the model also returns "
                "a scalar loss; call gcsolve.solve(..., backward_from='all') for a plan that takes it"
            )
        return (None, None, *(None for _ in gradients))


# --- layouts --------------------------------------------------------------------------------------------------------------


def _viewed(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The view of `base` that has the layout of `like`, made by ops whose gradients autograd takes as eager does: numbers
    that stand in many places are expanded, so that their gradients are summed, and a complex view of real numbers (or the
    reverse) is made as such."""
    stride, offset = like.stride(), like.storage_offset()
    size = [1 if s == 0 else n for n, s in zip(like.shape, stride, strict=True)]
    if base.dtype == like.dtype:
        view = base.as_strided(size, stride, offset)
    elif like.is_complex():
        view = torch.view_as_complex(base.as_strided((*size, 2), (*(2 * s for s in stride), 1), 2 * offset))
    else:
        view = (torch.view_as_real(base) if base.is_complex() else base.view(like.dtype)).as_strided(
            size, stride, offset
        )
    return view.expand(like.shape) if view.shape != like.shape else view


def _as_views(results: list[Any], positions: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
    """The results, those at `positions` (of `Joint.parted`) as views of the first input or result in the same memory: so
    autograd refuses to change one in place behind another's back."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)] if positions else []
    base_of = {t.untyped_storage().data_ptr(): t for t in tensors}
    for position in positions:
        result = results[position]
        base = base_of.setdefault(result.untyped_storage().data_ptr(), result)
        results[position] = _viewed(base, result)
    return results


def _laid_out(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The gradient with the strides that it was traced with (those of `like`); zeros where the loss did not use the output.

    One number spread over all places (what `out.sum().backward()` sends) stays as it is: any view of it can be made, and
    eager's kernels see it so too.
    """
    size, stride = tuple(like.shape), tuple(like.stride())
    if gradient is None:
        return torch.empty_strided(size, stride, dtype=like.dtype, device=like.device).zero_()
    if tuple(gradient.stride()) == stride or all(
        s == 0 or n == 1 for n, s in zip(size, gradient.stride(), strict=True)
    ):
        return gradient
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
