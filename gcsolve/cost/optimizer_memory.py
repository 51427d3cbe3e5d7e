"""Bytes that an optimizer keeps between steps and allocates within one, measured by running its class on tiny tensors."""

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

# 8-bit optimizers (bitsandbytes, torchao) keep the state of a parameter with fewer elements than this in 32 bits.
_QUANTIZED_FROM = 4096
_SMALL, _LARGE = 2 * _QUANTIZED_FROM, 8 * _QUANTIZED_FROM
_FEW, _MANY = 4, 8
# Classes that step one parameter after the other on CUDA; by default, other classes with `foreach` step all at once.
_LOOPS_BY_DEFAULT = frozenset({"Adafactor"})


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory of an optimizer.

    Attributes:
        state_bytes: state that is kept from step to step.
        master_bytes: 32-bit copies of 16-bit parameters, which the optimizer keeps.
        step_bytes: the most that `step()` allocates at one moment beside parameters, gradients and the two above.
    """

    state_bytes: int = 0
    master_bytes: int = 0
    step_bytes: int = 0


def optimizer_memory(
    optimizer: Any, parameters: Iterable[torch.Tensor], kind: str = "cpu", round_bytes: Callable[[int], int] = int
) -> OptimizerMemory:
    """The memory that `optimizer` needs for the trainable ones among `parameters`.

    Args:
        optimizer: None (no memory); a number, the bytes per trainable parameter element of all that the optimizer keeps,
            32-bit copies included; a `torch.optim.Optimizer` class; or an instance, of which the class, the settings and the
            parameter groups count, not its present state. Parameter groups of 32-bit tensors that are not the model's, with
            as many elements as the model's 16-bit parameters, are master weights.
        parameters: the model's, on a real device, fake or on meta.
        kind: the kind of device ("cpu", "cuda", "mps"); on CUDA, classes that can step all parameters at once do.
        round_bytes: from the bytes of a storage to the bytes that the device's allocator uses for it.

    The class is run on tiny tensors, and its bytes are extrapolated linearly: state from two sizes of each dtype (and from
    two below 4096 elements), temporaries from one, four and eight tensors. Sizes that depend on a matrix's rows or columns
    (Adafactor) are extrapolated as if they depended on its number of elements.

    Raises:
        ArgumentError: `optimizer` is none of these, its class needs more arguments than a learning rate (pass an instance)
            or does not accept these parameters, or it cannot step with gradients alone (pass its bytes per parameter).
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
        _check_parameters(optimizer, trainable, kind)
    stepped, masters = _groups(optimizer, parameters)
    state_bytes, temporary_bytes = 0, 0
    for dtype in sorted({p.dtype for p in stepped}, key=str):
        elements = [p.numel() for p in stepped if p.dtype == dtype]
        growth = _Growth.of(optimizer, dtype, kind)
        state_bytes += sum(round_bytes(size) for n in elements for size in growth.state_bytes(n))
        temporary_bytes = max(temporary_bytes, growth.temporaries(elements))
    master_bytes = sum(round_bytes(p.numel() * p.element_size()) for p in masters)
    # The gradients of the master weights are allocated and freed within a step.
    return OptimizerMemory(state_bytes, master_bytes, temporary_bytes + master_bytes)


def _check_parameters(optimizer: type, trainable: Sequence[torch.Tensor], kind: str) -> None:
    """Raise `ArgumentError` if the class does not accept the parameters' numbers of dimensions (Muon: matrices alone)."""
    samples = [torch.nn.Parameter(torch.zeros([1] * dims)) for dims in sorted({p.dim() for p in trainable})]
    try:
        if samples:
            make_optimizer(optimizer, samples, kind)
    except ValueError as error:
        raise ArgumentError(
            f"optimizer={optimizer.__name__} does not take this model's parameters ({error}); pass an instance made of those "
            "that it takes, or bytes per parameter"
        ) from error


def named_optimizer(optimizer: Any) -> Any:
    """The class of torch.optim with that name, in upper or lower case; an `optimizer` that is no text is returned as it is.

    Raises:
        ArgumentError: torch.optim has no such class; the text lists its classes.
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
    """(tensors that `step()` updates, those among them that are master weights)."""
    trainable = [p for p in parameters if p.requires_grad]
    if not isinstance(optimizer, torch.optim.Optimizer):
        return trainable, []
    model_ids = {id(p) for p in parameters}
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    of_model, others = [p for p in grouped if id(p) in model_ids], [p for p in grouped if id(p) not in model_ids]
    half = [p for p in trainable if p.element_size() == 2 and id(p) not in {id(m) for m in of_model}]
    if half and all(p.dtype == torch.float32 for p in others) and _elements(others) == _elements(half):
        return [*of_model, *others], others
    return (
        of_model or trainable,
        [],
    )  # none of the model's: an instance for a copy of it, whose class and settings count


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def make_optimizer(optimizer: Any, parameters: Iterable[torch.Tensor], kind: str = "cpu") -> torch.optim.Optimizer:
    """A new optimizer over `parameters` with the class and settings of `optimizer` (None or a number: plain SGD).

    Args:
        optimizer: as for `optimizer_memory`.
        parameters: what it updates.
        kind: the kind of device whose defaults of torch it gets.

    Raises:
        ArgumentError: the class is not an optimizer's, or needs more arguments than a learning rate.
    """
    parameters = list(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        accepted = inspect.signature(type(optimizer).__init__).parameters
        settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
        return type(optimizer)(parameters, **_with_device_defaults(kind, type(optimizer), settings))  # type: ignore[call-arg]
    if not isinstance(optimizer, type):
        return torch.optim.SGD(parameters, lr=0.01)
    if not issubclass(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer class")
    settings = _with_device_defaults(kind, optimizer, {})
    try:
        return optimizer(parameters, **settings)  # type: ignore[call-arg]
    except TypeError:
        pass
    try:
        return optimizer(parameters, lr=1e-3, **settings)  # type: ignore[call-arg]
    except TypeError as error:
        raise ArgumentError(f"optimizer={optimizer.__name__} needs settings ({error}); pass an instance") from error


def _with_device_defaults(kind: str, optimizer: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with `foreach=True` where torch would choose it for CUDA tensors by default."""
    accepted = inspect.signature(optimizer.__init__).parameters
    unset = settings.get("foreach") is None and not settings.get("fused") and not settings.get("differentiable")
    at_once = kind == "cuda" and unset and "foreach" in accepted and optimizer.__name__ not in _LOOPS_BY_DEFAULT
    return {**settings, "foreach": True} if at_once else settings


