"""Random generators while a model is traced: nothing is drawn from the user's, and a draw that a plan would bake in is
refused."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

from gcsolve.capture.joint import GeneratorInput
from gcsolve.errors import TraceError
from gcsolve.util.source import PACKAGE, running_line

HOSTS: tuple[Any, ...] = (random, numpy.random)

_GLOBAL: tuple[Any, ...] = (random.random.__self__, numpy.random.rand.__self__)  # type: ignore[attr-defined]

# The functions that draw from the global generators of Python and numpy, or seed them: id -> (function, module's name).
_DRAWS = {
    id(function): (function, module.__name__)
    for module in HOSTS
    for key, function in vars(module).items()
    if getattr(function, "__self__", None) in _GLOBAL or (module is numpy.random and key in ("seed", "ranf", "sample"))
    if key not in ("getstate", "get_state", "get_bit_generator")
}

_TORCH = str(Path(str(torch.__file__)).parent)


def names_of_draws(module: ModuleType) -> list[str]:
    """Names under which a module has such functions."""
    return [name for name, function in list(vars(module).items()) if id(_undispatched(function)) in _DRAWS]


def _undispatched(function: Any) -> Any:
    """A function that is replaced already, as it was before."""
    return getattr(function, "__wrapped__", function) if type(function) is FunctionType else function


def draw_refused(draw: Callable[..., Any], name: str) -> Callable[..., Any]:
    """In place of a function that draws from a global generator, or seeds it: an error, since the draw would be baked into
    the graph."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(_CALLER).f_code.co_filename.startswith(_TORCH):
            return draw(*args, **kwargs)
        raise draws_on_the_host([_DRAWS[id(_undispatched(draw))][1]], f" ({name}) at {running_line()}")

    return refuse


_CALLER = 2  # frames up from a replacement to the code that calls it: between them is the dispatcher

_waited_for: list[threading.Event] = []  # the ends of blocks that other threads' draws wait for
_PATIENCE_S = 5.0  # should forward itself wait for the thread that waits


def waiting_for_others(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The same for threads that do not trace: they wait for the end of another thread's `draws_of_others_wait()`."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        for end in tuple(_waited_for):
            end.wait(_PATIENCE_S)
        return draw(*args, **kwargs)

    return wait


@contextlib.contextmanager
def draws_of_others_wait() -> Iterator[None]:
    """In this block, what moves a global generator of Python or numpy is this thread."""
    end = threading.Event()
    _waited_for.append(end)
    try:
        yield
    finally:
        end.set()
        _waited_for.remove(end)


def draws_on_the_host(generators: Iterable[str], at: str = "") -> TraceError:
    return TraceError(
        f"forward draws from {' and '.join(generators)}{at} (layer drop, masking on the host): the draw would be the same in "
        "every step. Use torch's generator in forward, or switch that feature off"
    )


def host_states() -> dict[str, Any]:
    """State of Python's and of numpy's global generator, to compare and to set again."""
    state: Any = numpy.random.get_state()
    return {"random": random.getstate(), "numpy.random": (state[0], state[1].tolist(), *state[2:])}


_SETTERS = {"random": random.setstate, "numpy.random": numpy.random.set_state}  # themselves, whatever refuses now


def set_host_states(states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        _SETTERS[name](state)


def seeding_refused(seed: Callable[..., Any], name: str) -> Callable[..., Any]:
    """In place of a function that sets the state of torch's default generator: an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _is_gcsolve(sys._getframe(_CALLER)):
            return seed(*args, **kwargs)
        raise TraceError(
            f"forward calls torch.{name} at {running_line()}: a planned step would not. Seed outside forward, or draw from "
            "a torch.Generator of your own (an argument or an attribute of the module)"
        )

    return refuse


def _is_gcsolve(frame: Any) -> bool:
    """Whether it is this package that runs there, through torch: it runs ops once to measure them, from a state of its own."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class StandIns:
    """Generators that stand for the user's while tracing, so that nothing is drawn from those and each can be told from
    the graph by its seed.

    Args:
        generators: those of the call and of the model, each with the input that a planned call finds it by.
    """

    _FIRST_SEED = 0x6C5F_0000_0000

    def __init__(self, generators: Mapping[GeneratorInput, torch.Generator]) -> None:
        self.places: list[GeneratorInput] = []
        self.of: dict[int, torch.Generator] = {}  # id of the user's generator -> its stand-in
        self._generators = list(generators.values())  # held, so that their ids stay their own
        for place, generator in generators.items():
            if id(generator) not in self.of:
                stand_in = torch.Generator(generator.device)
                stand_in.manual_seed(self._FIRST_SEED + len(self.places))
                self.of[id(generator)] = stand_in
                self.places.append(place)
        self._states = [g.get_state() for g in self.of.values()]

    def place(self, in_graph: torch.Generator) -> GeneratorInput:
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
