"""Draws on the host while a model is planned; draws into tensors that do not lie row by row."""

from __future__ import annotations

import copy
import random
import threading
import time
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from tests.test_exact import KeepNothing
from tests.training import Of, assert_same, train, x

FILLS: dict[str, Any] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h * 1, 0.3, inplace=True),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.1, True),
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.3) * h,
    "bernoulli_ of many": lambda h: torch.empty_like(h).bernoulli_(h.detach().sigmoid()) * h,
    "uniform_": lambda h: torch.empty_like(h).uniform_() * h,
    "exponential_": lambda h: torch.empty_like(h).exponential_() * h,
    "randn_like": lambda h: torch.randn_like(h) * h,
}
LAYOUTS: dict[str, Any] = {
    "channels last": lambda fill, h: fill(h.to(memory_format=torch.channels_last)),
    "transposed": lambda fill, h: fill(h.transpose(1, 3)).transpose(1, 3),
    "part": lambda fill, h: fill(h[:, ::2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FILLS)
def test_what_is_drawn_lies_where_eager_draws_it(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: LAYOUTS[layout](FILLS[name], m.a(x)), a=nn.Conv2d(4, 4, 3))
    expected = train(copy.deepcopy(model), x(2, 4, 8, 8))
    plan = gcsolve.solve(model, x(2, 4, 8, 8), budget="4MB", solver=KeepNothing())
    assert_same(expected, train(plan.module, x(2, 4, 8, 8)))


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
