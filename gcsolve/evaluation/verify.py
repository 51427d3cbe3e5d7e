"""`plan.verify`: measures a plan beside the untouched model, and compares what both compute, bitwise.

Both are run as deep copies, in lockstep from the same generator state, so that nothing of the caller's changes. A peak is
that of a whole step (forward, backward, optimizer) as `gcsolve.ops.peak_meter` measures it, plus what is alive before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gcsolve.capture.module_state import attributes_of
from gcsolve.cost.devices import DeviceSpec
from gcsolve.cost.optimizer_memory import make_optimizer, plain_tensors
from gcsolve.errors import ArgumentError
from gcsolve.lowering.costed import LIBRARY_BUFFERS, storage_bytes
from gcsolve.ops.peak_meter import PeakMeter, interleaved_times
from gcsolve.plan_record import PlanRecord
from gcsolve.session import Session
from gcsolve.util.checks import whole
from gcsolve.util.sizes import size_text
from gcsolve.util.tree import flatten


def _time(seconds: float) -> str:
    """Seconds as text: "1.234 s" or "12.345 ms"."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1000 * seconds:.3f} ms"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The measurements of a plan and of the untouched ("eager") model.

    Attributes:
        steps: optimizer steps that were compared.
        budget_bytes, predicted_peak_bytes: the plan's.
        measured_peak_bytes, eager_peak_bytes: peaks of one whole step.
        step_s, eager_step_s: median seconds of a forward and backward, run in turn; 0.0 if they were not timed.
        losses, eager_losses: for each step, the sum of the outputs that backward starts from.
        differences: what was not bitwise equal, as in "step 2: gradient of conv1.weight"; empty if everything was.
    """

    steps: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    eager_peak_bytes: int
    step_s: float
    eager_step_s: float
    losses: tuple[float, ...]
    eager_losses: tuple[float, ...]
    differences: tuple[str, ...]

    def _equal(self, what: str) -> bool:
        return not any(f": {what}" in d for d in self.differences)

    @property
    def losses_equal(self) -> bool:
        return self._equal("output")

    @property
    def gradients_equal(self) -> bool:
        return self._equal("gradient")

    @property
    def parameters_equal(self) -> bool:
        return self._equal("parameter")

    @property
    def buffers_equal(self) -> bool:
        return self._equal("buffer")

    @property
    def rng_equal(self) -> bool:
        return self._equal("generator")

    @property
    def within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """(predicted - measured) / measured peak."""
        return (self.predicted_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes

    @property
    def time_ratio(self) -> float:
        return self.step_s / self.eager_step_s if self.eager_step_s else float("nan")

    @property
    def ok(self) -> bool:
        """Whether everything is bitwise equal and the measured peak is within the budget."""
        return not self.differences and self.within_budget

    def summary(self) -> str:
        """Peak, step time, losses and equality as four lines of text."""
        equal = "all bitwise equal" if not self.differences else "NOT equal: " + "; ".join(self.differences[:5])
        timed = f"{_time(self.step_s)}, untouched model {_time(self.eager_step_s)} (x {self.time_ratio:.3f})"
        return "\n".join(
            [
                f"peak: measured {size_text(self.measured_peak_bytes)}, predicted {size_text(self.predicted_peak_bytes)} "
                f"({self.prediction_error:+.2%}), budget {size_text(self.budget_bytes)} "
                f"{'kept' if self.within_budget else 'EXCEEDED'}; untouched model {size_text(self.eager_peak_bytes)}",
                f"step time: {timed if self.eager_step_s else 'not taken'}",
                f"loss: {', '.join(f'{x:.6g}' for x in self.losses)}; "
                f"untouched model {', '.join(f'{x:.6g}' for x in self.eager_losses)}",
                f"{self.steps} steps: outputs, gradients, parameters, buffers, generator state: {equal}",
            ]
        )

    def __str__(self) -> str:
        return self.summary()

    __repr__ = __str__  # a notebook's cell that ends in a report shows its summary


class _Runner:
    """One of the two models with its optimizer, its copy of the inputs and its generator state."""

    def __init__(self, model: nn.Module, plan: PlanRecord, session: Session, loss: Any) -> None:
        self.model, self.plan, self.settings, self.loss = model, plan, session.settings, loss
        call = session.args, session.kwargs
        self.args, self.kwargs = _deep_copy(call, "the inputs", _leaf_copies(call))
        self.optimizer = make_optimizer(
            session.settings.optimizer, [p for p in model.parameters() if p.requires_grad] or _placeholder_parameters()
        )
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.state = _generator_state(self.device)
        self.outputs: list[torch.Tensor] = []
        self.live_outputs: list[torch.Tensor] = []
        self.allocated_peak_bytes = 0

    def forward_backward(self) -> None:
        """Run forward, and backward from gradients of ones of the outputs that the plan starts backward from.

        Forward runs under the planned autocast and default dtype, backward where it was planned to be called. The outputs stay
        alive, as a caller keeps them.
        """
        with self.plan.costed.trace.context.entered():
            result = self.model(*self.args, **self.kwargs)
            if self.loss is not None:
                result = self.loss(result)
        outputs, _ = flatten(result, "output")
        starts = self.plan.costed.trace.takes_gradient
        differentiated = [output for output, is_start in zip(outputs, starts, strict=False) if is_start]
        with self.plan.costed.trace.backward_context.entered():
            torch.autograd.backward(differentiated, [torch.ones_like(o) for o in differentiated])
        self.outputs, self.live_outputs = [o.detach() for o in differentiated], [o.detach() for o in outputs]

    def clear(self) -> None:
        """Free the outputs and all gradients."""
        self.outputs, self.live_outputs = [], []
        for tensor in (*self.model.parameters(), *self.inputs()):
            tensor.grad = None

    def inputs(self) -> list[torch.Tensor]:
        """The flat tensors of the call."""
        return flatten((self.args, self.kwargs), "example_input")[0]

    def with_generator_state(self, run: Callable[[], Any]) -> None:
        """`run()` from this model's generator state; the state that it leaves is kept for the next run."""
        _set_generator_state(self.state, self.device)
        run()
        self.state = _generator_state(self.device)

    def external_bytes(self) -> int:
        """Bytes that are alive when a step begins, without the attributes that the call replaces before it allocates."""
        trace = self.plan.costed.trace
        replaced = {*trace.replaced, *(name for name, _ in trace.filled)}
        attributes = {**dict(self.model.named_buffers()), **attributes_of(self.model, torch.Tensor)}
        kept = [t for name, t in attributes.items() if name not in replaced]
        states = [t for s in self.optimizer.state.values() for value in s.values() for t in plain_tensors(value)]
        constants = trace.joint.constants.values()
        tensor_bytes = storage_bytes((*self.model.parameters(), *kept, *self.inputs(), *states, *constants))
        return tensor_bytes + dict(self.plan.problem.graph.external).get(LIBRARY_BUFFERS, 0)

    def peak_bytes(self) -> int:
        """Peak of one whole step. It begins with the gradients of an earlier step if the plan counts them, else with none."""
        accumulated = self.settings.gradient_accumulation
        self.clear()
        if accumulated:
            self.with_generator_state(self.forward_backward)
            self.outputs, self.live_outputs = [], []

        def step() -> None:
            with PeakMeter(self.device) as meter:
                self.forward_backward()
                if self.plan.scope == "step":
                    self.optimizer.step()
            self.allocated_peak_bytes = meter.peak_bytes

        before = 0
        if self.plan.scope == "step":
            before = self.external_bytes()
            if accumulated:
                before += storage_bytes(
                    t.grad for t in (*self.model.parameters(), *self.inputs()) if t.grad is not None
                )
        self.with_generator_state(step)
        self.clear()
        return before + self.allocated_peak_bytes


