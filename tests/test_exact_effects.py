"""Randomness is replayed, effects happen once: attributes, buffers, arguments and generators end as the untouched model's.

Bitwise, over three optimizer steps, at the loosest, a middle and the tightest budget.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy
import pytest
import torch
from numpy.random import normal
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import gcsolve
from gcsolve.errors import TraceError
from tests import models
from tests.test_exact import KeepNothing
from tests.training import (
    Of,
    assert_built_trains_the_same,
    assert_same,
    assert_trains_the_same,
    call,
    since_213,
    total,
    train,
    x,
)


def _two() -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}


# --- randomness ------------------------------------------------------------------------------------------------------


def _samples(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    best = torch.multinomial(y.detach().softmax(1), 2)
    y = y + y.gather(1, best).repeat(1, 4) + torch.randint(0, 3, y.shape) + torch.empty_like(y).exponential_() * 0.1
    y = F.rrelu(F.alpha_dropout(y, 0.2, training=True), training=True)[torch.randperm(len(y))]
    return m.b(F.dropout1d(y.view(2, 8, 8), 0.3).view(16, 8) * F.gumbel_softmax(y)).tanh()


def _distribution(m: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.distributions.Normal(m.a(x), F.softplus(m.b(x))).rsample()
    choice = torch.distributions.Categorical(logits=drawn).sample()
    return torch.tanh(drawn) * choice[:, None]


RANDOM: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "all kinds of samples": lambda: (Of(_samples, **_two()), x(16, 8)),
    "torch.distributions": lambda: (Of(_distribution, **_two()), x(16, 8)),
    "p=0 and p=1": lambda: (Of(lambda m, x: F.dropout(m.a(x).tanh(), 0.0) + F.dropout(m.b(x), 1.0), **_two()), x(8, 8)),
    "in place": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 8)), x(8, 8)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_ops(name: str) -> None:
    torch.manual_seed(0)
    model, example = RANDOM[name]()
    assert_trains_the_same(model, example)


@pytest.mark.parametrize("p", [0.15, 0.45, 0.025, 0.5])
def test_dropout_scales_as_eager_does(p: float) -> None:
    """In float32, 1/(1-p) rounded is not always 1 divided by 1-p rounded."""
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 64), nn.Dropout(p), nn.Linear(64, 8), nn.Tanh()), x(64, 8)
    expected = train(copy.deepcopy(model), example)
    for solver in ("store_all", KeepNothing()):
        plan = gcsolve.solve(copy.deepcopy(model), example, budget="1GB", solver=solver)
        assert_same(expected, train(plan.module, example))


@pytest.mark.parametrize("p", [0.3, 0.45])
def test_the_gradient_is_zero_where_the_forward_was(p: float) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(p))
    plan = gcsolve.solve(model, x(64, 16).requires_grad_(), budget="1GB", solver=KeepNothing())
    seen: list[torch.Tensor] = []
    plan.module[0].weight.data.copy_(torch.eye(16))
    plan.module[0].bias.data.zero_()
    example = x(64, 16).requires_grad_()
    output = plan.module(example)
    output.register_hook(seen.append)
    output.sum().backward()
    assert 0.1 < (output == 0).float().mean() < 0.9
    assert torch.equal(output == 0, example.grad == 0)


def test_the_solver_prices_the_mask_against_the_generator_state() -> None:
    """A kept dropout costs one byte an element (its mask) or one generator state, never its whole output."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())]
    model, example = nn.Sequential(*layers), x(512, 64)
    first = gcsolve.solve(model, example, budget=1.0)
    (mask, *_), (state, *_) = (
        [v for v, value in enumerate(first.problem.graph.values) if fits(value.name)]
        for fits in (lambda name: name == "native_dropout.1", lambda name: name.endswith("rng_state"))
    )
    values = first.problem.graph.values
    assert (values[mask].size_bytes, values[state].size_bytes) == (512 * 64, 79 * 64)
    plan = first.at(budget=f"{first.minimum_budget().one_rerun_bytes}B")
    runs = plan.schedule.runs(plan.problem.graph)
    dropouts = [i for i, node in enumerate(plan.problem.graph.nodes) if node.op == "aten.native_dropout.default"]
    assert any(runs[i] > 1 for i in dropouts)
    assert_same(train(copy.deepcopy(model), example), train(plan.module, example))


