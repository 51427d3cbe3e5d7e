"""Random generators while a model is traced: nothing is drawn from the user's, and a draw that a plan would bake in is
refused."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from gcsolve.capture.joint import GeneratorInput
from gcsolve.errors import TraceError
from gcsolve.util.source import PACKAGE, running_line

_HOSTS: tuple[tuple[str, Any], ...] = (("random", random), ("numpy.random", numpy.random))

_GLOBAL: tuple[Any, ...] = (random.random.__self__, numpy.random.rand.__self__)  # type: ignore[attr-defined]

# The functions that draw from them, or seed them: id -> (function, name of the generator).
_DRAWS = {
    id(function): (function, name)
    for name, module in _HOSTS
    for key, function in vars(module).items()
    if getattr(function, "__self__", None) in _GLOBAL or (module is numpy.random and key in ("seed", "ranf", "sample"))
    if key not in ("getstate", "get_state", "get_bit_generator")
}

_held_up: list[threading.Event] = []  # the ends of blocks that other threads' draws wait for
_PATIENCE_S = 5.0  # should forward itself wait for the thread that waits

Place = tuple[Any, str, Any, str]  # module, name in it, function, the generator's name


@contextlib.contextmanager
def draws_refused(*, alone: bool = False) -> Iterator[None]:
    """In this block, of this thread, a draw from Python's or numpy's global generator, or seeding it, is an error: it would
    be baked into the graph.

    Args:
        alone: also by functions that modules have imported by their own names (looking for them takes a moment), and
            another thread's draws wait for the end of the block, so that what moves a generator meanwhile is this thread.
    """
    modules = tuple(sys.modules.values()) if alone else tuple(module for _, module in _HOSTS)
    places = [
        (module, key, held, _DRAWS[id(held)][1])
        for module in modules
        if isinstance(module, ModuleType)
        for key, held in list(vars(module).items())
        if id(held) in _DRAWS
    ]
    here, over = threading.get_ident(), threading.Event()
    if alone:
        _held_up.append(over)

    def refusing(original: Callable[..., Any], name: str, generator: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                for block in tuple(_held_up):
                    block.wait(_PATIENCE_S)
                return original(*args, **kwargs)
            if sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                return original(*args, **kwargs)
            raise draws_on_the_host([generator], f" ({name}) at {running_line()}")

        return refuse

    try:
        with _replaced(places, refusing):
            yield
    finally:
        over.set()
        if alone:
            _held_up.remove(over)


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


@contextlib.contextmanager
def _replaced(places: list[Place], by: Callable[[Callable[..., Any], str, str], Callable[..., Any]]) -> Iterator[None]:
    for module, key, original, name in places:
        setattr(module, key, by(original, key, name))
    try:
        yield
    finally:
        for module, key, original, _ in places:
            setattr(module, key, original)


def _host_states() -> dict[str, Any]:
    """State of Python's and of numpy's global generator, to compare."""
    state: Any = numpy.random.get_state()
    return {"random": random.getstate(), "numpy.random": (state[0], state[1].tobytes(), *state[2:])}


def _called_by_gcsolve() -> bool:
    """Whether it is this package that runs now: it runs ops once to measure them, from a state of its own."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


_TORCH = str(Path(str(torch.__file__)).parent)

_SEEDING: list[Place] = [
    (module, name, getattr(module, name), "")
    for name in ("manual_seed", "set_rng_state", "seed")
    for module in (torch, torch.random)
]


def seeding_refused() -> contextlib.AbstractContextManager[None]:
    """In this block, of this thread, a call that sets the state of torch's default generator is an error."""
    here = threading.get_ident()

    def refusing(original: Callable[..., Any], name: str, _: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or _called_by_gcsolve():
                return original(*args, **kwargs)
            raise TraceError(
                f"forward calls torch.{name} at {running_line()}: a planned step would not. Seed outside forward, or draw from "
                "a torch.Generator of your own (an argument or an attribute of the module)"
            )

        return refuse

    return _replaced(_SEEDING, refusing)


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
