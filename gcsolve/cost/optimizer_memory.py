"""Bytes that an optimizer holds between steps and takes within one, found by running the real class on tiny tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from gcsolve import _torch
from gcsolve.errors import ArgumentError, CallError
from gcsolve.ops.peak_meter import peak_of_events

# 8-bit optimizers hold the states of parameters of fewer elements than this in 32 bits (bitsandbytes, torchao).
_QUANTIZED_FROM = 4096
_SMALL, _LARGE = 2 * _QUANTIZED_FROM, 8 * _QUANTIZED_FROM
_FEW, _MANY = 4, 8
_LOOPS_BY_DEFAULT = frozenset(
    {"Adafactor"}
)  # on CUDA, all other classes of torch.optim that can, go through all at once


@dataclass(frozen=True)
class OptimizerMemory:
    """`state_bytes`: kept from step to step. `master_bytes`: 32-bit copies of 16-bit parameters that the optimizer has as
    its own. `step_bytes`: the most that `step()` takes beside parameters, gradients and these."""

    state_bytes: int = 0
    master_bytes: int = 0
    step_bytes: int = 0


def optimizer_memory(
    optimizer: Any, parameters: Iterable[torch.Tensor], kind: str = "cpu", round_bytes: Callable[[int], int] = int
) -> OptimizerMemory:
    """What `optimizer` takes for the trainable ones among `parameters`.

    Args:
        optimizer: None (nothing), a number (bytes per trainable parameter element: whatever the optimizer holds, 32-bit
            copies included), a `torch.optim.Optimizer` class, or an instance: its class, settings and parameter groups
            count, not its present state. Groups of 32-bit tensors that are not the model's, as many elements as its
            16-bit parameters have, are its master weights.
        parameters: real, fake or meta.
        kind: of device ("cpu", "cuda", "mps"): on CUDA, classes that can work through all parameters at once do.
        round_bytes: bytes the target's allocator takes for a storage of that many bytes.

    Returns:
        bytes. State that grows with a parameter's elements and state that does not are told apart by two tiny sizes of
        each dtype, and by two below 4096 elements; temporaries of all parameters at once and of one after the other by one,
        four and eight tensors. Sizes that go with a matrix's rows or columns (Adafactor) are counted as if they went with its
        elements.

    Raises:
        ArgumentError: it is none of these, or the class cannot be made with only a learning rate (pass an instance), or
            does not take these parameters, or cannot step without more than gradients (pass its bytes per parameter).
    """
    parameters = list(parameters)
    trainable = [p for p in parameters if p.requires_grad]
    if optimizer is None:
        return OptimizerMemory()
    if isinstance(optimizer, bool) or not (isinstance(optimizer, (Real, torch.optim.Optimizer, type))):
        raise ArgumentError(
            f"optimizer={optimizer!r} is not an optimizer class (torch.optim.AdamW), an instance or bytes per parameter"
        )
    if isinstance(optimizer, Real):
        if not 0 <= float(optimizer) < float("inf"):
            raise ArgumentError(f"optimizer={optimizer!r}: bytes per parameter are a finite number ≥ 0")
        return OptimizerMemory(int(float(optimizer) * sum(p.numel() for p in trainable)))
    if isinstance(optimizer, type):
        _refuse_unless_taken(optimizer, trainable, kind)
    stepped, masters = _groups(optimizer, parameters)
    state, temporaries = 0, 0
    for dtype in sorted({p.dtype for p in stepped}, key=str):
        ours = [p.numel() for p in stepped if p.dtype == dtype]
        growth = _Growth.of(optimizer, dtype, kind)
        state += sum(round_bytes(size) for n in ours for size in growth.state_bytes(n))
        temporaries = max(temporaries, growth.temporaries(ours))
    master = sum(round_bytes(p.numel() * p.element_size()) for p in masters)
    return OptimizerMemory(state, master, temporaries + master)  # master gradients come and go within a step


def _refuse_unless_taken(optimizer: type, trainable: Sequence[torch.Tensor], kind: str) -> None:
    """A class may take some parameters only (Muon: matrices)."""
    alike = [torch.nn.Parameter(torch.zeros([1] * dims)) for dims in sorted({p.dim() for p in trainable})]
    try:
        if alike:
            make_optimizer(optimizer, alike, kind)
    except ValueError as error:
        raise ArgumentError(
            f"optimizer={optimizer.__name__} does not take this model's parameters ({error}); pass an instance made of those "
            "that it takes, or bytes per parameter"
        ) from error


def named_optimizer(optimizer: Any) -> Any:
    """The class of torch.optim that a text names, in any case; what is no text comes back as it is.

    Raises:
        ArgumentError: torch.optim has no such class; the text lists those that there are.
    """
    if not isinstance(optimizer, str):
        return optimizer
    classes = {k.lower(): v for k, v in sorted(vars(torch.optim).items()) if isinstance(v, type)}
    known = {
        k: v for k, v in classes.items() if issubclass(v, torch.optim.Optimizer) and v is not torch.optim.Optimizer
    }
    if optimizer.lower() in known:
        return known[optimizer.lower()]
    raise ArgumentError(
        f"optimizer={optimizer!r} is no class of torch.optim; known: {', '.join(v.__name__ for v in known.values())}. Or pass "
        "a class, an instance or bytes per parameter"
    )


def _groups(optimizer: Any, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what `step()` works on, those of it that are master weights)."""
    trainable = [p for p in parameters if p.requires_grad]
    if not isinstance(optimizer, torch.optim.Optimizer):
        return trainable, []
    known, grouped = {id(p) for p in parameters}, [p for group in optimizer.param_groups for p in group["params"]]
    mine, others = [p for p in grouped if id(p) in known], [p for p in grouped if id(p) not in known]
    half = [p for p in trainable if p.element_size() == 2 and id(p) not in {id(m) for m in mine}]
    if half and all(p.dtype == torch.float32 for p in others) and _elements(others) == _elements(half):
        return [*mine, *others], others
    return mine or trainable, []  # made for another copy of the model: its class and settings count


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def make_optimizer(optimizer: Any, parameters: Iterable[torch.Tensor], kind: str = "cpu") -> torch.optim.Optimizer:
    """A fresh optimizer like `optimizer` (None or a number: plain SGD) over `parameters`, as it would work on `kind`."""
    parameters = list(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        accepted = inspect.signature(type(optimizer).__init__).parameters
        settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
        return type(optimizer)(parameters, **_as_on(kind, type(optimizer), settings))  # type: ignore[call-arg]
    if not isinstance(optimizer, type):
        return torch.optim.SGD(parameters, lr=0.01)
    if not issubclass(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer class")
    settings = _as_on(kind, optimizer, {})
    try:
        return optimizer(parameters, **settings)  # type: ignore[call-arg]
    except TypeError:
        pass
    try:
        return optimizer(parameters, lr=1e-3, **settings)  # type: ignore[call-arg]
    except TypeError as error:
        raise ArgumentError(f"optimizer={optimizer.__name__} needs settings ({error}); pass an instance") from error


def _as_on(kind: str, of: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with torch's choice for CUDA made explicit where the user left it to torch."""
    accepted = inspect.signature(of.__init__).parameters
    left = settings.get("foreach") is None and not settings.get("fused") and not settings.get("differentiable")
    at_once = kind == "cuda" and left and "foreach" in accepted and of.__name__ not in _LOOPS_BY_DEFAULT
    return {**settings, "foreach": True} if at_once else settings


@dataclass(frozen=True)
class _Growth:
    """How an optimizer's bytes grow for one dtype. `state`: (bytes an element, bytes besides) of each state tensor of a
    parameter, `few_state` of one with fewer than `_QUANTIZED_FROM` elements. Temporaries, in bytes an element: `of_all`
    parameters, `of_one` being stepped, `of_last` stepped before it (a loop's variables live until they are bound again)."""

    state: tuple[tuple[float, float], ...]
    few_state: tuple[tuple[float, float], ...]
    of_all: float
    of_one: float
    of_last: float

    def state_bytes(self, n: int) -> list[int]:
        """Bytes of each state tensor of a parameter of `n` elements."""
        return [round(slope * n + fixed) for slope, fixed in (self.few_state if n < _QUANTIZED_FROM else self.state)]

    def temporaries(self, sizes: Sequence[int]) -> int:
        """Bytes for parameters of so many elements, in this order."""
        pairs = zip((0, *sizes), sizes, strict=False)
        return round(self.of_all * sum(sizes) + max(self.of_last * last + self.of_one * now for last, now in pairs))

    @classmethod
    def of(cls, optimizer: Any, dtype: torch.dtype, kind: str) -> _Growth:
        small, one_small = _tried(optimizer, dtype, _SMALL, 1, kind)
        large, one_large = _tried(optimizer, dtype, _LARGE, 1, kind)
        step = _LARGE - _SMALL
        few, more = (_tried(optimizer, dtype, n, 1, kind)[0] for n in (_QUANTIZED_FROM // 4, _QUANTIZED_FROM // 2))
        one = (one_large - one_small) / step
        of_few, of_many = (
            (_tried(optimizer, dtype, _LARGE, n, kind)[1] - _tried(optimizer, dtype, _SMALL, n, kind)[1]) / step
            for n in (_FEW, _MANY)
        )
        of_all = max(0.0, (of_many - of_few) / (_MANY - _FEW))
        return cls(
            _lines(_SMALL, small, _LARGE, large),
            _lines(_QUANTIZED_FROM // 4, few, _QUANTIZED_FROM // 2, more),
            of_all,
            max(0.0, one - of_all),
            max(0.0, of_few - one - (_FEW - 1) * of_all),
        )


def _lines(n: int, first: list[int], m: int, second: list[int]) -> tuple[tuple[float, float], ...]:
    """(slope, offset) of each line through the sizes at `n` and at `m` elements."""
    slopes = [(b - a) / (m - n) for a, b in zip(first, second, strict=True)]
    return tuple((slope, a - slope * n) for slope, a in zip(slopes, first, strict=True))


def _tried(optimizer: Any, dtype: torch.dtype, n: int, count: int, kind: str) -> tuple[list[int], int]:
    """(bytes of each state tensor of one parameter, peak of the second step) for `count` parameters of `n` elements."""
    parameters = [torch.nn.Parameter(torch.zeros(n // 32, 32, dtype=dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made = make_optimizer(optimizer, parameters, kind)
    try:
        made.step()
        if _torch.profiler_running():
            raise CallError(
                "the optimizer's memory cannot be measured while a torch profiler is running; stop it first"
            )
        _torch.start_memory_profile()
        try:
            made.step()
        finally:
            events = _torch.stop_memory_profile()
    except (TypeError, RuntimeError, AttributeError) as error:
        name = type(made).__name__
        raise ArgumentError(
            f"optimizer={name} could not be tried on a tiny {dtype} tensor ({error}); pass its bytes per parameter, a number"
        ) from error
    # Counters stay on the CPU unless they are asked to be on the device.
    away = kind == "cuda" and not (made.defaults.get("fused") or made.defaults.get("capturable"))
    found: dict[int, int] = {}
    for t in made.state[parameters[0]].values():
        for part in () if away and isinstance(t, torch.Tensor) and t.dim() == 0 else plain_tensors(t):
            found.setdefault(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes())
    return list(found.values()), peak_of_events(events)[0]


def plain_tensors(state: Any) -> list[torch.Tensor]:
    """What one of an optimizer's states is made of: nothing (a number), itself, or the tensors that a subclass wraps (codes
    and scales of 8 bits)."""
    if not isinstance(state, torch.Tensor):
        return []
    flatten = getattr(state, "__tensor_flatten__", None)
    return [state] if flatten is None else [t for name in flatten()[0] for t in plain_tensors(getattr(state, name))]
