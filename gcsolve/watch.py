"""What a forward does beside computing, noticed while it is traced: attributes set, random state touched, hidden inputs.

A trace keeps what tensors do to tensors. Everything else that forward does would happen once, while planning, and never
again: so it is carried into the plan (tensors stored on modules), or refused by name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy
import torch
import torch.distributions
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from gcsolve._torch import transform
from gcsolve.errors import TraceError
from gcsolve.structure import slots_of

T = TypeVar("T")

OWN_STATE = frozenset(vars(nn.Module()))  # parameters, buffers, submodules, hooks, training

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)
_CODE = (FunctionType, BuiltinFunctionType, MethodType)


def attribute_name(path: str, name: str) -> str:
    """Name of an attribute as `named_buffers` would give it."""
    return f"{path}.{name}" if path else name


def attributes_of(model: nn.Module, kind: type[T]) -> dict[str, T]:
    """name -> value of every plain attribute of a module that is of `kind`; parameters and buffers are none."""
    return {
        attribute_name(path, name): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if name not in OWN_STATE and isinstance(value, kind)
    }


def held_tensors(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """id -> (where it is, tensor) of those inside plain attributes: containers, objects, modules that are not registered."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        stack = [(attribute_name(path, name), value) for name, value in _own(module).items()]
        while stack:
            name, value = stack.pop()
            if id(value) in seen or isinstance(value, (*_PLAIN, *_CODE, numpy.ndarray)):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                found[id(value)] = name, value
            elif isinstance(value, Mapping):
                stack += [(f"{name}[{key!r}]", item) for key, item in value.items()]
            elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "appendleft"):
                stack += [(f"{name}[{at}]", item) for at, item in enumerate(value)]
            else:
                stack += [(f"{name}.{part}", item) for part, item in _parts(value)]
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    """(name, content) of an object's attributes."""
    if isinstance(value, nn.Module):
        return [*{**_own(value), **value._parameters, **value._buffers, **value._modules}.items()]
    return [*(vars(value).items() if hasattr(value, "__dict__") else ()), *slots_of(value)]


def set_attribute(model: nn.Module, name: str, value: Any) -> None:
    """Set the attribute that `attribute_name` names, past what nn.Module does when one is set; `MISSING`: remove it."""
    path, _, last = name.rpartition(".")
    if value is MISSING:
        vars(model.get_submodule(path)).pop(last, None)
    else:
        vars(model.get_submodule(path))[last] = value


def plain_attribute(model: nn.Module, name: str) -> Any:
    """What `attribute_name` names; `MISSING` where nothing is."""
    path, _, last = name.rpartition(".")
    return vars(model.get_submodule(path)).get(last, MISSING)


def token(value: Any, tensor: Callable[[torch.Tensor], Any], seen: set[int]) -> Any:
    """Equal for two values that a forward cannot tell apart: plain values by content, containers and plain objects by
    what they hold, tensors by `tensor(value)`, everything else by its type."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, _CODE):
        return (
            type(value),
            id(value) if not isinstance(value, MethodType) else (id(value.__func__), id(value.__self__)),
        )
    if isinstance(value, (nn.Module, torch.Generator)):
        return (type(value), id(value))
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.dtype.str, value.tobytes() if value.dtype != object else id(value))
    if id(value) in seen:
        return type(value)
    seen.add(id(value))
    if isinstance(value, Mapping):
        return (type(value), tuple((str(k), token(v, tensor, seen)) for k, v in value.items()))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(str, value)))
    if isinstance(value, (list, tuple)) or hasattr(value, "appendleft"):
        return (type(value), tuple(token(v, tensor, seen) for v in value))
    held = _parts(value)
    return (type(value), tuple((k, token(v, tensor, seen)) for k, v in held)) if held else type(value)


@dataclass(frozen=True)
class Setting:
    """A plain value that the first call sets: attribute `name` of the model, or `part` of the object that is there.

    `old`: what it replaces (`MISSING`: nothing was there); `module`: class of the module, for error texts.
    """

    name: str
    part: str
    old: Any
    new: Any
    module: str

    def holder(self, model: nn.Module) -> dict[str, Any]:
        path, _, last = self.name.rpartition(".")
        held = vars(model.get_submodule(path))
        return vars(held[last]) if self.part else held

    def apply(self, model: nn.Module, *, back: bool = False) -> None:
        """Do what the first call would do to a model that is as it was; `back`: undo it."""
        held, key = self.holder(model), self.part or self.name.rpartition(".")[2]
        here, there = (self.new, self.old) if back else (self.old, self.new)
        now = held.get(key, MISSING)
        if type(now) is type(here) and now == here:
            if there is MISSING:
                del held[key]
            else:
                held[key] = there

    def __str__(self) -> str:
        name = f"{self.name}.{self.part}" if self.part else self.name
        old = "nothing" if self.old is MISSING else _short(self.old)
        return f"the attribute {name} of {self.module} (from {old} to {_short(self.new)})"


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass(frozen=True)
class Written:
    """What forward has set on the model's modules: tensors by attribute name, and plain values."""

    tensors: dict[str, torch.Tensor]
    settings: tuple[Setting, ...]