class _Draws(nn.Module):
    """Draws from the default generator, from one that it owns and from one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor, generator: torch.Generator, also: Any = None) -> torch.Tensor:
        y = self.a(x).tanh() * torch.bernoulli(torch.full(x.shape, 0.5), generator=self.own)
        y = F.dropout(y + torch.rand(x.shape, generator=generator), 0.3)
        if also is not None:
            y = y + torch.randn(x.shape, generator=also["generator"])
        return self.b(y * torch.rand(x.shape, generator=self.own)).tanh()


@since_213
@pytest.mark.parametrize("same", [True, False])
def test_several_generators(same: bool) -> None:
    torch.manual_seed(0)
    model = _Draws()

    def example() -> Any:
        given = torch.Generator().manual_seed(5)
        return (x(16, 8), given, {"generator": given if same else torch.Generator().manual_seed(6)})

    before = model.own.get_state()
    assert_trains_the_same(model, example)
    assert torch.equal(model.own.get_state(), before)  # planning draws nothing
    plan = gcsolve.solve(model, example(), budget="1MB")
    states = []
    for module in (copy.deepcopy(model), plan.module):
        args = example()
        for _ in range(2):
            total(module(*args)).backward()
        states.append([module.own.get_state(), args[1].get_state(), args[2]["generator"].get_state()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert len(plan.module._gcsolve.cache) == 1  # another generator is no reason to plan again


@since_213
def test_draws_from_a_generator_that_is_given_are_replayed_too() -> None:
    """From its state at the first draw; the generator itself draws once. `poisson` takes it as a positional argument."""
    torch.manual_seed(0)

    def step(m: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(m.a(x)) * torch.bernoulli(torch.full_like(x, 0.7), generator=generator)
            x = torch.tanh(m.b(x) * torch.poisson(torch.full_like(x, 3.0), generator=generator))
        return x

    model = Of(step, **_two())
    left: list[dict[str, Any]] = []
    module = model
    for module in (copy.deepcopy(model), gcsolve.solve(model, _given(), budget="1GB", solver=KeepNothing()).module):
        example = _given()
        left.append(train(module, example) | {"given": example[1].get_state()})
    assert_same(*left)
    assert "generator_at" in module.code


def _given() -> tuple[torch.Tensor, torch.Generator]:
    return x(16, 8), torch.Generator().manual_seed(5)


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
        r"draws from numpy\.random \(rand\) at .*test_exact_effects\.py",
    ),
    "python": (
        lambda m, x: m.a(x) * random.randint(1, 3),
        r"draws from random \(randint\) at .*test_exact_effects\.py",
    ),
    "numpy by name": (
        lambda m, x: m.a(x) * normal(),
        r"draws from numpy\.random \(normal\) at .*test_exact_effects\.py",
    ),
    "python by name": (lambda m, x: m.a(x) * uniform(0, 1), r"draws from random \(uniform\) at .*test_exact_effects"),
    "bound elsewhere": (lambda m, x: m.a(x) * _BOUND[0](), r"draws from numpy\.random \(layer drop"),
    "seeding numpy": (lambda m, x: m.a(x) * (numpy.random.seed(0) or 1), r"draws from numpy\.random \(seed\) at"),
    "numpy generator": (lambda m, x: m.a(x) * float(_Elsewhere.numpy.random()), r"run twice .*test_exact_effects\.py"),
    "python generator": (lambda m, x: m.a(x) * _Elsewhere.python.random(), r"run twice .*test_exact_effects\.py"),
    "array": (lambda m, x: m.a(x) * torch.from_numpy(_Elsewhere.numpy.random(8)).float(), r"run twice"),
    "counter": (_counts, r"run twice .*test_exact_effects\.py"),
    "seeding": (_seeds, r"torch\.manual_seed at .*test_exact_effects\.py"),
    "forking": (_forks, r"torch\.(manual_seed|set_rng_state) at .*test_exact_effects\.py"),
    "generator of a class": (lambda m, x: m.a(x) * torch.rand(8, generator=_Elsewhere.torch), r"torch\.Generator"),
    "module of nobody": (
        lambda m, x: _MODULE(m.a(x)),
        r"a tensor from outside the model .* at .*test_exact_effects\.py",
    ),
    "module in a list": (
        lambda m, x: m.parts[0](m.a(x)),
        r"parts\[0\]\.weight .* at .*test_exact_effects\.py.*Register it",
    ),
    "vmap": (lambda m, x: torch.vmap(lambda row: m.a(row) * row.sum())(x), r"uses torch\.vmap.*batched ops"),
    "func.grad": (
        lambda m, x: m.a(torch.func.grad(lambda y: m.a(y).sum())(x)),
        r"torch\.func \(grad, jvp\) at .*test_exact_effects\.py.*torch\.autograd\.grad",
    ),
    "ctc_loss": (
        lambda m, x: F.ctc_loss(m.a(x[:, None]), torch.ones(1, 2).long(), (4,), (2,)),
        r"ctc_loss at .*test_exact_effects\.py.*the loss of the planned module's output",
    ),
    "packed sequence": (
        lambda m, x: nn.utils.rnn.pack_padded_sequence(m.a(x)[:, None], [4]).data,
        r"packed sequence at .*test_exact_effects\.py.*Pad and mask",
    ),
    "compiled function": (lambda m, x: m.compiled(m.a(x)), r"compiled with torch\.compile.*uncompiled"),
    "lazy module": (lambda m, x: m.lazy(m.a(x)), "lazy.weight has no shape yet .*call the model once"),
    "sparse gradient": (lambda m, x: F.embedding(torch.arange(4), m.a.weight, sparse=True), "sparse=False"),
    "covariance": (lambda m, x: torch.cov(m.a(x)), r"at .*test_ex.*, or calls an op there that does so itself"),
    "least squares": (
        lambda m, x: torch.linalg.lstsq(m.a(x), x).solution,
        r"as large as its values say at .*test_ex.*outside",
    ),
    "randint_like": (lambda m, x: torch.randint_like(m.a(x), 1, 5) * m.a(x), r"randint_like of .*x\.detach"),
    "host branch": (
        lambda m, x: m.a(x) if torch.rand(1).item() < 0.5 else x,
        r"branches on a tensor's value at .*test_ex",
    ),
}


@pytest.mark.filterwarnings("ignore:Raw SymInt")  # torch 2.14's, before it raises
@pytest.mark.parametrize(
    "resized", [lambda y, n: F.interpolate(y[None, None], size=(n, n), mode="bilinear"), lambda y, n: F.pad(y, (0, n))]
)
def test_a_size_that_values_tell_is_refused_in_words(resized: Callable[..., torch.Tensor]) -> None:
    model = Of(lambda m, x: resized(m.a(x), x.argmax().item()), a=nn.Linear(8, 8))
    with pytest.raises(TraceError, match=r"makes a number or a shape of a tensor's values .*at .*test_exact_effects"):
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


# --- effects ---------------------------------------------------------------------------------------------------------


def _convolutions(**norm: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, **norm),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, **norm),
    )


def _moving_codebook(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    with torch.no_grad():
        best = torch.cdist(y, m.codes).argmin(1)
        chosen = F.one_hot(best, 5).float()
        quantized = m.codes[best]
        m.uses.lerp_(chosen.sum(0), 0.1)
        m.codes.copy_(m.codes * 0.9 + 0.1 * (chosen.t() @ y) / (m.uses[:, None] + 1e-3))
    return torch.tanh(m.b(y + (quantized - y).detach()))


def _codebook() -> nn.Module:
    made = Of(_moving_codebook, **_two())
    made.register_buffer("codes", torch.randn(5, 8))
    made.register_buffer("uses", torch.zeros(5))
    return made


def _replacing(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    m.average = m.average * 0.9 + y.detach().mean(0) * 0.1
    return torch.tanh(m.b(y - m.average))


def _recurring(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x) * m.average.sin())  # backward reads what the buffer held
    m.average = y.detach()[0]
    return m.b(y)


def _swapping(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x) * m.average + m.other)
    m.average, m.other = m.other, m.average
    return m.b(y)


def _swapped() -> nn.Module:
    made = _with_buffer(_swapping)
    made.register_buffer("other", torch.ones(8))
    return made


def _with_buffer(function: Callable[..., Any]) -> nn.Module:
    made = Of(function, **_two())
    made.register_buffer("average", torch.zeros(8))
    return made


def _counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps.add_(1)
    return torch.tanh(m.b(m.a(x).tanh() + m.steps))


EFFECTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "momentum=None": lambda: (_convolutions(momentum=None), x(4, 4, 8, 8)),
    "no running statistics": lambda: (_convolutions(track_running_stats=False), x(4, 4, 8, 8)),
    "SyncBatchNorm": lambda: (nn.SyncBatchNorm.convert_sync_batchnorm(_convolutions()), x(4, 4, 8, 8)),
    "one norm three times": lambda: (
        Of(
            lambda m, x: m.n(m.n(m.n(m.a(x)).tanh()).tanh()).tanh(),
            n=nn.BatchNorm1d(8, momentum=None),
            a=nn.Linear(8, 8),
        ),
        x(16, 8),
    ),
    "moving codebook": lambda: (_codebook(), x(16, 8)),
    "buffer replaced": lambda: (_with_buffer(_replacing), x(16, 8)),
    "buffer read and replaced": lambda: (_with_buffer(_recurring), x(16, 8)),
    "buffers swapped": lambda: (_swapped(), x(16, 8)),
    "attribute changed in place": lambda: (Of(_counting, **_two(), steps=torch.zeros(8)), x(16, 8)),
    "spectral norm": lambda: (
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)),
        x(16, 8),
    ),
    "weight norm": lambda: (nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()), x(16, 8)),
    "spectral norm by hooks": lambda: (
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)),
        x(16, 8),
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_once(name: str) -> None:
    torch.manual_seed(0)
    model, example = EFFECTS[name]()
    assert_trains_the_same(model, example)
    expected = train(copy.deepcopy(model), example)
    assert_same(expected, train(gcsolve.solve(model, example, budget="1GB", solver=KeepNothing()).module, example))


def _weight_norm_by_hooks() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(8, 8))


def _pruned() -> nn.Module:
    made = nn.Linear(8, 8)
    prune.l1_unstructured(made, "weight", 0.3)
    return made


@pytest.mark.parametrize("part", [_weight_norm_by_hooks, _pruned])
@pytest.mark.parametrize("whole", [True, False])
def test_hooks_of_torch_itself_that_make_a_weight(part: Callable[[], nn.Module], whole: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return part() if whole else nn.Sequential(part(), nn.Tanh(), nn.Linear(8, 8))

    assert_built_trains_the_same(build, x(16, 8))
    with pytest.raises(gcsolve.ArgumentError, match="verify trains a copy"):
        gcsolve.solve(build(), x(16, 8), budget="1MB").verify(steps=1)


def test_batch_norm_under_no_grad_in_training_mode_counts_too() -> None:
    torch.manual_seed(0)
    model, example = _convolutions(), x(4, 4, 8, 8)
    plan = gcsolve.solve(copy.deepcopy(model), example, budget="1MB")
    for module in (model, plan.module):
        with torch.no_grad():
            module(example)
        total(module(example)).backward()
        with torch.inference_mode():
            module(example)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plan.module.buffers(), strict=True))
    assert int(model[1].num_batches_tracked) == 3


def _leaving(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    m.last = y.detach()
    m.penalty = y.square().mean()
    return torch.tanh(m.b(y))


def test_tensors_stored_on_modules_are_those_of_this_step_and_carry_gradients() -> None:
    """The auxiliary loss of a mixture of experts, say, which the training loop collects from the modules."""
    torch.manual_seed(0)
    model, example = nn.Sequential(Of(_leaving, **_two(), last=None), nn.Linear(8, 8)), x(16, 8)
    plan = gcsolve.solve(copy.deepcopy(model), example, budget="1MB")
    left: list[list[torch.Tensor]] = []
    for module in (model, plan.module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = total(module(example)) + module[0].penalty
            loss.backward()
            optimizer.step()
        left.append([module[0].last, module[0].penalty.detach(), *(p.detach() for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    assert len(set(map(id, plan.module._gcsolve.cache.values()))) == 1  # filled attributes are no reason to plan again


def test_attributes_that_forward_reads_once_they_are_filled_are_planned_for() -> None:
    torch.manual_seed(0)

    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.a(x)) if m.state is None else torch.tanh(m.a(x) + m.state)
        m.state, m.unread = y.detach(), y.sum().detach()
        return m.b(y)

    model, example = Of(step, **_two(), state=None), x(16, 8)
    plan = gcsolve.solve(model, example, budget="1MB")
    assert_same(train(copy.deepcopy(model), example), train(plan.module, example))
    assert len(set(map(id, plan.module._gcsolve.cache.values()))) == 2
    model.state = None
    expected = copy.deepcopy(model)(example)
    assert torch.equal(plan.module(example), expected)
    assert torch.equal(model.state, torch.tanh(model.a(example)))


def test_a_gradient_at_a_stored_tensor_that_is_no_scalar_has_to_be_asked_for() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.hidden = torch.tanh(m.a(x))
        return m.b(m.hidden)

    plan = gcsolve.solve(Of(step, **_two(), hidden=None), x(4, 8), budget="1MB")
    plan.module(x(4, 8))
    with pytest.raises(gcsolve.CallError, match=r"attribute\['hidden'\].*backward_from='all'"):
        plan.module.hidden.sum().backward()
    plan = gcsolve.solve(Of(step, **_two(), hidden=None), x(4, 8), budget="1MB", backward_from="all")
    plan.module(x(4, 8))
    plan.module.hidden.sum().backward()
    assert plan.module.a.weight.grad.any()


def test_a_state_that_forward_reads_and_replaces() -> None:
    torch.manual_seed(0)

    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(m.a(x) + m.state)
        m.state = state.detach()
        return m.b(state)

    model, example = Of(step, **_two(), state=torch.zeros(16, 8)), x(16, 8)
    assert_trains_the_same(model, example)
    plan = gcsolve.solve(model, example, budget="1MB")
    plan.module(example)
    model.state = torch.ones(16, 8)  # what is set between steps is seen
    expected = copy.deepcopy(model)(example)
    assert torch.equal(plan.module(example), expected)


def test_a_buffer_that_is_nothing_yet_or_of_another_shape_afterwards() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.a(x))
        m.seen = y.detach() * 2
        m.average = torch.cat([m.average, m.average])
        return m.b(y) * m.average.mean()

    torch.manual_seed(0)
    model, example = _with_buffer(step), x(16, 8)
    model.register_buffer("seen", None)
    model.average += 1
    planned = gcsolve.solve(copy.deepcopy(model), example, budget="1MB").module
    assert planned.seen is None
    assert_same(train(model, example), train(planned, example))
    assert planned.average.shape == (64,)


@since_213  # takes a torch.Generator
def test_verify_gives_each_model_its_own_inputs() -> None:
    """A tensor that forward changes, a dict that it fills, and a generator that it draws from."""

    def step(m: Any, x: torch.Tensor, seen: torch.Tensor, kept: dict[str, Any], source: torch.Generator) -> Any:
        seen.add_(1)
        kept["y"] = torch.tanh(m.a(x) * seen.clone())
        return m.b(kept["y"] * torch.rand(x.shape, generator=source))

    torch.manual_seed(0)
    leaf = x(16, 8).requires_grad_()
    example = (leaf * 2, torch.zeros(16, 8), {"y": None}, torch.Generator().manual_seed(3))
    plan = gcsolve.solve(Of(step, **_two()), example, budget="1MB")
    assert plan.verify(steps=2, repeats=0).differences == ()
    assert not example[1].any()
    assert example[2] == {"y": None}


def test_the_peak_counts_tensors_that_hang_on_modules() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.average = m.average * 0.9
        return m.b(torch.tanh(m.a(x)) * m.table.mean()) + m.average

    torch.manual_seed(0)
    model = Of(step, **_two(), table=torch.ones(4096))
    model.register_buffer("average", torch.ones(4096, 8))
    report = gcsolve.solve(model, x(4096, 8), budget=1.0).verify(steps=1, repeats=0)
    assert report.ok
    assert abs(report.prediction_error) < 0.02


def _once(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.ready is None:
        m.ready, m.config.kind = 2.0, "late"
    return m.a(x).tanh() * m.ready


class _Config:
    kind: str | None = None

    def __init__(self) -> None:
        self.kind = None


def test_what_hangs_on_a_module_is_read_as_it_is_then() -> None:
    """Tensors in lists and in objects, and what objects with slots hold, changed between two steps."""

    class Slots:
        __slots__ = ("factor", "offset")

    torch.manual_seed(0)
    model, example = (
        Of(lambda m, x: m.a(x).tanh() * m.kept[0] * m.held.factor + m.held.offset, a=nn.Linear(8, 8)),
        x(4, 8),
    )
    model.kept, model.held = [torch.ones(8)], Slots()
    model.held.factor, model.held.offset = 2.0, torch.zeros(8)
    planned = gcsolve.solve(model, example, budget="1MB").module
    changes: list[Callable[[], Any]] = [
        lambda: model.kept[0].mul_(2),
        lambda: setattr(model.held, "factor", 3.0),
        lambda: model.held.offset.add_(1),
    ]
    for change in changes:
        change()
        assert torch.equal(planned(example), model(example))


def test_inference_mode_inside_is_no_grad() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            kept = torch.tanh(m.a(x))
        return torch.tanh(m.b(x) * kept.clone())

    torch.manual_seed(0)
    model, example = Of(step, **_two()), x(4, 8)
    expected = train(copy.deepcopy(model), example)
    assert_same(expected, train(gcsolve.solve(model, example, budget="1MB").module, example))
    assert model.a.weight.grad is None


def test_a_setting_that_the_first_call_makes() -> None:
    """Hugging Face's classifiers write the kind of problem into their config."""
    torch.manual_seed(0)
    model, example = Of(_once, a=nn.Linear(8, 8), ready=None, config=_Config()), x(4, 8)
    plan = gcsolve.solve(model, example, budget="1MB")
    assert (model.ready, model.config.kind) == (None, None)
    expected = train(copy.deepcopy(model), example)
    assert_same(expected, train(plan.module, example))
    assert (model.ready, model.config.kind) == (2.0, "late")
    assert len(plan.module._gcsolve.cache) == 1


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
    "counter": (lambda: Of(_counter, **_two(), calls=0), r"the attribute calls of Of \(from 1 to 2\)"),
    "list": (lambda: Of(_list, **_two(), seen=[]), r"the attribute seen of Of \(a list, in place\)"),
    "object": (lambda: Of(_object, **_two(), config=_Config()), r"the attribute config\.kind of Of \(from 1 to 2\)"),
    "in a submodule": (lambda: nn.Sequential(Of(_counter, **_two(), calls=0)), r"the attribute 0\.calls of Of"),
    "tensor in a list": (
        lambda: Of(_listed, **_two(), seen=[torch.zeros(8)]),
        r"in place that a planned step cannot follow",
    ),
    "parameter": (lambda: Of(_parameter, **_two()), r"replaces the parameter a\.weight"),
    "buffer that needs a gradient": (lambda: _with_buffer(_attached), r"replaces the buffer average .* detach that"),
}


