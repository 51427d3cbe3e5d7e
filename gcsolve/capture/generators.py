"""Random generators while a step is traced.

A draw on the host (from Python's or numpy's global generator) would be a constant of the graph, the same in every step, so
forward may make none; nor may it seed torch's default generator. A `torch.Generator` of the call or of the model is replaced
by a stand-in, which leaves its state as it is and shows in the graph which of them an op draws from.
"""

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

_TORCH = str(Path(str(torch.__file__)).parent)

_CALLER = 2
"""Frames from a replacement of `patches.py` up to the code that calls it, through a dispatcher."""

# --- draws on the host -----------------------------------------------------------------------------------------------

HOSTS: tuple[Any, ...] = (random, numpy.random)
"""The modules with a global generator."""

_GLOBAL_GENERATORS: tuple[Any, ...] = (random.random.__self__, numpy.random.rand.__self__)  # type: ignore[attr-defined]

# The functions that draw from a global generator or set its state: id -> (the function, name of its module).
_DRAWS = {
    id(function): (function, module.__name__)
    for module in HOSTS
    for name, function in vars(module).items()
    if getattr(function, "__self__", None) in _GLOBAL_GENERATORS
    or (module is numpy.random and name in ("seed", "ranf", "sample"))
    if name not in ("getstate", "get_state", "get_bit_generator")
}


def names_of_draws(module: ModuleType) -> list[str]:
    """The names in a module of functions that draw from a global generator or set its state."""
    return [name for name, function in list(vars(module).items()) if id(_original(function)) in _DRAWS]


def _original(function: Any) -> Any:
    """What a dispatcher stands for; any other object is itself."""
    return getattr(function, "__wrapped__", function) if type(function) is FunctionType else function


def draw_refused(draw: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that raises a TraceError in place of a draw; torch's own code may draw."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(_CALLER).f_code.co_filename.startswith(_TORCH):
            return draw(*args, **kwargs)
        _, module = _DRAWS[id(_original(draw))]
        raise draws_on_the_host([module], f" ({name}) at {running_line()}")

    return refuse


def draws_on_the_host(modules: Iterable[str], where: str = "") -> TraceError:
    return TraceError(
        f"forward draws from {' and '.join(modules)}{where} (layer drop, masking on the host): the draw would be the same in "
        "every step. Use torch's generator in forward, or switch that feature off"
    )


_waited_for: list[threading.Event] = []  # one for each block of `draws_of_others_wait` that is running: its end
_PATIENCE_S = 5.0  # then a draw goes on, as forward may itself be waiting for the thread that draws


@contextlib.contextmanager
def draws_of_others_wait() -> Iterator[None]:
    """In this block, draws of other threads wait for its end, where their functions are those of `waiting_for_others`."""
    end = threading.Event()
    _waited_for.append(end)
    try:
        yield
    finally:
        end.set()
        _waited_for.remove(end)


def waiting_for_others(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the draw when no block of `draws_of_others_wait` is running."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        for end in tuple(_waited_for):
            end.wait(_PATIENCE_S)
        return draw(*args, **kwargs)

    return wait


def host_states() -> dict[str, Any]:
    """States of Python's and of numpy's global generator, by module, which can be compared."""
    state: Any = numpy.random.get_state()
    return {"random": random.getstate(), "numpy.random": (state[0], state[1].tolist(), *state[2:])}


# The functions themselves, which no patch replaces.
_SET_STATE = {"random": random.setstate, "numpy.random": numpy.random.set_state}


def set_host_states(states: Mapping[str, Any]) -> None:
    for module, state in states.items():
        _SET_STATE[module](state)


# --- torch's generators ----------------------------------------------------------------------------------------------


def seeding_refused(seed: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that raises a TraceError in place of one that sets the state of torch's default generator.

    This package may call it, through torch: it runs ops to measure them, and restores the state.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _is_gcsolve(sys._getframe(_CALLER)):
            return seed(*args, **kwargs)
        raise TraceError(
            f"forward calls torch.{name} at {running_line()}: a planned step would not. Seed outside forward, or draw from "
            "a torch.Generator of your own (an argument or an attribute of the module)"
        )

    return refuse


def _is_gcsolve(frame: Any) -> bool:
    """Whether the innermost code that is not torch's is this package's."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class StandIns:
    """Generators in place of the call's and the model's while they are traced. Each has a seed of its own, by which a
    generator in the graph is recognized.

    `of`: id of a generator of the user's -> its stand-in.

    Args:
        generators: those of the call and of the model, each with the input that a planned call finds it by.
    """

    _FIRST_SEED = 0x6C5F_0000_0000

    def __init__(self, generators: Mapping[GeneratorInput, torch.Generator]) -> None:
        self.of: dict[int, torch.Generator] = {}
        self._inputs: list[GeneratorInput] = []
        self._generators = list(generators.values())  # kept alive, so that their ids stay theirs
        for source, generator in generators.items():
            if id(generator) not in self.of:
                stand_in = torch.Generator(generator.device)
                stand_in.manual_seed(self._FIRST_SEED + len(self._inputs))
                self.of[id(generator)] = stand_in
                self._inputs.append(source)
        self._states = [g.get_state() for g in self.of.values()]

    def place(self, in_graph: torch.Generator) -> GeneratorInput:
        """The input by which a call finds the generator that one in the graph stands for.

        Raises:
            TraceError: it is none of the call's or the model's, or forward has seeded it.
        """
        index = in_graph.initial_seed() - self._FIRST_SEED
        states = zip(self.of.values(), self._states, strict=True)
        if not 0 <= index < len(self._inputs) or not all(torch.equal(g.get_state(), s) for g, s in states):
            raise TraceError(
                "forward draws from a torch.Generator that is neither an argument of the model nor an attribute of a module, "
                "or seeds it: a planned step could not follow its state. Pass it as an argument, and seed it outside forward"
            )
        return self._inputs[index]
