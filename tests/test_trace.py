"""trace: what the joint graph's inputs and outputs mean, from weights that are real or on meta."""

from __future__ import annotations

import logging
import pprint
import sys
import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import gcsolve
from gcsolve.capture.joint import (
    ArgumentInput,
    BufferInput,
    GraphOutput,
    InputItself,
    Joint,
    ParameterInput,
    ViewOfInput,
    summed_otherwise,
)
from gcsolve.capture.trace import parse_example, trace
from gcsolve.errors import ArgumentError, TraceError
from gcsolve.util.tree import flatten, leaf_paths, skeleton, static_key, unflatten
from tests import models
from tests.training import Of, assert_trains_the_same


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_inputs_are_named_and_tied_weights_are_one() -> None:
    traced = trace(models.Tied(), (torch.arange(12).view(3, 4),), {})
    kinds = [type(source) for source in traced.joint.inputs]
    assert kinds.count(ParameterInput) == 4  # both names of the tied weight are looked up; one of them is read
    assert kinds.count(ArgumentInput) == 1
    assert traced.takes_gradient == (True,)
    assert len({at for at, _ in traced.joint.gradients}) == len(traced.joint.gradients)


def test_frozen_parameters_get_no_gradient() -> None:
    traced = trace(models.Frozen(), (_x(8, 16),), {})
    graded = {traced.joint.inputs[at] for _, at in traced.joint.gradients}
    assert graded == {ParameterInput(f"top.layers.{i}.{p}") for i in range(2) for p in ("weight", "bias")}


def test_buffers_that_the_step_changes_are_listed() -> None:
    model = models.BatchNorm()
    traced = trace(model, (_x(4, 4, 8, 8),), {})
    changed = {traced.joint.inputs[at] for _, at in traced.joint.mutations}
    assert changed == {BufferInput(name) for name, _ in model.named_buffers()}


