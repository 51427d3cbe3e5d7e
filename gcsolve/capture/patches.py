"""Every replacement of a function of torch, Python, numpy or a host library while a step is traced.

`PATCHES` is the only table of them, and `patched` the only way to enter them. A replacement acts for the thread that traces
alone (`util/by_thread.py`): other threads train, draw and print meanwhile as if nothing were traced. What torch itself
changes for all threads while it traces is switched off here, or made to act for one thread, too. What cannot be so has
`Scope.PROCESS`, and its reason says what other threads see of it.

torch's tracing keeps state for the whole process, so only one thread traces at a time; others wait for their turn. Two
things that it does to other threads cannot be helped. Autograd's anomaly mode, a switch of C++, is on while backward is
traced: each op of theirs notes where it was called, which takes time. And a thread that ends a block of autocast, as a trace
does, ends the casts that autocast keeps of weights for all threads: these are cast anew.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from gcsolve import _torch
from gcsolve.capture.generators import HOSTS, draw_refused, names_of_draws, seeding_refused, waiting_for_others
from gcsolve.util.by_thread import own_value, shared_change

_TORCH_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


class During(enum.Enum):
    """When a patch is in force."""

    TRACE = "the whole trace"
    MODEL_CODE = "the user's code runs or is traced"
    ALONE = "forward runs again, to tell its draws from those of other threads"
    FORWARD = "forward and the loss are called"
    RECORDING = "calls of autograd.Function are recorded"
    CAPTURE = "torch.export and AOTAutograd trace the step"


class Scope(enum.Enum):
    """Which threads a patch acts for."""

    THREAD = "the thread that traces"
    PROCESS = "all threads"


@dataclass(frozen=True)
class Place:
    """An attribute that is replaced, and its value before."""

    owner: Any
    name: str
    original: Any


Replacement = Callable[[Place, Any], Any]
"""(what is replaced, the value that `Patch.needs` names) -> what replaces it."""


@dataclass(frozen=True)
class Patch:
    """One row: what is replaced, by what, when, for whom, and why.

    `owner`: the module, class or object; or a function that finds it when the patch is entered: it, or a list of several,
    or None where it is not loaded. `names`: of its attributes, or a function of the owner that tells them.
    `replacement`: see `Replacement`. In `Scope.PROCESS` it gives a context manager that changes the owner.
    `needs`: a keyword of `patched`; where it is not given, or is None, the row is left out.
    `others`: a function of the original that gives what other threads have meanwhile; None: the original. It gives them the
    same results, later.
    `since`, `until`: the releases of torch, (major, minor), from which and before which the row is needed.
    """

    owner: Any
    names: str | tuple[str, ...] | Callable[[Any], Iterable[str]]
    replacement: Replacement
    during: During
    reason: str
    needs: str = ""
    scope: Scope = Scope.THREAD
    others: Callable[[Any], Any] | None = None
    since: tuple[int, int] = (2, 11)
    until: tuple[int, int] = (3, 0)

    def applies(self) -> bool:
        """Whether the torch that is here needs it."""
        return self.since <= _TORCH_RELEASE < self.until

    def places(self) -> Iterator[tuple[Any, str]]:
        """(owner, attribute) of everything that the row replaces now."""
        owner = self.owner() if isinstance(self.owner, FunctionType) else self.owner
        for each in owner if isinstance(owner, list) else [owner]:
            if each is not None:
                names = self.names(each) if callable(self.names) else self.names
                yield from ((each, name) for name in ([names] if isinstance(names, str) else names))


@contextlib.contextmanager
def patched(during: During, **given: Any) -> Iterator[None]:
    """In this block, the rows of `PATCHES` for that moment are in force.

    Args:
        given: what the replacements refer to, by the names in `Patch.needs`.
    """
    with contextlib.ExitStack() as stack:
        if during is During.TRACE:
            stack.enter_context(_ONE_TRACE)
            stack.enter_context(_torch.tracing_here())
        for row in PATCHES:
            if row.during is during and row.applies() and (not row.needs or given.get(row.needs) is not None):
                for owner, name in row.places():
                    stack.enter_context(_entered(row, owner, name, given.get(row.needs)))
        yield


_ONE_TRACE = threading.RLock()


def _entered(row: Patch, owner: Any, name: str, given: Any) -> contextlib.AbstractContextManager[None]:
    if row.scope is Scope.PROCESS:
        return shared_change((id(owner), name), lambda: row.replacement(Place(owner, name, None), given))
    return own_value(owner, name, lambda original: row.replacement(Place(owner, name, original), given), row.others)


# --- replacements ----------------------------------------------------------------------------------------------------


def _constant(value: Any) -> Replacement:
    return lambda _place, _given: value


def _given(_place: Place, given: Any) -> Any:
    return given


def _no(_place: Place, _given: Any) -> Any:
    return lambda: False


def _nothing(_place: Place, _given: Any) -> Any:
    return lambda *_args, **_kwargs: None


def _no_context(_place: Place, _given: Any) -> Any:
    """In place of a function that gives a context manager."""
    return lambda *_args, **_kwargs: contextlib.nullcontext()


def _uncollected(_place: Place, _given: Any) -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    if gc.isenabled():
        gc.disable()
        stack.callback(gc.enable)
    return stack


def _without_torch(place: Place, _given: Any) -> Any:
    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not logger.name.startswith("torch"):
            place.original(logger, record)

    return handle


def _unless_known(place: Place, known: Any) -> Any:
    return lambda tensor: place.original(tensor) and not known.knows(tensor)


def _without_order(place: Place, _given: Any) -> Any:
    return lambda op: None if _torch.op_name(op) == "aten::_linalg_check_errors" else place.original(op)


def _for_one_thread(place: Place, _given: Any) -> Any:
    here = threading.get_ident()

    def patch_method(patcher: Any, owner: type, name: str, new: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        everyones = getattr(owner, name)

        @functools.wraps(new)
        def method(*operands: Any, **keywords: Any) -> Any:
            return (new if threading.get_ident() == here else everyones)(*operands, **keywords)

        place.original(patcher, owner, name, method, *args, **kwargs)

    return patch_method


def _mock_for_one_thread(_place: Place, _given: Any) -> Any:
    def patch(target: str, new: Any) -> contextlib.AbstractContextManager[None]:
        owner, _, name = target.rpartition(".")
        return own_value(importlib.import_module(owner), name, lambda _: new)

    return patch


# --- the table -------------------------------------------------------------------------------------------------------

PATCHES: tuple[Patch, ...] = (
    Patch(
        gc,
        "disable",
        _uncollected,
        During.TRACE,
        "A trace makes objects by the million and drops few: looking through them again and again takes a sixth of its "
        "time. Python has one switch for all threads: cycles of theirs are collected when the trace is over.",
        scope=Scope.PROCESS,
    ),
    # The user's code: what it draws on the host and prints.
    Patch(
        lambda: list(HOSTS),
        names_of_draws,
        lambda place, _: draw_refused(place.original, place.name),
        During.MODEL_CODE,
        "A draw from Python's or numpy's global generator would be baked into the graph.",
        others=waiting_for_others,
    ),
    Patch(
        lambda: [module for module in tuple(sys.modules.values()) if isinstance(module, ModuleType)],
        names_of_draws,
        lambda place, _: draw_refused(place.original, place.name),
        During.ALONE,
        "The same, of functions that modules have imported by their own names, which takes a moment to look for. Draws of "
        "other threads wait meanwhile, so that what moves a generator is this thread.",
        others=waiting_for_others,
    ),
    Patch(
        lambda: None if sys.stdout is None else sys,
        "stdout",
        lambda place, prints: prints.stream(place.original, place.original),
        During.MODEL_CODE,
        "What the user's code prints is noticed, and shown once.",
        needs="prints",
    ),
    Patch(
        lambda: None if sys.stderr is None else sys,
        "stderr",
        lambda place, prints: prints.stream(place.original, prints.others),
        During.MODEL_CODE,
        "The same; and torch prints half-made graphs when a trace fails, where the error says it in one line.",
        needs="prints",
    ),
    Patch(
        logging.Logger,
        "handle",
        _without_torch,
        During.MODEL_CODE,
        "torch logs what fails while it traces; the error says it in one line.",
    ),
    # The call of forward: what torch does otherwise under a trace, or does not know how to trace.
    Patch(
        torch.compiler,
        ("is_compiling", "is_exporting"),
        _no,
        During.FORWARD,
        "Models take another way when they are compiled or exported (Hugging Face's attention makes a mask that eager "
        "skips); what is traced is what eager runs.",
    ),
    Patch(
        *_torch.DISTRIBUTION_CHECKS,
        _constant(False),
        During.FORWARD,
        "torch.distributions look at the values of their arguments, only to raise an error; a trace has none.",
    ),
    Patch(
        *_torch.VALUE_CHECK,
        _nothing,
        During.FORWARD,
        "Models have torch check a condition that only values tell (Hugging Face's, that a text has a place for each part "
        "of its images), and go on when it holds. It is taken to hold.",
    ),
    Patch(
        lambda: [torch, torch.random],
        ("manual_seed", "set_rng_state", "seed"),
        lambda place, _: seeding_refused(place.original, place.name),
        During.FORWARD,
        "A planned step would not set the state of torch's default generator.",
    ),
    Patch(
        torch.inference_mode,
        "__enter__",
        _constant(_torch.enter_as_no_grad),
        During.FORWARD,
        "A trace knows torch.no_grad, and loses what an inference mode makes.",
    ),
    Patch(
        lambda: sys.modules.get("transformers.utils.import_utils"),
        "is_fake_tensor",
        _unless_known,
        During.FORWARD,
        "transformers does not look at a fake tensor at all; it may look at those whose values are known.",
        needs="known",
    ),
    Patch(
        F,
        "scaled_dot_product_attention",
        lambda place, kernels: kernels.substitute(place.original),
        During.FORWARD,
        "A torch function mode is off inside the functions that it has seen; nn.MultiheadAttention finds another device's "
        "kernel by this name.",
        needs="kernels",
    ),
    Patch(
        torch.autograd.Function,
        "apply",
        lambda place, functions: functions.recording_apply(place.original),
        During.RECORDING,
        "An export looks through a Function; its calls are recorded as ops, so that its own backward is the one trained.",
        needs="functions",
    ),
    # torch's own tracing: what it writes otherwise than eager runs it, and what it changes for all threads.
    Patch(
        warnings,
        "filters",
        _constant("ignore"),
        During.CAPTURE,
        "torch warns of its own export and of our copy of the model: nothing that the user could act on.",
    ),
    Patch(
        lambda: _torch.rewritten_ops(),
        _torch.KERNELS_OF_OP,
        lambda place, _: _torch.with_kernel(place.original, None),
        During.CAPTURE,
        "torch writes some ops in terms of others (interpolation as index arithmetic, above all), which round otherwise "
        "and take more memory than the kernel that eager runs.",
    ),
    Patch(
        lambda: _torch.rewritten_for_cpu(),
        _torch.KERNELS_OF_OP,
        lambda place, of_cpu: _torch.with_kernel(place.original, of_cpu.get(place.owner)),
        During.CAPTURE,
        "The same, of ops that only the CPU runs so, as recurrent layers: as their own kernels, or as substitutes that "
        "compute what the CPU does.",
        needs="kernels_of_cpu",
    ),
    Patch(
        lambda: _torch.rewritten_ops() + _torch.rewritten_for_cpu(),
        _torch.KERNEL_CACHE_OF_OP,
        lambda place, _: _torch.kernels_looked_up(place.owner),
        During.CAPTURE,
        "torch remembers the kernels of an op for all threads. Those of these ops are looked up at every call meanwhile, "
        "with the same result; eager code looks none up.",
        scope=Scope.PROCESS,
    ),
    Patch(
        *_torch.EFFECT_OF_OP,
        _without_order,
        During.CAPTURE,
        "torch threads a token through a trace for the op that checks whether linear algebra succeeded, so that it stays; "
        "here it is an op without a result, which is dropped.",
        since=(2, 14),
    ),
    Patch(
        *_torch.UNREAD_DRAWS_SETTING,
        _constant(True),
        During.CAPTURE,
        "A trace drops random ops whose results nothing reads, though they move the generator; so it keeps them.",
    ),
    Patch(
        *_torch.RANDOM_OPS_SETTING,
        _constant(False),
        During.CAPTURE,
        "Random ops draw from the generator that a call finds, as in eager, not from a seed and an offset.",
    ),
    Patch(
        *_torch.BACKWARD_AUTOCAST_SETTING,
        _given,
        During.CAPTURE,
        "Backward is called under the autocast that is around the call, or outside it, as the user says.",
        needs="backward_autocast",
    ),
    Patch(
        *_torch.EXPORT_SWITCHES,
        _no_context,
        During.CAPTURE,
        "An export switches oneDNN, NNPACK and cuDNN off, tells everyone that it compiles (optimizers then take another "
        "way), and replaces max, min and math.pow, all of it for all threads. What is traced has no kernels yet, and is "
        "what eager runs.",
    ),
    Patch(
        *_torch.GENERATOR_STATE_KEPT,
        _no_context,
        During.CAPTURE,
        "AOTAutograd puts the state of torch's default generators back when it is done, and would undo the draws of other "
        "threads. A trace draws nothing from them.",
    ),
    Patch(
        *_torch.MOCK_IN_AOT,
        _mock_for_one_thread,
        During.CAPTURE,
        "AOTAutograd makes torch.cuda.set_rng_state do nothing while it traces, for all threads.",
    ),
    Patch(
        *_torch.METHODS_OF_FX,
        _for_one_thread,
        During.CAPTURE,
        "torch.fx replaces nn.Module.__call__ and __getattr__ while it traces, for all threads.",
    ),
)
