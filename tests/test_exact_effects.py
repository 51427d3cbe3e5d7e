"""Effects happen once: buffers and attributes end as the untouched model's, at every budget, and are read as they are then."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import gcsolve
from tests.training import (
    Config,
    KeepNothing,
    Of,
    assert_built_trains_the_same,
    assert_same,
    assert_trains_the_same,
    total,
    train,
    two_layers,
    with_buffer,
    x,
)

# --- buffers ------------------------------------------------------------------------------------------------------------


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
    made = Of(_moving_codebook, **two_layers())
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
    made = with_buffer(_swapping)
    made.register_buffer("other", torch.ones(8))
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
    "buffer replaced": lambda: (with_buffer(_replacing), x(16, 8)),
    "buffer read and replaced": lambda: (with_buffer(_recurring), x(16, 8)),
    "buffers swapped": lambda: (_swapped(), x(16, 8)),
    "attribute changed in place": lambda: (Of(_counting, **two_layers(), steps=torch.zeros(8)), x(16, 8)),
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


def test_a_buffer_that_is_nothing_yet_or_of_another_shape_afterwards() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.a(x))
        m.seen = y.detach() * 2
        m.average = torch.cat([m.average, m.average])
        return m.b(y) * m.average.mean()

    torch.manual_seed(0)
    model, example = with_buffer(step), x(16, 8)
    model.register_buffer("seen", None)
    model.average += 1
    planned = gcsolve.solve(copy.deepcopy(model), example, budget="1MB").module
    assert planned.seen is None
    assert_same(train(model, example), train(planned, example))
    assert planned.average.shape == (64,)


# --- attributes ---------------------------------------------------------------------------------------------------------


def _leaving(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.a(x))
    m.last = y.detach()
    m.penalty = y.square().mean()
    return torch.tanh(m.b(y))


def test_tensors_stored_on_modules_are_those_of_this_step_and_carry_gradients() -> None:
    """The auxiliary loss of a mixture of experts, say, which the training loop collects from the modules."""
    torch.manual_seed(0)
    model, example = nn.Sequential(Of(_leaving, **two_layers(), last=None), nn.Linear(8, 8)), x(16, 8)
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

    model, example = Of(step, **two_layers(), state=None), x(16, 8)
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

    plan = gcsolve.solve(Of(step, **two_layers(), hidden=None), x(4, 8), budget="1MB")
    plan.module(x(4, 8))
    with pytest.raises(gcsolve.CallError, match=r"attribute\['hidden'\].*backward_from='all'"):
        plan.module.hidden.sum().backward()
    plan = gcsolve.solve(Of(step, **two_layers(), hidden=None), x(4, 8), budget="1MB", backward_from="all")
    plan.module(x(4, 8))
    plan.module.hidden.sum().backward()
    assert plan.module.a.weight.grad.any()


def test_a_state_that_forward_reads_and_replaces() -> None:
    torch.manual_seed(0)

    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(m.a(x) + m.state)
        m.state = state.detach()
        return m.b(state)

    model, example = Of(step, **two_layers(), state=torch.zeros(16, 8)), x(16, 8)
    assert_trains_the_same(model, example)
    plan = gcsolve.solve(model, example, budget="1MB")
    plan.module(example)
    model.state = torch.ones(16, 8)  # what is set between steps is seen
    expected = copy.deepcopy(model)(example)
    assert torch.equal(plan.module(example), expected)


def test_the_peak_counts_tensors_that_hang_on_modules() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.average = m.average * 0.9
        return m.b(torch.tanh(m.a(x)) * m.table.mean()) + m.average

    torch.manual_seed(0)
    model = Of(step, **two_layers(), table=torch.ones(4096))
    model.register_buffer("average", torch.ones(4096, 8))
    report = gcsolve.solve(model, x(4096, 8), budget=1.0).verify(steps=1, repeats=0)
    assert report.ok
    assert abs(report.prediction_error) < 0.02


def _once(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.ready is None:
        m.ready, m.config.kind = 2.0, "late"
    return m.a(x).tanh() * m.ready


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


def test_a_setting_that_the_first_call_makes() -> None:
    """Hugging Face's classifiers write the kind of problem into their config."""
    torch.manual_seed(0)
    model, example = Of(_once, a=nn.Linear(8, 8), ready=None, config=Config()), x(4, 8)
    plan = gcsolve.solve(model, example, budget="1MB")
    assert (model.ready, model.config.kind) == (None, None)
    expected = train(copy.deepcopy(model), example)
    assert_same(expected, train(plan.module, example))
    assert (model.ready, model.config.kind) == (2.0, "late")
    assert len(plan.module._gcsolve.cache) == 1


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
