"""What a trace would bake in, and state that a planned step would not change, are refused by name and line."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy
import pytest
import torch
from numpy.random import normal
from torch import nn
from torch.nn import functional as F

import gcsolve
from gcsolve.errors import TraceError
from tests import models
from tests.training import Config, Of, call, since_213, two_layers, with_buffer, x

# --- what a trace would bake in -----------------------------------------------------------------------------------------


def _seeds(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(m.a(x), 0.5)


def _forks(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return F.dropout(m.a(x), 0.5)


_BOUND = [numpy.random.rand]


class _Elsewhere:
    """State that a trace cannot see."""

    numpy = numpy.random.default_rng(0)
    python = random.Random(0)
    torch = torch.Generator()
    calls: list[int] = []  # noqa: RUF012


def _counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    _Elsewhere.calls.append(1)
    return m.a(x) * len(_Elsewhere.calls)


_MODULE = nn.Linear(8, 8)  # of nobody


HIDDEN: dict[str, tuple[Callable[..., Any], str]] = {
    "numpy": (
        lambda m, x: m.a(x) * numpy.random.rand(),
        r"draws from numpy\.random \(rand\) at .*test_refusals\.py",
    ),
    "python": (
        lambda m, x: m.a(x) * random.randint(1, 3),
        r"draws from random \(randint\) at .*test_refusals\.py",
    ),
    "numpy by name": (
        lambda m, x: m.a(x) * normal(),
        r"draws from numpy\.random \(normal\) at .*test_refusals\.py",
    ),
    "python by name": (lambda m, x: m.a(x) * uniform(0, 1), r"draws from random \(uniform\) at .*test_refusals"),
    "bound elsewhere": (lambda m, x: m.a(x) * _BOUND[0](), r"draws from numpy\.random \(layer drop"),
    "seeding numpy": (lambda m, x: m.a(x) * (numpy.random.seed(0) or 1), r"draws from numpy\.random \(seed\) at"),
    "numpy generator": (lambda m, x: m.a(x) * float(_Elsewhere.numpy.random()), r"run twice .*test_refusals\.py"),
    "python generator": (lambda m, x: m.a(x) * _Elsewhere.python.random(), r"run twice .*test_refusals\.py"),
    "array": (lambda m, x: m.a(x) * torch.from_numpy(_Elsewhere.numpy.random(8)).float(), r"run twice"),
    "counter": (_counts, r"run twice .*test_refusals\.py"),
    "seeding": (_seeds, r"torch\.manual_seed at .*test_refusals\.py"),
    "forking": (_forks, r"torch\.(manual_seed|set_rng_state) at .*test_refusals\.py"),
    "generator of a class": (lambda m, x: m.a(x) * torch.rand(8, generator=_Elsewhere.torch), r"torch\.Generator"),
    "module of nobody": (
        lambda m, x: _MODULE(m.a(x)),
        r"a tensor from outside the model .* at .*test_refusals\.py",
    ),
    "module in a list": (
        lambda m, x: m.parts[0](m.a(x)),
        r"parts\[0\]\.weight .* at .*test_refusals\.py.*Register it",
    ),
    "vmap": (lambda m, x: torch.vmap(lambda row: m.a(row) * row.sum())(x), r"uses torch\.vmap.*batched ops"),
    "func.grad": (
        lambda m, x: m.a(torch.func.grad(lambda y: m.a(y).sum())(x)),
        r"torch\.func \(grad, jvp\) at .*test_refusals\.py.*torch\.autograd\.grad",
    ),
    "ctc_loss": (
        lambda m, x: F.ctc_loss(m.a(x[:, None]), torch.ones(1, 2).long(), (4,), (2,)),
        r"ctc_loss at .*test_refusals\.py.*the loss of the planned module's output",
    ),
    "packed sequence": (
        lambda m, x: nn.utils.rnn.pack_padded_sequence(m.a(x)[:, None], [4]).data,
        r"packed sequence at .*test_refusals\.py.*Pad and mask",
    ),
    "compiled function": (lambda m, x: m.compiled(m.a(x)), r"compiled with torch\.compile.*uncompiled"),
    "lazy module": (lambda m, x: m.lazy(m.a(x)), "lazy.weight has no shape yet .*call the model once"),
    "sparse gradient": (lambda m, x: F.embedding(torch.arange(4), m.a.weight, sparse=True), "sparse=False"),
    "covariance": (lambda m, x: torch.cov(m.a(x)), r"at .*test_refusals.*, or calls an op there that does so itself"),
    "least squares": (
        lambda m, x: torch.linalg.lstsq(m.a(x), x).solution,
        r"as large as its values say at .*test_refusals.*outside",
    ),
    "randint_like": (lambda m, x: torch.randint_like(m.a(x), 1, 5) * m.a(x), r"randint_like of .*x\.detach"),
    "host branch": (
        lambda m, x: m.a(x) if torch.rand(1).item() < 0.5 else x,
        r"branches on a tensor's value at .*test_refusals",
    ),
}


@pytest.mark.filterwarnings("ignore:Raw SymInt")  # torch 2.14's, before it raises
@pytest.mark.parametrize(
    "resized", [lambda y, n: F.interpolate(y[None, None], size=(n, n), mode="bilinear"), lambda y, n: F.pad(y, (0, n))]
)
def test_a_size_that_values_tell_is_refused_in_words(resized: Callable[..., torch.Tensor]) -> None:
    model = Of(lambda m, x: resized(m.a(x), x.argmax().item()), a=nn.Linear(8, 8))
    with pytest.raises(TraceError, match=r"makes a number or a shape of a tensor's values .*at .*test_refusals"):
        gcsolve.solve(model, torch.randn(4, 8), budget=1.0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=since_213 if n == "vmap" else ()) for n in HIDDEN])
def test_what_a_trace_would_bake_in_is_refused_by_name(name: str) -> None:
    function, message = HIDDEN[name]
    model = Of(function, a=nn.Linear(8, 8), parts=[nn.Linear(8, 8)], compiled=torch.compile(torch.sin, backend="eager"))
    if name == "lazy module":
        model.lazy = nn.LazyLinear(8)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes()  # type: ignore[index, union-attr]
    with pytest.raises(TraceError, match=message):
        gcsolve.solve(model, x(4, 8), budget=1.0)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tobytes())  # type: ignore[index, union-attr]


# --- state --------------------------------------------------------------------------------------------------------------


def _counter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.a(x)


def _list(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(x.shape[0])
    return m.a(x)


def _object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.config.kind = (m.config.kind or 0) + 1
    return m.a(x)


def _listed(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen[0].add_(1)
    return m.a(x) + m.seen[0]


def _parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.weight = nn.Parameter(m.a.weight * 2)
    return m.a(x)


def _attached(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.average = m.a(x)
    return m.average


STATE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counter": (lambda: Of(_counter, **two_layers(), calls=0), r"the attribute calls of Of \(from 1 to 2\)"),
    "list": (lambda: Of(_list, **two_layers(), seen=[]), r"the attribute seen of Of \(a list, in place\)"),
    "object": (
        lambda: Of(_object, **two_layers(), config=Config()),
        r"the attribute config\.kind of Of \(from 1 to 2\)",
    ),
    "in a submodule": (lambda: nn.Sequential(Of(_counter, **two_layers(), calls=0)), r"the attribute 0\.calls of Of"),
    "tensor in a list": (
        lambda: Of(_listed, **two_layers(), seen=[torch.zeros(8)]),
        r"in place that a planned step cannot follow",
    ),
    "parameter": (lambda: Of(_parameter, **two_layers()), r"replaces the parameter a\.weight"),
    "buffer that needs a gradient": (lambda: with_buffer(_attached), r"replaces the buffer average .* detach that"),
}


@pytest.mark.parametrize("name", STATE)
def test_state_that_a_planned_step_would_not_change_is_refused_by_name(name: str) -> None:
    build, message = STATE[name]
    model = build()
    with pytest.raises(TraceError, match=message):
        gcsolve.solve(model, x(4, 8), budget=1.0)
    assert all(not isinstance(v, list) or v in ([], [v[0] if v else 0]) for v in vars(model).values())
    assert getattr(model, "calls", 0) == 0


def test_hooks_on_every_module_are_refused() -> None:
    model = models.MLP()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(TraceError, match="hooks for all modules"):
            gcsolve.solve(model, x(8, 32), budget="1MB")
    finally:
        handle.remove()
    call(gcsolve.solve(model, x(8, 32), budget="1MB").module, x(8, 32))
