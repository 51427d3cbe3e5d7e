"""A plan against the untouched model: peak, step time, loss curve, gradients, buffers and generator state, measured.

Both run as deep copies of the model from the same seed, in lockstep, so nothing of the caller's is changed. Peaks are
those of a whole step (forward, backward, optimizer) as `gcsolve.ops.peak_meter` measures them, plus what lived before it began.
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
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1000 * seconds:.3f} ms"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What was measured. Peaks in bytes, times in seconds (medians of interleaved forward-backward runs).

    `differences`: what was not bitwise equal, as "step 2: gradient of conv1.weight"; empty when all was.
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
        """Everything equal and the measured peak within the budget."""
        return not self.differences and self.within_budget

    def summary(self) -> str:
        """The four acceptance checks as text."""
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

    __repr__ = __str__  # the last line of a notebook's cell shows the checks, not the fields


class _Runner:
    """One of the two models with its optimizer, its own copy of the inputs and its place in the random stream."""

    def __init__(self, model: nn.Module, plan: PlanRecord, session: Session, loss: Any) -> None:
        self.model, self.plan, self.settings, self.loss = model, plan, session.settings, loss
        call = session.args, session.kwargs
        self.args, self.kwargs = _copied(call, "the inputs", _leaves(call))
        self.optimizer = make_optimizer(
            session.settings.optimizer, [p for p in model.parameters() if p.requires_grad] or _none()
        )
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.state = _generator_state(self.device)
        self.outputs: list[torch.Tensor] = []
        self.held: list[torch.Tensor] = []
        self.measured = 0

    def forward_backward(self) -> None:
        """Gradients of the outputs that the plan takes gradients for (ones), outputs held as a caller would.

        Forward under the autocast and default dtype that were planned, backward where it was planned to be called.
        """
        with self.plan.costed.trace.context.entered():
            result = self.model(*self.args, **self.kwargs)
            if self.loss is not None:
                result = self.loss(result)
        outputs, _ = flatten(result, "output")
        graded = [o for o, takes in zip(outputs, self.plan.costed.trace.takes_gradient, strict=False) if takes]
        with self.plan.costed.trace.backward_context.entered():
            torch.autograd.backward(graded, [torch.ones_like(o) for o in graded])
        self.outputs, self.held = [o.detach() for o in graded], [o.detach() for o in outputs]

    def clear(self) -> None:
        self.outputs, self.held = [], []
        for tensor in (*self.model.parameters(), *self.inputs()):
            tensor.grad = None

    def inputs(self) -> list[torch.Tensor]:
        return flatten((self.args, self.kwargs), "example_input")[0]

    def on_own_stream(self, run: Callable[[], Any]) -> None:
        """`run()` from where this model's random stream stands, and remember where it got to."""
        _set_generator_state(self.state, self.device)
        run()
        self.state = _generator_state(self.device)

    def external_bytes(self) -> int:
        """What is there when a step begins, but for what its call lets go first."""
        trace = self.plan.costed.trace
        let_go = {*trace.replaced, *(name for name, _ in trace.filled)}
        hanging = {**dict(self.model.named_buffers()), **attributes_of(self.model, torch.Tensor)}
        hung = [t for name, t in hanging.items() if name not in let_go]
        states = [t for s in self.optimizer.state.values() for value in s.values() for t in plain_tensors(value)]
        constants = trace.joint.constants.values()
        held = storage_bytes((*self.model.parameters(), *hung, *self.inputs(), *states, *constants))
        return held + dict(self.plan.problem.graph.external).get(LIBRARY_BUFFERS, 0)

    def peak_bytes(self) -> int:
        """Peak of one whole step, beginning without gradients, or with those of a step before where the plan counts them."""
        accumulated = self.settings.gradient_accumulation
        self.clear()
        if accumulated:
            self.on_own_stream(self.forward_backward)
            self.outputs, self.held = [], []

        def step() -> None:
            with PeakMeter(self.device) as meter:
                self.forward_backward()
                if self.plan.scope == "step":
                    self.optimizer.step()
            self.measured = meter.peak_bytes

        before = 0
        if self.plan.scope == "step":
            before = self.external_bytes()
            if accumulated:
                before += storage_bytes(
                    t.grad for t in (*self.model.parameters(), *self.inputs()) if t.grad is not None
                )
        self.on_own_stream(step)
        self.clear()
        return before + self.measured


def verify(plan: PlanRecord, session: Session, *, steps: int = 3, repeats: int = 3) -> VerifyReport:
    """Train copies of the untouched model and of the planned one for `steps` steps and compare everything bitwise.

    Args:
        plan: the plan that `session` made.
        steps: optimizer steps (≥ 1); the optimizer is the plan's, else plain SGD.
        repeats: timed forward-backward runs of each, interleaved; 0 skips the timing (times are then 0.0).

    Raises:
        ArgumentError: steps or repeats are no such numbers, the weights are not real, or model and inputs are not on the
            plan's kind of device.
    """
    steps, repeats = whole("steps", steps, least=1, floats=False), whole("repeats", repeats, floats=False)
    model = session.model
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ArgumentError("verify runs the model, and its weights are on meta; give it real weights first")
    inputs, _ = flatten((session.args, session.kwargs), "example_input")
    refuse_elsewhere("verify", session.settings.device, model, inputs)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found_state = _generator_state(device)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # a step is one of training, wherever it is verified
            eager = _Runner(_copied(model, "the model"), plan, session, session.settings.loss)
            planned = _Runner(_copied(plan.module, "the model"), plan, session, None)
            return _compared(plan, eager, planned, steps, repeats)
    finally:
        _set_generator_state(found_state, device)