@dataclass(frozen=True)
class _Growth:
    """How an optimizer's bytes grow with the elements of parameters of one dtype.

    Attributes:
        state: (bytes per element, constant bytes) of each state tensor of a parameter.
        few_state: the same for a parameter with fewer than `_QUANTIZED_FROM` elements.
        of_all: bytes of temporaries per element of all parameters.
        of_one: further bytes per element of the parameter being stepped.
        of_last: further bytes per element of the parameter stepped before it (a loop's variables live until they are
            assigned again).
    """

    state: tuple[tuple[float, float], ...]
    few_state: tuple[tuple[float, float], ...]
    of_all: float
    of_one: float
    of_last: float

    def state_bytes(self, n: int) -> list[int]:
        """Bytes of each state tensor of a parameter with `n` elements."""
        return [round(slope * n + fixed) for slope, fixed in (self.few_state if n < _QUANTIZED_FROM else self.state)]

    def temporaries(self, sizes: Sequence[int]) -> int:
        """Bytes of temporaries for parameters with these numbers of elements, stepped in this order."""
        pairs = zip((0, *sizes), sizes, strict=False)
        return round(self.of_all * sum(sizes) + max(self.of_last * last + self.of_one * now for last, now in pairs))

    @classmethod
    def of(cls, optimizer: Any, dtype: torch.dtype, kind: str) -> _Growth:
        """Measure `optimizer` on tiny parameters of `dtype`."""
        small, one_small = _measured_step(optimizer, dtype, _SMALL, 1, kind)
        large, one_large = _measured_step(optimizer, dtype, _LARGE, 1, kind)
        elements = _LARGE - _SMALL
        few, more = (
            _measured_step(optimizer, dtype, n, 1, kind)[0] for n in (_QUANTIZED_FROM // 4, _QUANTIZED_FROM // 2)
        )
        one = (one_large - one_small) / elements
        of_few, of_many = (
            (
                _measured_step(optimizer, dtype, _LARGE, n, kind)[1]
                - _measured_step(optimizer, dtype, _SMALL, n, kind)[1]
            )
            / elements
            for n in (_FEW, _MANY)
        )
        of_all = max(0.0, (of_many - of_few) / (_MANY - _FEW))
        return cls(
            state=_lines(_SMALL, small, _LARGE, large),
            few_state=_lines(_QUANTIZED_FROM // 4, few, _QUANTIZED_FROM // 2, more),
            of_all=of_all,
            of_one=max(0.0, one - of_all),
            of_last=max(0.0, of_few - one - (_FEW - 1) * of_all),
        )


def _lines(n: int, first: list[int], m: int, second: list[int]) -> tuple[tuple[float, float], ...]:
    """(slope, offset) of the line through the size at `n` and the size at `m` elements, for each pair of sizes."""
    slopes = [(b - a) / (m - n) for a, b in zip(first, second, strict=True)]
    return tuple((slope, a - slope * n) for slope, a in zip(slopes, first, strict=True))


def _measured_step(optimizer: Any, dtype: torch.dtype, n: int, count: int, kind: str) -> tuple[list[int], int]:
    """(bytes of each state tensor of one parameter, peak bytes of the second step) for `count` parameters of `n` elements."""
    parameters = [torch.nn.Parameter(torch.zeros(n // 32, 32, dtype=dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    sample = make_optimizer(optimizer, parameters, kind)
    try:
        sample.step()
        if _torch.profiler_running():
            raise CallError(
                "the optimizer's memory cannot be measured while a torch profiler is running; stop it first"
            )
        _torch.start_memory_profile()
        try:
            sample.step()
        finally:
            events = _torch.stop_memory_profile()
    except (TypeError, RuntimeError, AttributeError) as error:
        name = type(sample).__name__
        raise ArgumentError(
            f"optimizer={name} could not be tried on a tiny {dtype} tensor ({error}); pass its bytes per parameter, a number"
        ) from error
    # On CUDA, an optimizer keeps its step counters on the CPU unless it is fused or capturable.
    counters_on_cpu = kind == "cuda" and not (sample.defaults.get("fused") or sample.defaults.get("capturable"))
    storages: dict[int, int] = {}  # address -> bytes
    for t in sample.state[parameters[0]].values():
        for part in () if counters_on_cpu and isinstance(t, torch.Tensor) and t.dim() == 0 else plain_tensors(t):
            storages.setdefault(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes())
    return list(storages.values()), peak_of_events(events)[0]


def plain_tensors(state: Any) -> list[torch.Tensor]:
    """The plain tensors of one entry of an optimizer's state: none of a number, a tensor itself, or those that a tensor
    subclass wraps (the codes and scales of an 8-bit state)."""
    if not isinstance(state, torch.Tensor):
        return []
    flatten = getattr(state, "__tensor_flatten__", None)
    return [state] if flatten is None else [t for name in flatten()[0] for t in plain_tensors(getattr(state, name))]