def verify(plan: PlanRecord, session: Session, *, steps: int = 3, repeats: int = 3) -> VerifyReport:
    """Train copies of the untouched model and of the planned one for `steps` steps and compare everything bitwise.

    Args:
        plan: a plan of `session`.
        session: the model, its call and the settings.
        steps: optimizer steps (≥ 1), with the plan's optimizer, or plain SGD if it has none.
        repeats: timed forward-backward runs of each model, in turn; 0: no timing (times are then 0.0).

    Raises:
        ArgumentError: steps or repeats are not such numbers, the weights are on meta, or neither model nor inputs are on
            the plan's kind of device.
    """
    steps, repeats = whole("steps", steps, least=1, floats=False), whole("repeats", repeats, floats=False)
    model = session.model
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ArgumentError("verify runs the model, and its weights are on meta; give it real weights first")
    inputs, _ = flatten((session.args, session.kwargs), "example_input")
    refuse_elsewhere("verify", session.settings.device, model, inputs)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    caller_state = _generator_state(device)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
        ):  # a training step needs both, whatever the caller has set
            eager = _Runner(_deep_copy(model, "the model"), plan, session, session.settings.loss)
            planned = _Runner(_deep_copy(plan.module, "the model"), plan, session, None)
            return _compared(plan, eager, planned, steps, repeats)
    finally:
        _set_generator_state(caller_state, device)


