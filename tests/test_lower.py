"""lower: storages and views, what is pinned, what runs once, and the sinks that hold what others hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gcsolve.capture.trace import trace
from gcsolve.lowering.lower import Lowered, clean, lower
from tests import models


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _lowered(model: nn.Module, *args: torch.Tensor) -> Lowered:
    traced = trace(model, args, {})
    clean(traced.joint)
    return lower(traced, (("parameters", 5),), lambda size: size, lambda node: 0)


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.linear(x).chunk(2, dim=1)
        return torch.tanh(left) * right.sin()


def test_views_share_the_storage_of_what_they_view() -> None:
    lowered = _lowered(_Views(), _x(4, 8))
    graph = lowered.graph
    made = [n for n in graph.nodes if n.op == "aten.addmm.default"]
    (storage,) = made[0].outputs
    assert graph.values[storage].size_bytes == 4 * 8 * 4
    readers = [graph.nodes[r].op for r in graph.readers[storage]]
    assert readers.count("aten.tanh.default") == 1
    assert readers.count("aten.sin.default") == 1
    assert not any("split" in n.op or "view" in n.op for n in graph.nodes)


def test_what_callers_hold_is_pinned_until_a_sink_reads_it() -> None:
    graph = _lowered(models.BatchNorm(), _x(4, 4, 8, 8)).graph
    last = len(graph.nodes) - 1
    forward_end = next(i for i, n in enumerate(graph.nodes) if n.op == "forward_end")
    assert graph.nodes[last].op == "step_end"
    assert forward_end + 1 == graph.backward_start
    for kind in ("gradients", "tangents"):
        found = [v for v, value in enumerate(graph.values) if value.kind == kind]
        assert found
        assert all(graph.values[v].pinned and last in graph.readers[v] for v in found)
    outputs = [v for v, value in enumerate(graph.values) if value.kind == "outputs"]
    assert sum(last in graph.readers[v] for v in outputs) == 1  # the output; new buffers end with the forward
    assert all(forward_end in graph.readers[v] for v in outputs)


def test_discrete_choices_and_reads_of_changed_buffers_run_once() -> None:
    class Choice(nn.Module):
        steps: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("steps", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) + self.steps.exp())
            self.steps.add_(1)
            best = y.topk(2, dim=1).indices
            return torch.relu(y.gather(1, best).sin())

    nodes = {n.op.split(".")[1]: n for n in _lowered(Choice(), _x(4, 8)).graph.nodes if n.op.startswith("aten.")}
    assert not nodes["topk"].rerunnable
    assert not nodes["exp"].rerunnable  # its input is another value after the step's own update
    assert nodes["tanh"].rerunnable
    assert nodes["addmm"].rerunnable


def test_random_ops_read_the_generator_state_they_would_replay() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), 0.5).sin()

    lowered = _lowered(Drop(), _x(4, 8))
    (at,) = lowered.rng_of
    graph = lowered.graph
    state = graph.nodes[lowered.rng_of[at]]
    assert state.op == "rng_state"
    assert not state.rerunnable
    assert graph.nodes[at].rerunnable
    assert state.outputs[0] in graph.nodes[at].inputs
    assert graph.values[state.outputs[0]].size_bytes == torch.get_rng_state().numel()


def test_attention_without_dropout_draws_nothing() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.linear(x).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

    lowered = _lowered(Attention(), _x(2, 4, 8))
    assert any("attention" in n.op and n.rerunnable for n in lowered.graph.nodes)
    assert not lowered.rng_of


def test_a_custom_op_is_never_run_twice() -> None:
    @torch.library.custom_op("gcsolve_tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    noisy.register_fake(torch.empty_like)
    noisy.register_autograd(lambda ctx, g: g.clone())

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return noisy(self.linear(x)).sin()

    nodes = [n for n in _lowered(Custom(), _x(4, 8)).graph.nodes if n.op.startswith("gcsolve_tests")]
    assert nodes
    assert not any(n.rerunnable for n in nodes)