@pytest.mark.parametrize("name", STATE)
def test_state_that_a_planned_step_would_not_change_is_refused_by_name(name: str) -> None:
    build, message = STATE[name]
    model = build()
    with pytest.raises(TraceError, match=message):
        gcsolve.solve(model, x(4, 8), budget=1.0)
    assert all(not isinstance(v, list) or v in ([], [v[0] if v else 0]) for v in vars(model).values())
    assert getattr(model, "calls", 0) == 0


# --- arguments that the model changes ---------------------------------------------------------------------------------


class _Remembers(nn.Module):
    """Puts results into the dict it is given, takes work from a list, counts in an object, and hands the dict back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, memory: dict[str, Any], work: list[torch.Tensor], config: _Config) -> dict[str, Any]:
        y = torch.tanh(self.a(work.pop()))
        memory["hidden"] = y
        memory.setdefault("all", []).append(y.detach())
        memory.pop("old", None)
        config.kind = "used"
        memory["loss"] = self.b(y).square().mean()
        return memory


def _memory() -> Any:
    return ({"old": x(2)}, [x(1, 8), x(16, 8)], _Config())


def test_arguments_that_the_model_changes_are_changed_in_place() -> None:
    torch.manual_seed(0)
    model = _Remembers()
    given = _memory()
    plan = gcsolve.solve(model, given, budget="1MB")
    assert list(given[0]) == ["old"]
    assert len(given[1]) == 2
    assert given[2].kind is None  # planning changes nothing
    expected, found = _memory(), _memory()
    copied = copy.deepcopy(model)
    outputs = copied(*expected), plan.module(*found)
    assert outputs[1] is found[0]
    assert list(found[0]) == list(expected[0]) == ["hidden", "all", "loss"]
    assert torch.equal(found[0]["hidden"], expected[0]["hidden"])
    assert torch.equal(found[0]["all"][0], expected[0]["all"][0])
    assert (len(found[1]), found[2].kind) == (1, "used")
    for output in outputs:
        output["loss"].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(copied.parameters(), model.parameters(), strict=True))
    plan.module({}, [x(16, 8)], _Config())


def test_a_cache_object_as_argument() -> None:
    """transformers' DynamicCache, empty and filled: it holds the new keys and values afterwards, as after eager."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.arange(8)[None]

    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.forward).parameters)

    def run(module: nn.Module, cache: Any) -> list[torch.Tensor]:
        left = []
        for _ in range(2):
            output = module(**{"input_ids": tokens, name: cache, "use_cache": True, "labels": tokens})
            assert output[name] is cache
            output.loss.backward()
            left += [output.loss.detach(), output.logits.detach()]
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
                left += [layer.keys, layer.values]
        return [*left, *(p.grad for p in module.parameters())]

    plan = gcsolve.solve(
        copy.deepcopy(model),
        {
            "input_ids": tokens,
            name: transformers.DynamicCache(config=config),
            "use_cache": True,
            "labels": tokens,
        },
        budget="10MB",
        backward_from="all",
    )
    expected = run(model, transformers.DynamicCache(config=config))
    found = run(plan.module, transformers.DynamicCache(config=config))
    assert expected[-1] is not None
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_hooks_on_every_module_are_refused() -> None:
    model = models.MLP()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(TraceError, match="hooks for all modules"):
            gcsolve.solve(model, x(8, 32), budget="1MB")
    finally:
        handle.remove()
    call(gcsolve.solve(model, x(8, 32), budget="1MB").module, x(8, 32))