def refuse_elsewhere(what: str, planned: DeviceSpec, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Measured on another kind of device, neither peak nor time nor rounding would say anything about the plan."""
    kinds = {t.device.type for t in (*model.parameters(), *model.buffers(), *inputs)}
    if planned.kind not in kinds:
        raise ArgumentError(
            f"{what} measures where the model is ({', '.join(sorted(kinds))}), and the plan is for device={planned.name!r} "
            f"({planned.kind}), whose memory and kernels are others. Move model and inputs there and plan again, or plan with "
            "device='cpu' to measure here"
        )


def _copied(found: Any, what: str, memo: dict[int, Any] | None = None) -> Any:
    try:
        return copy.deepcopy(found, memo)
    except Exception as error:
        raise ArgumentError(
            f"verify trains a copy of {what}, and copy.deepcopy refuses ({type(error).__name__}: {error}); an attribute "
            "that holds the result of a computation (a weight made by torch.nn.utils.weight_norm) is the usual reason"
        ) from error


def _leaves(arguments: Any) -> dict[int, Any]:
    """What stands in a copy of the arguments for those that are results of a computation, which autograd does not copy."""
    made = {}
    for tensor in flatten(arguments, "example_input")[0]:
        if not tensor.is_leaf:
            made[id(tensor)] = copy.deepcopy(tensor.detach()).requires_grad_()
    return made


def _compared(plan: PlanRecord, eager: _Runner, planned: _Runner, steps: int, repeats: int) -> VerifyReport:
    differences: list[str] = []
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(1, steps + 1):
        for runner, curve in zip((eager, planned), losses, strict=True):
            runner.clear()
            runner.on_own_stream(runner.forward_backward)
            curve.append(sum(float(o.float().sum()) for o in runner.outputs))
        differences += _differences(step, eager, planned)
        for runner in (eager, planned):
            runner.on_own_stream(runner.optimizer.step)
    differences += _state_differences(steps, eager, planned)
    eager_peak, peak = eager.peak_bytes(), planned.peak_bytes()
    times = [0.0, 0.0]
    if repeats:
        times = interleaved_times([_timed(eager), _timed(planned)], repeats, device=eager.device)
    return VerifyReport(
        steps,
        plan.budget_bytes,
        plan.peak_bytes,
        peak,
        eager_peak,
        times[1],
        times[0],
        tuple(losses[1]),
        tuple(losses[0]),
        tuple(differences),
    )


def _timed(runner: _Runner) -> Callable[[], None]:
    def run() -> None:
        runner.clear()
        runner.on_own_stream(runner.forward_backward)

    return run


def _differences(step: int, eager: _Runner, planned: _Runner) -> list[str]:
    found = []
    for k, (a, b) in enumerate(zip(eager.outputs, planned.outputs, strict=True)):
        if not _same(a, b):
            found.append(f"step {step}: output {k}")
    for (name, a), (_, b) in zip(eager.model.named_parameters(), planned.model.named_parameters(), strict=True):
        if not _same(a.grad, b.grad):
            found.append(f"step {step}: gradient of {name}")
    for k, (a, b) in enumerate(zip(eager.inputs(), planned.inputs(), strict=True)):
        if a.is_leaf and not _same(a.grad, b.grad):
            found.append(f"step {step}: gradient of input {k}")
        if not _same(a, b):
            found.append(f"step {step}: content of input {k}")
    if not all(torch.equal(a, b) for a, b in zip(eager.state, planned.state, strict=True)):
        found.append(f"step {step}: generator state")
    return found


def _state_differences(step: int, eager: _Runner, planned: _Runner) -> list[str]:
    found = []
    for kind, a_named, b_named in (
        ("parameter", eager.model.named_parameters(), planned.model.named_parameters()),
        ("buffer", eager.model.named_buffers(), planned.model.named_buffers()),
    ):
        for (name, a), (_, b) in zip(a_named, b_named, strict=True):
            if not _same(a, b):
                found.append(f"step {step}: {kind} {name}")
    return found


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bitwise equal (NaN equals NaN), or both missing."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _generator_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    on_gpu = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *on_gpu)


def _set_generator_state(state: Iterable[torch.Tensor], device: torch.device) -> None:
    first, *rest = state
    torch.set_rng_state(first)
    if rest:
        torch.cuda.set_rng_state(rest[0], device)


def _none() -> list[torch.Tensor]:
    """An optimizer needs a parameter; a model without trainable ones gets a stand-in."""
    return [nn.Parameter(torch.zeros(1))]