def test_two_gradients_of_an_input_that_nothing_else_uses_are_summed_in_any_order() -> None:
    """Whatever happens to the tangent of the result that has the input's index as its position."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    total = graph.call_function(torch.ops.aten.add.Tensor, (tangent, tangent))
    graph.output((x, x, x, total))
    joint = Joint(
        graph_module=fx.GraphModule({}, graph),
        inputs=(ArgumentInput(0),),
        cast_weights=(),
        tangents=(0,),
        outputs=(GraphOutput(0, True), InputItself(1, True, input=0), ViewOfInput(2, True, input=0)),
        mutations=(),
        gradients=(),
        n_forward_outputs=3,
        constants={},
    )
    assert summed_otherwise(joint) == frozenset()
    assert summed_otherwise(replace(joint, gradients=((3, 0),))) == {1, 2}


def test_only_scalars_take_gradients_beside_a_loss() -> None:
    example = (_x(8, 16), torch.arange(8) % 5)
    assert trace(models.LossAndLogits(), example, {}).takes_gradient == (True, False)
    assert trace(models.LossAndLogits(), example, {}, all_outputs=True).takes_gradient == (True, True)


def test_every_op_of_the_forward_knows_its_module_and_the_users_line() -> None:
    from gcsolve.lowering.node_facts import module_path, source_line

    traced = trace(models.MLP(2, 8), (_x(4, 8),), {})
    matmuls = [n for n in traced.joint.graph_module.graph.nodes if "addmm" in str(n.target)]
    assert [module_path(n) for n in matmuls] == ["layers.0", "layers.1"]
    assert all("models.py:" in source_line(n) for n in matmuls)


def test_tracing_neither_runs_nor_touches_the_model() -> None:
    model, x = models.BatchNorm(), _x(4, 4, 8, 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, (x,), {})
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_meta_and_real_weights_give_the_same_graph() -> None:
    with torch.device("meta"):
        model = models.MLP(2, 8)
    meta = trace(model, (torch.empty(4, 8, device="meta"),), {})
    real = trace(models.MLP(2, 8), (_x(4, 8),), {})
    code = [str(t.joint.graph_module.graph) for t in (meta, real)]
    assert code[0] == code[1]


def test_example_inputs_of_every_accepted_form() -> None:
    x = _x(2)
    assert parse_example(x) == ((x,), {})
    assert parse_example([x, 1]) == ((x, 1), {})
    assert parse_example({"x": x}) == ((), {"x": x})
    with pytest.raises(ArgumentError, match="int"):
        parse_example(1)


def test_templates_rebuild_the_same_types_and_keep_no_tensor() -> None:
    a, b = _x(2), _x(3)
    tree = {"out": models.Output(a, {"list": [b, None, (a, 1.5)]}), "flag": True}
    tensors, template = flatten(tree, "tree")
    assert len(tensors) == 2  # the same tensor twice is one entry
    assert set(leaf_paths(template).values()) == {"tree['out'].main", "tree['out'].extra['list'][0]"}
    bare = skeleton(template)
    built = unflatten(bare, [a + 1, b + 1])
    assert type(built["out"]) is models.Output
    assert torch.equal(built["out"].main, a + 1)
    assert built["out"].extra["list"][1] is None
    assert built["out"].extra["list"][2][1] == 1.5
    assert unflatten(bare, [a, b])["out"] is not built["out"]


def test_keys_of_templates_see_structure_and_values_not_tensors() -> None:
    def key(tree: object) -> object:
        return static_key(flatten(tree, "x")[1])

    x, y = _x(2), _x(2)
    assert key({"a": x, "n": 1}) == key({"a": y, "n": 1})
    assert key({"a": x, "n": 1}) != key({"a": x, "n": 2})
    assert key({"a": x, "n": 1}) != key({"a": x, "n": True})
    assert key({"a": x, "n": 0.0}) != key({"a": x, "n": -0.0})
    assert key([x, y]) != key([x, x])
    assert key([x]) != key((x,))


def test_an_object_that_contains_itself_is_refused() -> None:
    loop: list[object] = [_x(2)]
    loop.append(loop)
    with pytest.raises(ArgumentError, match="contains itself"):
        flatten(loop, "example_input")


class _LooksAtConstants(torch.nn.Module):
    """Branches on values that follow from constants alone, as masks and position ids do; optionally on changed ones."""

    def __init__(self, change: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0])[None] + 3
        if self.change:
            positions[:, 0] = x.long()[0, 0]
        gaps = torch.diff(positions, dim=-1) != 1
        y = self.linear(x)
        if gaps.any():
            return y.sin()
        return y.tanh() * int(positions.max())


def test_branches_on_constants_go_the_way_eager_goes() -> None:
    import gcsolve

    torch.manual_seed(0)
    model, x = _LooksAtConstants(), _x(4, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    assert torch.equal(plan.module(x), model(x))
    assert "tanh" in plan.module.code
    with pytest.raises(TraceError, match="branches on a tensor's value"):
        trace(_LooksAtConstants(change=True), (x,), {})


class _WritesConstants(torch.nn.Module):
    """Changes a mask in place, through a view of it too, before it looks at it; `value` comes from the input or not."""

    def __init__(self, from_input: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.from_input = from_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, other = torch.zeros(4), torch.ones(4)
        mask[1:3].fill_(2.0)
        mask[mask == 0] = -1.0
        if self.from_input:
            mask[0] = x[0, 0]
        else:
            other[0] = x[0, 0]  # says nothing about the mask
        y = self.linear(x)
        return y.tanh() * int(mask.sum()) if mask.sum() > 1.5 else y.sin()


def test_constants_changed_in_place_are_known_as_they_are_then() -> None:
    import gcsolve

    torch.manual_seed(0)
    model, x = _WritesConstants(), _x(4, 8)
    plan = gcsolve.solve(model, x, budget=1.0)
    assert torch.equal(plan.module(x), model(x))
    assert "tanh" in plan.module.code
    with pytest.raises(TraceError, match="branches on a tensor's value"):
        trace(_WritesConstants(from_input=True), (x,), {})


def test_a_loss_inside_that_looks_at_its_labels_may_be_taken_outside() -> None:
    class Labelled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            y = self.linear(x)
            if labels is None:
                return y
            if labels.max() > 7:
                raise ValueError("no such label")
            return torch.nn.functional.cross_entropy(y, labels)

    with pytest.raises(TraceError, match="leave labels out of the call and compute the loss after it, or plan"):
        trace(Labelled(), (_x(4, 8),), {"labels": torch.tensor([0, 1, 2, 3])})
    trace(Labelled(), (_x(4, 8),), {})


def test_casts_of_constants_are_ops_of_the_trace() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(8).int()
        near = (at[:, None] - at).clamp_(-2, 2).add_(2)  # in place, as LayoutLMv3 does
        return m.a(x) * m.b.weight[near.float().long(), 0] * near.bool()

    model = Of(forward, a=torch.nn.Linear(8, 8), b=torch.nn.Linear(1, 5))
    plan, *_ = assert_trains_the_same(model, _x(8, 8))
    assert "_tensor_constant" not in plan.module.code


def test_conditions_that_torch_checks_are_taken_to_hold() -> None:
    def forward(m: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(at < 8, lambda: "no such place")  # as Hugging Face checks a text's places for images
        return m.a(x)[at]

    assert_trains_the_same(Of(forward, a=torch.nn.Linear(8, 8)), (_x(8, 8), torch.tensor([3, 1, 3])))
    with pytest.raises(RuntimeError, match="no such place"):
        torch._check_tensor_all(torch.zeros(1).bool(), lambda: "no such place")


def test_the_model_is_told_that_it_runs_in_eager() -> None:
    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.sin() if torch.compiler.is_compiling() or torch.compiler.is_exporting() else y.tanh()

    ops = [str(n.target) for n in trace(Asks(), (_x(4, 8),), {}).joint.graph_module.graph.nodes]
    assert "aten.tanh.default" in ops
    assert "aten.sin.default" not in ops
    assert not torch.compiler.is_compiling()


@pytest.mark.filterwarnings("ignore:Raw SymInt")
@pytest.mark.parametrize("use", [lambda h: h * h.sum().item(), lambda h: h[h > 0]])
def test_a_number_or_shape_made_of_values_is_refused_with_the_line(use) -> None:
    class Uses(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return use(super().forward(x))

    with pytest.raises(TraceError, match=r"a tensor's value.* at .*test_trace.py:\d+"):
        trace(Uses(8, 8), (_x(4, 8),), {})


@pytest.mark.filterwarnings("ignore:Raw SymInt")
def test_where_torch_itself_looks_at_values_the_error_says_what_it_asks() -> None:
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    with pytest.raises(TraceError, match=r"whether a mask is causal at .* is_causal= of an encoder"):
        trace(encoder, (_x(2, 4, 8), mask), {})
    for causal in (True, False):
        trace(encoder, (_x(2, 4, 8), mask), {"is_causal": causal})


def test_a_call_that_the_model_rejects_is_told_with_its_own_error_first() -> None:
    for args, kwargs in (((_x(4, 8), _x(4, 8)), {}), ((_x(4, 8),), {"other": 1})):
        with pytest.raises(TraceError, match=r"^TypeError: .*forward\(\).* Check the example input"):
            trace(torch.nn.Linear(8, 8), args, kwargs)


class _Prints(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.how(y)
        return y


def _print_shape(y: torch.Tensor) -> None:
    print("shape", tuple(y.shape))


def _print_error(y: torch.Tensor) -> None:
    print("shape", tuple(y.shape), file=sys.stderr)


def _pprint_shape(y: torch.Tensor) -> None:
    pprint.pprint(("shape", *y.shape))


@pytest.mark.parametrize("how", [_print_shape, _print_error, _pprint_shape])
def test_what_forward_prints_is_heard_once_and_a_warning_names_the_line(how: Any, capsys: Any) -> None:
    line = how.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"forward prints at tests/test_trace\.py:{line}: .*not in a planned step"):
        plan = gcsolve.solve(_Prints(how), torch.randn(4, 8), budget=1.0)
    out, err = capsys.readouterr()
    assert (out + err).count("shape") == 1
    plan.module(torch.randn(4, 8)).sum().backward()
    assert capsys.readouterr() == ("", "")


def test_what_is_warned_or_logged_in_forward_is_not_a_print(capsys: Any) -> None:
    with pytest.warns(UserWarning, match="careful") as caught:
        gcsolve.solve(_Prints(lambda y: warnings.warn("careful", stacklevel=1)), torch.randn(4, 8), budget=1.0)
    assert all(str(w.message) == "careful" for w in caught)
    gcsolve.solve(_Prints(lambda y: logging.getLogger("tests.said").error("said")), torch.randn(4, 8), budget=1.0)


def test_other_threads_print_as_always(capsys: Any) -> None:
    def elsewhere(y: torch.Tensor) -> None:
        thread = threading.Thread(target=print, args=("from another thread",))
        thread.start()
        thread.join()

    gcsolve.solve(_Prints(elsewhere), torch.randn(4, 8), budget=1.0)
    assert "from another thread" in capsys.readouterr().out
