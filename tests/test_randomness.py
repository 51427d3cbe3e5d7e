"""Draws on the host while a model is planned."""

from __future__ import annotations

import random
import threading
import time

import numpy
from torch import nn

import gcsolve
from tests.training import Of, x


def test_draws_of_another_thread_are_its_own() -> None:
    """They neither stop a plan from being made nor are undone."""
    stop, drawn = threading.Event(), []

    def draw() -> None:
        while not stop.is_set():
            drawn.append((numpy.random.rand(), random.random()))
            time.sleep(0.0005)

    numpy.random.seed(5)
    random.seed(5)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        gcsolve.solve(Of(lambda m, x: m.a(x), a=nn.Linear(8, 8)), x(4, 8), budget=1.0)
    finally:
        stop.set()
        thread.join()
    of_numpy, of_python = numpy.random.RandomState(5), random.Random(5)
    assert len(drawn) > 10
    assert drawn == [(of_numpy.rand(), of_python.random()) for _ in drawn]