def refuse_elsewhere(what: str, planned: DeviceSpec, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Raise `ArgumentError` if neither model nor inputs are on the planned kind of device: measurements elsewhere do not
    tell whether the plan holds. `what` names the caller in the error's text."""
    kinds = {t.device.type for t in (*model.parameters(), *model.buffers(), *inputs)}
    if planned.kind not in kinds:
        raise ArgumentError(
            f"{what} measures where the model is ({', '.join(sorted(kinds))}), and the plan is for device={planned.name!r} "
            f"({planned.kind}), whose memory and kernels are others. Move model and inputs there and plan again, or plan with "
            "device='cpu' to measure here"
        )


def _deep_copy(value: Any, what: str, memo: dict[int, Any] | None = None) -> Any:
    """`copy.deepcopy`, whose errors become an `ArgumentError` that names `what`."""
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise ArgumentError(
            f"verify trains a copy of {what}, and copy.deepcopy refuses ({type(error).__name__}: {error}); an attribute "
            "that holds the result of a computation (a weight made by torch.nn.utils.weight_norm) is the usual reason"
        ) from error


def _leaf_copies(arguments: Any) -> dict[int, Any]:
    """id -> copy of each tensor argument that is the result of a computation, which `copy.deepcopy` refuses to copy."""
    copies = {}
    for tensor in flatten(arguments, "example_input")[0]:
        if not tensor.is_leaf:
            copies[id(tensor)] = copy.deepcopy(tensor.detach()).requires_grad_()
    return copies


def _compared(plan: PlanRecord, eager: _Runner, planned: _Runner, steps: int, repeats: int) -> VerifyReport:
    """Run both models in lockstep, and report."""
    differences: list[str] = []
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(1, steps + 1):
        for runner, curve in zip((eager, planned), losses, strict=True):
            runner.clear()
            runner.with_generator_state(runner.forward_backward)
            curve.append(sum(float(o.float().sum()) for o in runner.outputs))
        differences += _differences(step, eager, planned)
        for runner in (eager, planned):
            runner.with_generator_state(runner.optimizer.step)
    differences += _state_differences(steps, eager, planned)
    eager_peak, peak = eager.peak_bytes(), planned.peak_bytes()
    times = [0.0, 0.0]
    if repeats:
        times = interleaved_times([_timed(eager), _timed(planned)], repeats, device=eager.device)
    return VerifyReport(
        steps=steps,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=peak,
        eager_peak_bytes=eager_peak,
        step_s=times[1],
        eager_step_s=times[0],
        losses=tuple(losses[1]),
        eager_losses=tuple(losses[0]),
        differences=tuple(differences),
    )


def _timed(runner: _Runner) -> Callable[[], None]:
    """The function whose time is measured."""

    def run() -> None:
        runner.clear()
        runner.with_generator_state(runner.forward_backward)

    return run


def _differences(step: int, eager: _Runner, planned: _Runner) -> list[str]:
    """What differs after a forward and backward: outputs, gradients, contents of the inputs, generator state."""
    differences = []
    for k, (a, b) in enumerate(zip(eager.outputs, planned.outputs, strict=True)):
        if not _same(a, b):
            differences.append(f"step {step}: output {k}")
    for (name, a), (_, b) in zip(eager.model.named_parameters(), planned.model.named_parameters(), strict=True):
        if not _same(a.grad, b.grad):
            differences.append(f"step {step}: gradient of {name}")
    for k, (a, b) in enumerate(zip(eager.inputs(), planned.inputs(), strict=True)):
        if a.is_leaf and not _same(a.grad, b.grad):
            differences.append(f"step {step}: gradient of input {k}")
        if not _same(a, b):
            differences.append(f"step {step}: content of input {k}")
    if not all(torch.equal(a, b) for a, b in zip(eager.state, planned.state, strict=True)):
        differences.append(f"step {step}: generator state")
    return differences


def _state_differences(step: int, eager: _Runner, planned: _Runner) -> list[str]:
    """The parameters and buffers that differ."""
    differences = []
    for kind, a_named, b_named in (
        ("parameter", eager.model.named_parameters(), planned.model.named_parameters()),
        ("buffer", eager.model.named_buffers(), planned.model.named_buffers()),
    ):
        for (name, a), (_, b) in zip(a_named, b_named, strict=True):
            if not _same(a, b):
                differences.append(f"step {step}: {kind} {name}")
    return differences


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both are None, or have the same dtype, shape and elements; NaN equals NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _generator_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The states of the default generators of the CPU and, for a GPU, of the device."""
    on_gpu = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *on_gpu)


def _set_generator_state(state: Iterable[torch.Tensor], device: torch.device) -> None:
    first, *rest = state
    torch.set_rng_state(first)
    if rest:
        torch.cuda.set_rng_state(rest[0], device)


def _placeholder_parameters() -> list[torch.Tensor]:
    """Parameters of the optimizer of a model that has no trainable ones, as an optimizer must have some."""
    return [nn.Parameter(torch.zeros(1))]
