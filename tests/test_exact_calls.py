"""Calls of a planned module: arguments and outputs of any type, flags, shapes and settings that change, eval and no_grad."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gcsolve
from tests import models
from tests.training import Config, Of, assert_trains_the_same, call, since_213, total, two_layers
from tests.training import x as _x


def test_nested_arguments_and_outputs_keep_their_types() -> None:
    torch.manual_seed(0)
    model = models.Nested()
    example = {"x": _x(5, 8).requires_grad_(), "mask": torch.ones(5, 8), "flip": True, "scale": 0.5}
    plan = gcsolve.solve(model, example, budget=1.0)
    output, expected = plan.module(**example), model(**example)
    assert type(output) is models.Output
    assert output.missing is None
    assert output.note == "note"
    assert output.extra["x"] is example["x"]
    assert output.extra["mask"] is example["mask"]
    assert output.extra["best"].dtype == torch.int64
    assert not output.extra["best"].requires_grad
    assert torch.equal(output.main, expected.main)
    assert torch.equal(output.extra["pair"][1], expected.extra["pair"][1])
    total(output).backward()
    grads, example["x"].grad = [p.grad for p in model.parameters()], None
    model.zero_grad()
    total(expected).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


def test_a_changed_flag_or_shape_is_planned_again_never_baked_in() -> None:
    torch.manual_seed(0)
    model = models.Nested()
    plan = gcsolve.solve(model, {"x": _x(5, 8)}, budget="1MB")
    for changed in ({"x": _x(5, 8), "flip": True}, {"x": _x(5, 8), "scale": 2.0}, {"x": _x(7, 8)}):
        assert torch.equal(plan.module(**changed).main, model(**changed).main)
    assert len(plan.module._gcsolve.cache) == 4
    plan.module(x=_x(7, 8))
    assert len(plan.module._gcsolve.cache) == 4


def test_eval_and_no_grad_run_the_original_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    plan = gcsolve.solve(model, _x(4, 4, 8, 8), budget=1.0)
    other = _x(2, 4, 6, 6)
    plan.module.eval()
    assert not model.training
    assert torch.equal(plan.module(other), model(other))
    plan.module.train()
    with torch.no_grad():
        assert plan.module(other).grad_fn is None
    assert len(plan.module._gcsolve.cache) == 1


def test_the_planned_module_is_the_model_in_all_but_its_forward() -> None:
    model = models.Tied()
    plan = gcsolve.solve(model, torch.arange(12).view(3, 4), budget=1.0)
    assert isinstance(plan.module, models.Tied)
    assert plan.module.embed.weight is model.embed.weight
    assert list(plan.module.state_dict()) == list(model.state_dict())
    model.note = "set later"
    assert plan.module.note == "set later"
    clone = copy.deepcopy(plan.module)
    assert clone.embed.weight is not model.embed.weight
    assert torch.equal(clone(torch.arange(12).view(3, 4)), model(torch.arange(12).view(3, 4)))
    assert "aten.embedding.default" in plan.module.code


def test_loss_traced_with_the_model() -> None:
    torch.manual_seed(0)
    model, x = models.MLP(3, 16), _x(8, 16)
    plain = copy.deepcopy(model)
    plan = gcsolve.solve(model, x, budget=1.0, loss=lambda y: y.square().mean())
    value = plan.module(x)
    value.backward()
    expected = plain(x).square().mean()
    expected.backward()
    assert torch.equal(value, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_hooks_on_the_model_run_once_a_call() -> None:
    model, x = models.MLP(2, 8), _x(8, 8)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plan = gcsolve.solve(model, x, budget=1.0)
    assert calls == []
    call(plan.module, x)
    assert calls == [1]


def test_a_setting_changed_after_planning_is_planned_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Dropout(0.1))
    plan, x = gcsolve.solve(model, _x(16, 8), budget="1MB"), _x(16, 8)
    plain = copy.deepcopy(model)
    for change in (
        lambda m: setattr(m[3], "p", 0.9),
        lambda m: setattr(m[2], "eps", 0.1),
        lambda m: setattr(m[1], "approximate", "tanh"),
        lambda m: m.__setitem__(1, nn.ReLU()),
    ):
        for m in (plain, model):
            change(m)
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        assert torch.equal(plan.module(x), expected)
    assert len(plan.module._gcsolve.cache) == 5


def test_a_partial_function_is_a_setting_with_its_arguments() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: m.act(m.a(x)), a=nn.Linear(8, 8), act=partial(F.leaky_relu, negative_slope=0.1))
    plan, x = gcsolve.solve(model, _x(16, 8), budget="1MB"), _x(16, 8)
    for act in (partial(F.leaky_relu, negative_slope=0.5), partial(F.elu, alpha=0.5)):
        model.act = act
        assert torch.equal(plan.module(x), model(x))
    assert len(plan.module._gcsolve.cache) == 3


def test_a_function_made_anew_in_every_call_is_the_same() -> None:
    def distance(margin: float) -> Any:
        return lambda a, b: margin - F.cosine_similarity(a, b)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b, c = m.a(x).chunk(3)
        return F.triplet_margin_with_distance_loss(a, b, c, distance_function=distance(1.5))

    torch.manual_seed(0)
    assert_trains_the_same(Of(forward, a=nn.Linear(8, 8)), _x(12, 8))


# --- arguments that the model changes -----------------------------------------------------------------------------------


class _Remembers(nn.Module):
    """Puts results into the dict it is given, takes work from a list, counts in an object, and hands the dict back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, memory: dict[str, Any], work: list[torch.Tensor], config: Config) -> dict[str, Any]:
        y = torch.tanh(self.a(work.pop()))
        memory["hidden"] = y
        memory.setdefault("all", []).append(y.detach())
        memory.pop("old", None)
        config.kind = "used"
        memory["loss"] = self.b(y).square().mean()
        return memory


def _memory() -> Any:
    return ({"old": _x(2)}, [_x(1, 8), _x(16, 8)], Config())


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
    plan.module({}, [_x(16, 8)], Config())


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


@since_213  # takes a torch.Generator
def test_verify_gives_each_model_its_own_inputs() -> None:
    """A tensor that forward changes, a dict that it fills, and a generator that it draws from."""

    def step(m: Any, x: torch.Tensor, seen: torch.Tensor, kept: dict[str, Any], source: torch.Generator) -> Any:
        seen.add_(1)
        kept["y"] = torch.tanh(m.a(x) * seen.clone())
        return m.b(kept["y"] * torch.rand(x.shape, generator=source))

    torch.manual_seed(0)
    leaf = _x(16, 8).requires_grad_()
    example = (leaf * 2, torch.zeros(16, 8), {"y": None}, torch.Generator().manual_seed(3))
    plan = gcsolve.solve(Of(step, **two_layers()), example, budget="1MB")
    assert plan.verify(steps=2, repeats=0).differences == ()
    assert not example[1].any()
    assert example[2] == {"y": None}
