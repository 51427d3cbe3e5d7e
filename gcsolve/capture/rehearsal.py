"""Forward is run on fake tensors before it is traced, to see what it does once, what every time, and what it must not do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gcsolve.capture.custom_functions import FunctionCalls
from gcsolve.capture.fake_mode import TrueFakes, forget_fakes
from gcsolve.capture.flat_module import FlatModule, ForwardRun
from gcsolve.capture.generators import draws_of_others_wait, draws_on_the_host, host_states, set_host_states
from gcsolve.capture.hooks import HooksRefused, NewHook
from gcsolve.capture.joint_trace import fake_tensor
from gcsolve.capture.module_state import Setting, changed_attribute, plain_attribute, set_attribute
from gcsolve.capture.patches import During, patched
from gcsolve.errors import TraceError
from gcsolve.util.tree import unflatten


@dataclass(frozen=True)
class Rehearsal:
    """What the first call changes and later ones do not: `settings` and `filled`, as in `Trace`.

    `last`: the run of forward in which it changed only what every call changes.
    """

    last: ForwardRun
    settings: tuple[Setting | NewHook, ...]
    filled: tuple[tuple[str, Any], ...]


def rehearse(flat: FlatModule, mode: TrueFakes, inputs: Sequence[torch.Tensor]) -> Rehearsal:
    """Run forward on fakes of the flat inputs, until a run changes no plain value. These stay set in `flat`.

    Raises:
        TraceError: the second run sets plain values too (a counter), or a run draws from Python's or numpy's generator, or
            a hook changes something.
    """
    first, stored = _run(flat, mode, inputs)
    last = first
    if first.settings:
        last, stored = _run(flat, mode, inputs)
        if last.settings:
            raise changed_attribute(last.settings[0])
    before = {name: plain_attribute(flat.model, name) for name in stored}
    filled = {name: value for name, value in before.items() if not isinstance(value, torch.Tensor)}
    if filled and _reads(flat, mode, inputs, {name: stored[name] for name in filled}, last):
        filled = {}
    flat.runs.latest = last
    return Rehearsal(last, first.settings, tuple(filled.items()))


def _reads(
    flat: FlatModule,
    mode: TrueFakes,
    inputs: Sequence[torch.Tensor],
    filled: dict[str, torch.Tensor],
    last: ForwardRun,
) -> bool:
    """Whether forward does something else than in its `last` run where attributes are filled with tensors already: then the
    second call is another one than the first."""
    before = {name: plain_attribute(flat.model, name) for name in filled}
    for name, tensor in filled.items():
        set_attribute(flat.model, name, tensor)
    again = None
    with contextlib.suppress(Exception):  # it will be raised in the trace of that second call
        again, _ = _run(flat, mode, inputs)
    for name, value in before.items():
        set_attribute(flat.model, name, value)
    return again is None or (again.calls, again.stored, again.settings) != (last.calls, last.stored, ())


def _run(
    flat: FlatModule, mode: TrueFakes, inputs: Sequence[torch.Tensor]
) -> tuple[ForwardRun, dict[str, torch.Tensor]]:
    """What forward does, and the tensors that it stores in attributes, by name.

    Raises:
        TraceError: it draws from Python's or numpy's global generator.
    """
    before = host_states()
    outputs = _outputs(flat, mode, inputs)
    run = flat.runs.latest
    assert run is not None
    if host_states() != before:
        _refuse_draws(flat, mode, inputs, before)
    return run, unflatten(run.effects, outputs)[0] if run.stored else {}


def _outputs(flat: FlatModule, mode: TrueFakes, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(HooksRefused(flat.model))
        stack.enter_context(mode)
        stack.enter_context(mode.dtypes_checked())
        stack.enter_context(stack.enter_context(FunctionCalls()).recording())
        outputs = flat(*(fake_tensor(mode, t) for t in inputs))
    forget_fakes()
    return outputs


def _refuse_draws(flat: FlatModule, mode: TrueFakes, inputs: Sequence[torch.Tensor], before: dict[str, Any]) -> None:
    """Tell who drew from a global generator of Python or numpy while forward ran.

    Forward did, if a draw is seen in it, or if the generator moves in each of three runs in which other threads' draws
    wait. Otherwise another thread did, which is no concern of the plan's.

    Raises:
        TraceError: forward did. The generators are set back to `before`.
    """
    moved = set(before)
    try:
        for _ in range(3):
            with draws_of_others_wait(), patched(During.ALONE):
                start = host_states()
                _outputs(flat, mode, inputs)
                end = host_states()
            moved &= {name for name in end if end[name] != start[name]}
            if not moved:
                return
        raise draws_on_the_host(sorted(moved))
    except TraceError:
        set_host_states(before)
        raise
