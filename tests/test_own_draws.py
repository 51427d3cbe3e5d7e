"""ops/own_draws.py: a random op that is run alone leaves torch's default generator alone, and takes what it always takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gcsolve.ops.own_draws import drawing_from
from gcsolve.ops.peak_meter import PeakMeter
from gcsolve.ops.run import run_alone, zeros
from tests.tracing import traced

aten = torch.ops.aten
X = torch.ones(64, 32)

# Every random op of traces on the CPU, by its arguments.
OPS: dict[Any, tuple[Any, ...]] = {
    aten.native_dropout.default: (X, 0.3, True),
    aten.bernoulli.default: (X * 0.5,),
    aten.bernoulli.p: (X, 0.3),
    aten.rand_like.default: (X,),
    aten.randn_like.default: (X,),
    aten.randint_like.default: (X, 5),
    aten.rand.default: ([64, 32],),
    aten.randn.default: ([64, 32],),
    aten.randint.low: (2, 5, [64, 32]),
    aten.randperm.default: (64,),
    aten.normal.Tensor_Tensor: (X, X),
    aten.multinomial.default: (X, 2, False),
    aten.exponential.default: (X,),
    aten.uniform.default: (X,),
    aten.rrelu_with_noise_functional.default: (-X, X, 0.1, 0.3, True),
}


def _layouts(results: Any) -> list[Any]:
    tensors = results if isinstance(results, tuple) else (results,)
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


def _peak(run: Callable[[], Any]) -> int:
    with PeakMeter() as meter:
        run()
    return meter.peak_bytes


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "part": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "half precision": lambda x: x.bfloat16().transpose(0, 1),
}


def _laid_out(argument: Any, layout: str) -> Any:
    return LAYOUTS[layout](argument) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_it_draws_from_that_generator_and_takes_the_same_memory(op: Any, layout: str) -> None:
    arguments = tuple(_laid_out(argument, layout) for argument in OPS[op])
    generator = torch.Generator().manual_seed(3)
    own = drawing_from(op, generator)
    assert own is not None
    before, own_before = torch.get_rng_state(), generator.get_state()
    results = own(*arguments)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(generator.get_state(), own_before)
    assert _layouts(results) == _layouts(op(*arguments))
    assert _peak(lambda: own(*arguments)) == _peak(lambda: op(*arguments))


def test_dropout_is_torchs() -> None:
    for p, train in ((0.3, True), (0.3, None), (1.0, True), (0.3, False)):
        own = drawing_from(aten.native_dropout.default, torch.Generator().manual_seed(3))
        assert own is not None
        torch.manual_seed(3)
        for mine, torchs in zip(own(X, p, train), aten.native_dropout.default(X, p, train), strict=True):
            assert torch.equal(mine, torchs)


def test_ops_without_such_a_form_have_none() -> None:
    assert drawing_from(aten._scaled_dot_product_flash_attention.default, torch.Generator()) is None


def test_an_op_that_is_run_alone_leaves_the_default_generator() -> None:
    states: list[torch.Tensor] = []

    def use(run: Any) -> Any:
        result = run()
        states.append(torch.get_rng_state())  # what another thread would draw from now
        return result

    before = torch.get_rng_state()
    nodes = traced(lambda x: F.dropout(torch.rand_like(x) * x, 0.3), X)
    random = [n for n in nodes if torch.Tag.nondeterministic_seeded in n.target.tags]  # type: ignore[union-attr]
    assert len(random) == 2
    for node in random:
        assert run_alone(node, "cpu", (zeros,), use) is not None
    assert all(torch.equal(state, before) for state in states)


def test_a_given_generator_is_not_drawn_from() -> None:
    """An op that names the user's generator draws from ours."""
    users, ours = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    before = users.get_state()
    own = drawing_from(aten.bernoulli.p, ours)
    assert own is not None
    assert torch.equal(
        own(X, 0.3, generator=users), aten.bernoulli.p(X, 0.3, generator=torch.Generator().manual_seed(2))
    )
    assert torch.equal(users.get_state(), before)