def test_torchs_flop_counter_counts_a_planned_step() -> None:
    model = models.MLP()
    inputs = x(64, 32)
    flops = []
    for module in (model, gcsolve.solve(model, inputs, solver="store_all", budget=1.0).module):
        with FlopCounterMode(display=False) as counter:
            module(inputs).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


class _InSeveralPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.again = self.first
        self.part = self.first[0]
        self.by_name = nn.ModuleDict({"first": self.first})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.again(self.first(self.by_name["first"](x))))


def test_a_module_may_be_registered_in_several_places() -> None:
    torch.manual_seed(0)
    assert_trains_the_same(_InSeveralPlaces(), torch.randn(4, 8))


class _FromADict(nn.Module):
    """Tensors that no module knows of, read through several views, as peft's FourierFT keeps its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(8, 8), nn.Parameter(torch.randn(5))
        self.held = {"at": torch.tensor([[0, 1, 2, 3, 4], [7, 6, 5, 4, 3]]), "scale": torch.randn(2, 64, 8)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at, (scale, shift) = self.held["at"], self.held["scale"].unbind(0)
        weight = torch.zeros(8, 8)
        weight[at[0], at[1]] = self.values
        return (self.linear(x) * scale).sin() @ weight * self.held["scale"][1] + shift


def test_views_of_a_tensor_that_no_module_knows_of() -> None:
    torch.manual_seed(0)
    for plan in assert_trains_the_same(_FromADict(), torch.randn(64, 8)):
        report = plan.verify(steps=1, repeats=0)
        assert report.ok
        assert abs(report.prediction_error) < 0.01
