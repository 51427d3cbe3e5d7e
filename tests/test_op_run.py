"""ops/run.py: arguments made up for one op that is run alone, and operands that take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gcsolve.ops import facts
from gcsolve.ops import run as alone
from tests.tracing import CPU, traced

aten = torch.ops.aten


def test_operands_and_results_take_turns():
    (node,) = traced(torch.mul, torch.randn(8, 8), torch.randn(8, 8))
    seen: list[tuple[int, ...]] = []
    op = node.target
    node.target = lambda a, b: (seen.append((a.data_ptr(), b.data_ptr())), op(a, b))[1]  # type: ignore[operator]

    def use(run: Any) -> list[torch.Tensor]:
        return [run() for _ in range(6)]

    results = alone.run_alone(node, CPU.kind, (alone.lively,), use, copies=3)
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]
    assert len({t.data_ptr() for t in results[:3]}) == 3
    assert all(torch.equal(results[0], t) for t in results)


def indexing(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, image: torch.Tensor) -> Any:
    x, table, image = (t.detach().requires_grad_() for t in (x, table, image))
    rows = F.embedding(ids, table)
    picked = x.gather(1, ids) + x[ids[0], ids[0]].sum() + x.index_select(0, ids[0]).sum()
    pooled = F.max_pool2d(image, 2)
    loss = F.cross_entropy(x, ids[:, 0]) + rows.sum() + picked.sum() + (pooled * pooled).sum()
    return torch.autograd.grad(loss, [x, table, image])


def test_indices_are_spread_over_all_that_they_may_name():
    nodes = traced(
        indexing, torch.randn(5, 7), torch.randn(50, 4), torch.randint(0, 5, (5, 3)), torch.randn(1, 1, 8, 8)
    )
    seen = set()
    for node in nodes:
        bounds = alone._index_bounds(node)
        if not bounds:
            continue
        seen.add(node.target.overloadpacket)  # type: ignore[union-attr]
        args, kwargs = alone.synthetic_arguments(node, CPU.kind, alone.lively)
        node.target(*args, **kwargs)  # type: ignore[operator]
        fakes, reals = (alone.leaves(t) for t in (facts.fake_arguments(node), (args, kwargs)))
        for fake, real in zip(fakes, reals, strict=True):
            if isinstance(fake, torch.Tensor) and id(fake) in bounds:
                assert 0 <= int(real.min()) <= int(real.max()) < bounds[id(fake)]
                assert real.numel() < 10 or int(real.max()) > 0
    assert seen >= {
        *(aten.embedding, aten.embedding_dense_backward, aten.gather, aten.index, aten.index_put, aten.index_select),
        *(aten.nll_loss_forward, aten.nll_loss_backward, aten.max_pool2d_with_indices_backward),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_made_up_numbers_are_ordinary(dtype):
    made = alone.lively(torch.empty(40, 40, dtype=dtype), "cpu", 1)
    values = torch.view_as_real(made) if dtype.is_complex else made.float()
    assert int(values.unique().numel()) > (1 if dtype == torch.bool else 8)
    assert dtype == torch.bool or (float(values.min()) >= 0.49 and float(values.max()) <= 1.51)