def changed_attribute(what: Any) -> TraceError:
    return TraceError(
        f"forward changes {what}, and a planned step would not. Change it outside forward (in the training loop, or in a hook "
        "on the whole model), or make it a buffer; what is set up in the first call only: call the model once before planning"
    )


class Attributes:
    """The attributes of a model's modules at one moment, and what has become of them since."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.own = {path: _own(module) for path, module in self.modules.items()}
        self.tokens = {path: _tokens(held) for path, held in self.own.items()}
        self.parts = {id(v): dict(vars(v)) for held in self.own.values() for v in held.values() if _is_object(v)}
        self.buffers = {path: dict(module._buffers) for path, module in self.modules.items()}
        self.parameters = {path: dict(module._parameters) for path, module in self.modules.items()}

    def written(self) -> Written:
        """What was set since; attributes that hold another tensor are put back, plain values stay as they are now.

        A buffer that was replaced is changed in place instead: the same content in the same place.

        Raises:
            TraceError: something else than a tensor or a plain value was set, or a parameter was replaced.
        """
        tensors: dict[str, torch.Tensor] = {}
        settings: list[Setting] = []
        for path, module in self.modules.items():
            self._stored(path, module, tensors, settings)
            for name, old in self.buffers[path].items():
                if module._buffers.get(name) is not old:
                    _change_in_place(attribute_name(path, name), old, module._buffers.get(name))
                    module._buffers[name] = old
            for name, parameter in module._parameters.items():
                if self.parameters[path].get(name) is not parameter:
                    raise TraceError(
                        f"forward replaces the parameter {attribute_name(path, name)}; a planned step would not. Replace it "
                        "between steps, or pass it with torch.func.functional_call"
                    )
        return Written(tensors, tuple(settings))

    def _stored(self, path: str, module: nn.Module, tensors: dict[str, torch.Tensor], settings: list[Setting]) -> None:
        now, before = _own(module), self.own[path]
        tokens, kind = _tokens(now), type(module).__name__
        for name in sorted(tokens.keys() | before.keys()):
            if tokens.get(name) == self.tokens[path].get(name):
                continue
            full, old, new = attribute_name(path, name), before.get(name, MISSING), now.get(name, MISSING)
            if isinstance(new, torch.Tensor):
                tensors[full] = new
                vars(module).pop(name)
                if name in before:
                    vars(module)[name] = old
            elif old is new and id(new) in self.parts:
                parts = self.parts.pop(id(new))  # once, however many modules refer to it
                for part, value in vars(new).items():
                    was = parts.get(part, MISSING)
                    if token(value, identity, set()) != token(was, identity, set()):
                        settings.append(_setting(full, part, was, value, kind))
            elif old is not new:
                settings.append(_setting(full, "", old, new, kind))
            elif not _is_object(new):
                raise changed_attribute(f"the attribute {full} of {kind} (a {type(new).__name__}, in place)")


def _setting(name: str, part: str, old: Any, new: Any, module: str) -> Setting:
    made = Setting(name, part, old, new, module)
    if not (isinstance(new, _PLAIN) and (old is MISSING or isinstance(old, _PLAIN))):
        raise changed_attribute(made)
    return made


def _is_object(value: Any) -> bool:
    """Whether a value is a plain object, a config say: neither code nor module nor container."""
    plain = isinstance(value, (nn.Module, torch.Tensor, torch.Generator, Mapping, list, tuple, set, *_PLAIN, *_CODE))
    return hasattr(value, "__dict__") and not plain


def _change_in_place(name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
    if new is None or old is None or new.requires_grad or (new.shape, new.dtype) != (old.shape, old.dtype):
        raise TraceError(
            f"forward replaces the buffer {name} ({_short(old)}) by {_short(new)}, which a planned step cannot do: keep its "
            "shape and dtype, and detach what it is set to"
        )
    with torch.no_grad():
        old.copy_(new)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OWN_STATE}


def _tokens(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token(value, identity, set()) for name, value in held.items()}


def identity(t: torch.Tensor) -> Any:
    """Parameters change place while a module is exported, and layers keep lists of them (nn.LSTM)."""
    return (tuple(t.shape), t.dtype) if isinstance(t, nn.Parameter) else id(t)


def _shown(t: torch.Tensor) -> str:
    """As in "float32[8, 32], requires_grad"."""
    grad = ", requires_grad" if t.requires_grad else ""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{grad}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _shown(value)
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# --- the same call twice ---------------------------------------------------------------------------------------------


_UNTRACED = {  # torch function -> its name for users, and what to do instead
    "ctc_loss": ("ctc_loss", "Return the log-probabilities, and take the loss of the planned module's output"),
    "_pack_padded_sequence": ("a packed sequence", "Pad and mask instead"),
}


class Rehearsed(TorchFunctionMode):
    """Records the calls of torch functions that a forward makes, and refuses a second run that makes others.

    What changes from one run to the next without an argument or an attribute that changed depends on something that a
    plan cannot see: a counter elsewhere, a generator of another library, the clock.

    Args:
        calls: those of the first run; None: this is the first.
        line: "file:line" of the user's line that is running.
        model: what is run, to name what hangs on it.
    """

    def __init__(self, calls: list[Any] | None, line: Callable[[], str], model: nn.Module) -> None:
        super().__init__()
        self.expected, self.line, self.model = calls, line, model
        self.calls: list[Any] = []
        self.uses_autograd = False
        self.default_dtype = torch.get_default_dtype()
        self.sets_default_dtype = False
        self.value_line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        under = transform()
        if under in ("Grad", "Jvp"):
            raise TraceError(
                f"forward uses a transform of torch.func (grad, jvp) at {self.line()}, which is not traced. Use "
                "torch.autograd.grad, or plan the submodules beside it: model.part = gcsolve.solve(model.part, ...).module"
            )
        kwargs = kwargs or {}
        real: list[torch.Tensor] = []

        def described(t: torch.Tensor) -> Any:
            if not under and t.requires_grad and type(t) in (torch.Tensor, nn.Parameter):
                real.append(t)
            return (tuple(t.shape), t.dtype)

        made = (func, token((args, kwargs), described, set()))
        self.sets_default_dtype |= torch.get_default_dtype() != self.default_dtype
        self.uses_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        if getattr(func, "__name__", "") in _UNTRACED:
            what, instead = _UNTRACED[func.__name__]
            raise TraceError(
                f"forward uses {what} at {self.line()}, which is not traced: shapes follow from the values of the lengths. "
                f"{instead}, or plan the submodules around it: model.part = gcsolve.solve(model.part, ...).module"
            )
        result = func(*args, **kwargs)
        if not self.value_line and _follows_from_values(result):
            self.value_line = self.line()
        if isinstance(result, _PLAIN) and result is not None:
            return result  # a question (a shape, a dtype); what its answer decides will show
        if real and isinstance(result, torch.Tensor) and result.requires_grad:
            name = held_tensors(self.model).get(id(real[0]), ("a tensor from outside the model", None))[0]
            raise TraceError(
                f"forward uses {name} ({_shown(real[0])}) at {self.line()}: neither a parameter of the model nor an argument, "
                "so a planned step could not give it its gradient. Register it (nn.ParameterList, nn.ModuleList), or pass it "
                "as an argument"
            )
        at = len(self.calls)
        self.calls.append(made)
        if self.expected is not None and (at >= len(self.expected) or self.expected[at] != made):
            name = resolve_name(func) or getattr(func, "__name__", str(func))
            raise TraceError(
                f"forward, run twice on the same input, does not do the same: at {self.line()}, {name} is called "
                "with other values the second time, or is another function. A counter, a cache or a random generator outside "
                "torch decides; make it an argument of the model or a buffer (a cache that the first call fills: call the "
                "model once before planning)"
            )
        return result


def _follows_from_values(result: Any) -> bool:
    """Whether a result is, or has in its shape, a number that only the values of tensors tell."""
    found = result.shape if isinstance(result, torch.Tensor) else (result,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in found)


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """In this block, torch.distributions do not look at the values of their arguments, which a trace does not have."""
    kind: Any = torch.distributions.Distribution
    checks = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(checks)


# --- random generators -----------------------------------------------------------------------------------------------


class HostRandomnessRefused:
    """Python's and numpy's draws inside forward would be baked into the graph, and so would what forward does to the state
    of torch's generators: notice them by the states before and after."""

    def __enter__(self) -> None:
        self.before = random.getstate(), _numpy_state(), torch.get_rng_state()

    def __exit__(self, kind: Any, value: Any, tb: Any) -> None:
        python, (state, comparable), torch_state = self.before
        drawn = [("random", random.getstate() != python), ("numpy.random", _numpy_state()[1] != comparable)]
        moved = [name for name, has_moved in drawn if has_moved]
        if moved:  # by forward, or by another thread
            random.setstate(python)
            numpy.random.set_state(state)
        if not torch.equal(torch.get_rng_state(), torch_state):
            torch.set_rng_state(torch_state)
        if moved and kind is None:
            raise TraceError(
                f"forward draws from {' and '.join(moved)} (layer drop, masking on the host): the draw would be the same in "
                "every step. Use torch's generator in forward, or switch that feature off"
            )


