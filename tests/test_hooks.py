"""Forward hooks of submodules: what they compute is traced with forward, what they change elsewhere is refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gcsolve
from gcsolve.errors import TraceError
from tests import models
from tests.training import assert_same, assert_trains_the_same, train, x


def _scaled(_m: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5 + output.detach().mean()


def _dropped(_m: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (torch.dropout(args[0], 0.2, True),)


def _stored(m: Any, _args: Any, output: torch.Tensor) -> None:
    m.seen = output.detach().abs().max()


class _WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.MLP(3, 16)
        self.inner.layers[1].register_forward_hook(self.keep)

    def keep(self, _m: Any, _args: Any, output: torch.Tensor) -> None:
        self.features = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.features.square().mean()


def _hooked(pre: bool, hook: Callable[..., Any]) -> nn.Module:
    model = models.MLP(3, 16)
    layer = model.layers[1]
    layer.register_forward_pre_hook(hook) if pre else layer.register_forward_hook(hook)
    return model


COMPUTING: dict[str, Callable[[], nn.Module]] = {
    "edits the output": lambda: _hooked(False, _scaled),
    "edits the input, at random": lambda: _hooked(True, _dropped),
    "stores a tensor on its module": lambda: _hooked(False, _stored),
    "a method of the model": _WithMethod,
}


@pytest.mark.parametrize("name", COMPUTING)
def test_a_hook_that_computes_is_part_of_forward(name: str) -> None:
    torch.manual_seed(0)
    assert_trains_the_same(COMPUTING[name](), x(8, 16))


def test_what_a_hook_stores_on_its_module_is_that_of_this_step() -> None:
    model = _hooked(False, _stored)
    plan = gcsolve.solve(model, x(8, 16), budget=1.0)
    other = copy.deepcopy(model)
    for module in (plan.module, other):
        module(x(8, 16) * 3)
    assert torch.equal(model.layers[1].seen, other.layers[1].seen)


class _Recorder:
    def __init__(self) -> None:
        self.calls = 0
        self.by_kind: Counter[str] = Counter()

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def count(self, module: nn.Module, *_: Any) -> None:
        self.by_kind[type(module).__name__] += 1


_SEEN: list[Any] = []
_COUNT = 0


def _global(*_: Any) -> None:
    global _COUNT
    _COUNT += 1


def _appends(_m: Any, _args: Any, output: torch.Tensor) -> None:
    _note(output)


def _note(output: torch.Tensor) -> None:
    _SEEN.append(output.detach())


def _nonlocal() -> Callable[..., None]:
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1

    return hook


def _other_module() -> Callable[..., None]:
    elsewhere = nn.Module()

    def hook(_m: Any, _args: Any, output: torch.Tensor) -> None:
        elsewhere.seen = output

    return hook


CHANGING: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "a list, through a function": (
        lambda: _appends,
        r"_appends \(tests/test_hooks\.py:\d+\) of submodule layers\.1 changes _SEEN",
    ),
    "a global": (lambda: _global, "changes _COUNT"),
    "a variable around it": (_nonlocal, "changes calls"),
    "an object that is called": (_Recorder, "changes its _Recorder"),
    "an object whose method it is": (lambda: _Recorder().count, "changes its _Recorder"),
    "a module elsewhere": (_other_module, "changes elsewhere"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_hook_that_changes_something_elsewhere_is_refused_by_name(name: str) -> None:
    made, text = CHANGING[name]
    hook = made()
    with pytest.raises(TraceError, match=rf"the forward hook .*{text}, and a planned step would not"):
        gcsolve.solve(_hooked(False, hook), x(8, 16), budget=1.0)
    assert (_SEEN, _COUNT) == ([], 0)  # put back
    for held in (hook, getattr(hook, "__self__", None)):
        if isinstance(held, _Recorder):
            assert (held.calls, held.by_kind) == (0, {})


def test_another_hook_or_one_that_reads_another_value_is_planned_again() -> None:
    settings = {"scale": 0.5}

    def scaled(_m: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * settings["scale"]

    torch.manual_seed(0)
    model = models.MLP(3, 16)
    plan = gcsolve.solve(model, x(8, 16), budget="1MB")
    for change in (
        lambda: model.layers[1].register_forward_hook(scaled),
        lambda: settings.update(scale=0.25),
        lambda: model.layers[0].register_forward_hook(_scaled),
    ):
        change()
        assert_same(train(copy.deepcopy(model), x(8, 16)), train(copy.deepcopy(plan.module), x(8, 16)))
    assert len(plan.module._gcsolve.cache) == 4  # type: ignore[union-attr]


def test_a_hook_of_the_model_that_makes_its_weight_is_refused_and_wrapped_works() -> None:
    """Legacy spectral_norm; in a submodule it is traced as part of forward."""
    model, x = nn.utils.spectral_norm(nn.Linear(8, 8)), torch.randn(64, 8)
    with pytest.raises(TraceError, match=r"parametrizations\.spectral_norm, or plan torch\.nn\.Sequential\(model\)"):
        gcsolve.solve(model, x, budget=1.0)
    plan = gcsolve.solve(nn.Sequential(model), x, budget=1.0)
    assert not plan.verify(steps=3, repeats=0).differences


def _scale(module: nn.Module, factor: float) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * factor)


class _SetUpInItsFirstCall(nn.Module):
    """As Hugging Face's models are when hidden states or router logits are asked for."""

    ready = False

    def __init__(self, set_up: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner, self.set_up = models.MLP(3, 16), set_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready = True
            self.set_up(self)
        return self.inner(x)


def _scales(model: Any) -> None:
    for layer in model.inner.layers:
        _scale(layer, 0.9)
        _scale(layer, 1.2)


def test_hooks_that_the_first_call_registers_are_there_afterwards() -> None:
    torch.manual_seed(0)
    model = _SetUpInItsFirstCall(_scales)
    untouched = copy.deepcopy(model)
    plan = gcsolve.solve(model, x(8, 16), budget=1.0)
    assert not any(module._forward_hooks for module in model.modules())  # planning is no call
    assert_same(train(untouched, x(8, 16)), train(plan.module, x(8, 16)))
    assert len(plan.module._gcsolve.cache) == 1  # type: ignore[union-attr]
    for planned, eager in zip(model.modules(), untouched.modules(), strict=True):
        assert len(planned._forward_hooks) == len(eager._forward_hooks)
    assert torch.equal(model(x(8, 16)), untouched(x(8, 16)))
    assert plan.verify(repeats=0).ok


def test_hooks_that_a_call_of_the_model_has_registered_are_not_doubled() -> None:
    model = _SetUpInItsFirstCall(_scales)
    plan = gcsolve.solve(model, x(8, 16), budget=1.0)
    model(x(8, 16))
    registered = [list(module._forward_hooks) for module in model.modules()]
    plan.module(x(8, 16)).sum().backward()
    assert [list(module._forward_hooks) for module in model.modules()] == registered


@pytest.mark.parametrize(
    ("set_up", "text"),
    [
        (lambda m: m.inner.register_forward_hook(lambda *_: m.train()), "the hooks of submodule inner"),
        (lambda m: m.inner.register_full_backward_hook(lambda *_: None), "the hooks of submodule inner"),
        (lambda m: setattr(m, "inner", nn.Linear(16, 16)), "the submodule inner .*from MLP to Linear"),
    ],
)
def test_what_else_a_first_call_sets_up_is_refused(set_up: Any, text: str) -> None:
    model = _SetUpInItsFirstCall(set_up)
    with pytest.raises(TraceError, match=f"{text}.*call the model once before planning"):
        gcsolve.solve(model, x(8, 16), budget=1.0)