def _numpy_state() -> tuple[Any, Any]:
    """numpy's global generator state, and the same in a form that can be compared."""
    state: Any = numpy.random.get_state()
    return state, (state[0], state[1].tobytes(), *state[2:])


def _called_by_gcsolve() -> bool:
    """Whether it is this package that runs now: it runs ops once to measure them, from a state of its own."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OWN)


_OWN, _TORCH = (str(Path(str(file)).parent) for file in (__file__, torch.__file__))

_SEEDING = {"manual_seed": (torch, torch.random), "set_rng_state": (torch, torch.random), "seed": (torch, torch.random)}


@contextlib.contextmanager
def seeding_refused(line: Callable[[], str]) -> Iterator[None]:
    """In this block, of this thread, a call that sets the state of torch's default generator is an error."""
    here = threading.get_ident()
    originals = [(module, name, getattr(module, name)) for name, modules in _SEEDING.items() for module in modules]

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or _called_by_gcsolve():
                return original(*args, **kwargs)
            raise TraceError(
                f"forward calls torch.{name} at {line()}: a planned step would not. Seed outside forward, or draw from a "
                "torch.Generator of your own (an argument or an attribute of the module)"
            )

        return refuse

    for module, name, original in originals:
        setattr(module, name, refusing(name, original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """In this block, of this thread, `torch.inference_mode` is `torch.no_grad`: a trace knows the one, and loses the other."""
    here, kind = threading.get_ident(), torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    entered: list[Any] = []

    def enter_no_grad(self: Any) -> None:
        if threading.get_ident() != here:
            return enter(self)
        entered.append(torch.set_grad_enabled(not self.mode))
        return None

    def leave_no_grad(self: Any, *error: Any) -> None:
        if threading.get_ident() != here:
            return leave(self, *error)
        return entered.pop().__exit__(*error)

    kind.__enter__, kind.__exit__ = enter_no_grad, leave_no_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]


class StandIns:
    """Generators that stand for the user's while tracing, so that nothing is drawn from those and each can be told from
    the graph by its seed.

    Args:
        places: one (kind, place) a generator: ("source", index) of the call's, ("generator attribute", name) of the model's.
    """

    _FIRST_SEED = 0x6C5F_0000_0000

    def __init__(self, found: Mapping[tuple[str, Any], torch.Generator]) -> None:
        self.places: list[tuple[str, Any]] = []
        self.of: dict[int, torch.Generator] = {}  # id of the user's generator -> its stand-in
        self._held = list(found.values())
        for place, generator in found.items():
            if id(generator) not in self.of:
                made = torch.Generator(generator.device)
                made.manual_seed(self._FIRST_SEED + len(self.places))
                self.of[id(generator)] = made
                self.places.append(place)
        self._states = [g.get_state() for g in self.of.values()]

    def place(self, in_graph: torch.Generator) -> tuple[str, Any]:
        """Where a call finds the generator that the graph's stands for.

        Raises:
            TraceError: it is none of the call's or the model's, or forward has seeded it.
        """
        index = in_graph.initial_seed() - self._FIRST_SEED
        states = zip(self.of.values(), self._states, strict=True)
        if not 0 <= index < len(self.places) or not all(torch.equal(g.get_state(), s) for g, s in states):
            raise TraceError(
                "forward draws from a torch.Generator that is neither an argument of the model nor an attribute of a module, "
                "or seeds it: a planned step could not follow its state. Pass it as an argument, and seed it outside forward"
            )
        return self.places[index]
