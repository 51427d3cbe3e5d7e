"""patches: what a trace replaces is replaced for its thread alone, and put back in whatever order threads come and go."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gcsolve import _torch
from gcsolve.capture import patches
from gcsolve.capture.patches import PATCHES, During, Patch, Scope, patched
from gcsolve.capture.target_kernels import TargetKernels
from gcsolve.capture.trace import trace
from gcsolve.cost.devices import get_device
from gcsolve.errors import TraceError
from gcsolve.util.by_thread import MISSING, own_value, shared_change
from tests.training import Of, assert_trains_the_same, x


def elsewhere(look: Callable[[], Any]) -> Any:
    """What another thread finds."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    assert found, "the other thread raised"
    return found[0]


# --- one attribute, several threads ----------------------------------------------------------------------------------


class Owner:
    number = 1

    def method(self) -> str:
        return f"method of {type(self).__name__}"

    @classmethod
    def of_class(cls) -> str:
        return f"class method of {cls.__name__}"


class Child(Owner):
    pass


def _module() -> Any:
    module: Any = types.ModuleType("shared")
    module.function = lambda: "original"
    module.table = {1: "one", 2: "two"}
    module.filters = []
    return module


def test_a_function_is_another_for_one_thread() -> None:
    module = _module()
    original = module.function
    with own_value(module, "function", lambda before: lambda: f"not {before()}"):
        assert module.function() == "not original"
        assert elsewhere(lambda: module.function()) == "original"
        with own_value(module, "function", lambda before: lambda: f"inner, not {before()}"):
            assert module.function() == "inner, not original"
        assert module.function() == "not original"
    assert module.function is original


@pytest.mark.parametrize(
    ("name", "replacement", "look", "before", "within"),
    [
        ("number", 2, lambda: (Owner.number, Child().number), (1, 1), (2, 2)),
        ("method", lambda self: type(self), lambda: Child().method(), "method of Child", Child),
        ("of_class", classmethod(lambda cls: cls), lambda: Child.of_class(), "class method of Child", Child),
    ],
)
def test_an_attribute_of_a_class_is_bound_as_before(
    name: str, replacement: Any, look: Callable[[], Any], before: Any, within: Any
) -> None:
    original = vars(Owner)[name]
    with own_value(Owner, name, lambda _: replacement):
        assert look() == within
        assert elsewhere(look) == before
    assert vars(Owner)[name] is original
    assert look() == before


def test_an_attribute_that_a_class_lacks_is_asked_for_as_before() -> None:
    class Asked:
        def __getattr__(self, name: str) -> str:
            return f"asked for {name}"

    def taken(original: Any) -> str:
        assert original is MISSING
        return "own"

    with own_value(Asked, "setting", taken):
        assert Asked().setting == "own"  # type: ignore[attr-defined]
        assert elsewhere(lambda: Asked().setting) == "asked for setting"
    assert Asked().setting == "asked for setting"  # type: ignore[attr-defined]


def test_a_mapping_is_another_for_one_thread_and_keeps_what_is_written() -> None:
    module = _module()
    original = module.table
    with own_value(module, "table", lambda before: {key: value for key, value in before.items() if key != 1}):
        assert (1 in module.table, list(module.table), len(module.table), module.table.copy()) == (
            False,
            [2],
            1,
            {2: "two"},
        )
        assert elsewhere(lambda: dict(module.table)) == {1: "one", 2: "two"}
        module.table[3] = "three"
        assert elsewhere(lambda: module.table[3]) == module.table[3] == "three"
        del module.table[2]
    assert module.table is original
    assert module.table == {1: "one", 3: "three"}


def test_a_stream_is_another_for_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    own = types.SimpleNamespace(write=lines.append, flush=lambda: None, name="own")
    original = sys.stdout
    with own_value(sys, "stdout", lambda _: own):
        print("here")
        elsewhere(lambda: print("there"))
        assert sys.stdout.name == "own"
        assert elsewhere(lambda: sys.stdout.encoding) == original.encoding
    assert sys.stdout is original
    assert "".join(lines) == "here\n"
    assert capsys.readouterr().out == "there\n"


def test_warnings_are_ignored_in_one_thread() -> None:
    def warn() -> None:
        warnings.warn("careful", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with own_value(warnings, "filters", lambda _: "ignore"):
            warn()
            assert not caught
            elsewhere(warn)
            assert len(caught) == 1
            with warnings.catch_warnings():  # another list of filters
                warn()
        assert list(warnings.filters) == before
        warn()
        assert len(caught) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_threads_leave_in_any_order(order: tuple[int, ...]) -> None:
    module, owner, lists = _module(), type("Fresh", (Owner,), {"number": 7}), _module()
    originals = module.function, vars(owner)["number"]
    ready, ends = threading.Barrier(4), [threading.Event() for _ in range(3)]
    seen: dict[int, list[Any]] = {}

    def look() -> tuple[Any, ...]:
        return module.function(), owner.number, any(f[1].match("") for f in lists.filters)

    def use(k: int) -> None:
        with (
            own_value(module, "function", lambda _: lambda: k),
            own_value(owner, "number", lambda _: k),
            own_value(lists, "filters", lambda _: "ignore"),
        ):
            ready.wait(10)
            seen[k] = [look()]
            ends[k].wait(10)
            seen[k].append(look())

    threads = [threading.Thread(target=use, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(10)
    for k in order:
        assert look() == ("original", 7, False)
        ends[k].set()
        threads[k].join(10)
    assert look() == ("original", 7, False)
    assert seen == {k: [(k, k, True)] * 2 for k in range(3)}
    assert (module.function, vars(owner)["number"]) == originals
    assert lists.filters == []


def test_what_other_code_puts_there_meanwhile_stays() -> None:
    module = _module()
    original = module.function
    with own_value(module, "function", lambda _: lambda: "own"):
        dispatcher = module.function
        module.function = lambda: f"wrapped {dispatcher()}"
        with own_value(module, "function", lambda before: lambda: f"outer {before()}"):
            assert module.function() == "outer wrapped own"
        assert module.function() == "wrapped own"
    assert module.function() == "wrapped original"
    module.function = original


def test_a_change_for_all_ends_with_the_last_who_wants_it() -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def change() -> Any:
        done.append("changed")
        yield
        done.append("undone")

    first, second = shared_change("key", change), shared_change("key", change)
    with contextlib.ExitStack() as outer:
        outer.enter_context(first)
        with second:
            pass
        assert done == ["changed"]
    assert done == ["changed", "undone"]


# --- the table -------------------------------------------------------------------------------------------------------


class _Given:
    """For what the replacements refer to: anything that is asked of it is a function."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: lambda *_: None


def _raw(owner: Any, name: str) -> Any:
    return vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)


@pytest.mark.parametrize(
    "row", PATCHES, ids=lambda row: f"{row.names if isinstance(row.names, str) else row.during.name}"
)
def test_every_row_says_why_and_is_undone(row: Patch) -> None:
    assert row.reason.endswith(".")
    before = [(owner, name, _raw(owner, name)) for owner, name in row.places()]
    assert before or row.needs == "known"  # transformers need not be there
    given = {row.needs: {} if row.needs == "kernels_of_cpu" else _Given()} if row.needs else {}
    with patched(row.during, **given):
        if row.scope is Scope.THREAD and row.during is not During.ALONE and row.names != "filters" and row.applies():
            assert all(_raw(owner, name) is not value for owner, name, value in before)
    for owner, name, value in before:
        assert _raw(owner, name) is value, name


def test_no_attribute_is_replaced_by_two_rows_at_one_moment() -> None:
    for during in During:
        places = [(id(owner), name) for row in PATCHES if row.during is during for owner, name in row.places()]
        assert during is During.ALONE or len(places) == len(set(places))


def test_rows_are_for_releases_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Patch(math, "pow", lambda *_: None, During.FORWARD, "For a test.", since=(2, 12), until=(2, 14))
    found = []
    for release in ((2, 11), (2, 12), (2, 13), (2, 14)):
        monkeypatch.setattr(patches, "_TORCH_RELEASE", release)
        found.append(row.applies())
    assert found == [False, True, True, False]


# --- what the rows are for -------------------------------------------------------------------------------------------


def _distribution_checks() -> bool:
    with contextlib.suppress(ValueError):
        torch.distributions.Normal(0.0, -1.0)
        return False
    return True


def _value_checks() -> bool:
    with contextlib.suppress(RuntimeError):
        torch._check_tensor_all(torch.zeros(1).bool())
        return False
    return True


def _inference_tensor() -> bool:
    with torch.inference_mode():
        return torch.ones(1).is_inference()


def _logged() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torch.of_the_test")
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("said")
    logger.removeHandler(handler)
    return lines


def _warned() -> bool:
    with contextlib.suppress(UserWarning):
        warnings.warn("careful", UserWarning, stacklevel=1)
        return False
    return True


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


def _function() -> list[float]:
    y = torch.ones(2, requires_grad=True)
    _Twice.apply(y).sum().backward()
    assert y.grad is not None
    return y.grad.tolist()


class _Nested(nn.Module):
    """A module that stands in two places, for which torch's tracer hands out proxies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(2, 2)


_NESTED = _Nested()


def _module_types() -> list[type]:
    return [type(_NESTED.first), type(_NESTED.second)]


def _generator() -> bool:
    state = torch.get_rng_state()
    torch.set_rng_state(state)
    return torch.equal(torch.get_rng_state(), state)


_ATTENTION = x(1, 2, 4, 8).bfloat16()

LOOKS: dict[str, Callable[[], Any]] = {
    "compiling": lambda: (torch.compiler.is_compiling(), torch.compiler.is_exporting()),
    "max of tensors": lambda: max(_TWO, key=None) is _TWO[1] and max(*_TWO) is _TWO[1],
    "pow": lambda: type(math.pow(2, 3)),
    "oneDNN": lambda: torch.backends.mkldnn.enabled,
    "distributions": _distribution_checks,
    "value checks": _value_checks,
    "inference mode": _inference_tensor,
    "seeding": _generator,
    "logs": _logged,
    "warnings": _warned,
    "Function": _function,
    "modules": _module_types,
    "calls of modules": lambda: getattr(type(_NESTED.first).__call__, "__name__", ""),
    "CUDA's generator": lambda: getattr(torch.cuda.set_rng_state, "__module__", ""),
    "attention": lambda: F.scaled_dot_product_attention(_ATTENTION, _ATTENTION, _ATTENTION).shape,
    "interpolation": lambda: F.interpolate(_ATTENTION.float(), scale_factor=1.7, mode="bilinear").shape,
    "kernels": lambda: sorted(map(str, torch.ops.aten.upsample_bilinear2d.vec.py_kernels)),
    "settings": lambda: (_torch.functorch_config.functionalize_rng_ops, _torch.functorch_config.backward_pass_autocast),
}
_TWO = (torch.zeros(()), torch.ones(()))


class _LookingElsewhere(torch.autograd.Function):
    """Has another thread look while forward and backward are traced."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012

    @staticmethod
    def look() -> None:
        _LookingElsewhere.seen.append(elsewhere(lambda: {name: look() for name, look in LOOKS.items()}))

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _LookingElsewhere.look()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _LookingElsewhere.look()
        return 2 * gradient


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_another_thread_finds_everything_as_it_is(device: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        _LookingElsewhere.look()
        y = m.tied[0](m.tied[1](x))[None, None]
        return _LookingElsewhere.apply(F.scaled_dot_product_attention(y, y, y))

    layer = nn.Linear(8, 8)
    model = Of(forward, tied=nn.ModuleList([layer, layer]))
    expected = elsewhere(lambda: {name: look() for name, look in LOOKS.items()})
    _LookingElsewhere.seen.clear()
    trace(model, (x(4, 8),), {}, kernels=None if device == "cpu" else TargetKernels(get_device(device)))
    assert len(_LookingElsewhere.seen) >= 5  # rehearsed, exported, traced forward and backward
    for seen in _LookingElsewhere.seen:
        assert seen == expected


def test_comparisons_and_powers_of_numbers_are_those_of_eager() -> None:
    """torch.export would have math.pow(2, 3) be 8, a whole number, and max() of tensors a tensor that keeps its autograd."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        more = max(torch.full((), 2.0), torch.full((), 3.0))
        return m.a(x) * (torch.arange(8) * math.pow(2, 3)) * more

    assert_trains_the_same(Of(forward, a=nn.Linear(8, 8)), x(4, 8))


def test_a_draw_that_forward_takes_back_is_refused() -> None:
    """The state of the generator does not tell of it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        state = random.getstate()
        scale = random.random()
        random.setstate(state)
        return m.a(x) * scale

    with pytest.raises(TraceError, match=r"forward draws from random \(random\) at tests/test_patches.py"):
        trace(Of(forward, a=nn.Linear(8, 8)), (x(4, 8),), {})


def test_a_model_is_not_told_that_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one flag for all threads."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    model = Of(lambda m, x: m.a(x).sin() if torch.compiler.is_compiling() else m.a(x).tanh(), a=nn.Linear(8, 8))
    graph = trace(model, (x(4, 8),), {}).joint.graph_module.graph
    assert torch.ops.aten.tanh.default in {node.target for node in graph.nodes}
    assert torch.compiler.is_compiling()


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_kernels_that_torch_remembers_are_neither_traced_nor_lost() -> None:
    def interpolated(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.7, mode="bilinear")

    def rewritten() -> list[str]:
        """How a trace of torch's own would write it."""
        with enable_python_dispatcher(), _Ops() as ops:
            interpolated(torch.ones(1, 1, 4, 4))
        return ops.names

    before = rewritten()
    assert not any("upsample" in name for name in before)
    graph = trace(
        Of(lambda m, x: interpolated(m.a(x)), a=nn.Conv2d(1, 1, 3)), (x(1, 1, 8, 8),), {}
    ).joint.graph_module.graph
    assert any("upsample_bilinear2d" in str(node.target) for node in graph.nodes)
    assert rewritten() == before


def test_torchs_settings_for_compiled_random_ops_are_not_a_plans() -> None:
    model, inputs = Of(lambda m, x: F.dropout(m.a(x), 0.3), a=nn.Linear(8, 8)), x(4, 8)
    code = [str(trace(model, (inputs,), {}).joint.graph_module.graph)]
    with _torch.functorch_config.patch(functionalize_rng_ops=True, backward_pass_autocast="same_as_forward"):
        code.append(str(trace(model, (inputs,), {}).joint.graph_module.graph))
        assert _torch.functorch_config.functionalize_rng_ops
    assert code[0] == code[1]


def test_draws_from_the_default_generator_by_others_are_not_undone() -> None:
    states: list[torch.Tensor] = []

    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            states.append(elsewhere(lambda: (torch.rand(3), torch.get_rng_state())[1]))
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    trace(Of(lambda m, x: Draws.apply(m.a(x)), a=nn.Linear(8, 8)), (x(4, 8),), {})
    assert torch.equal(torch.get_rng_state(), states[-1])


def test_garbage_is_collected_again_after_a_trace_and_only_where_it_was() -> None:
    collected: list[bool] = []
    model = Of(lambda m, x: (collected.append(gc.isenabled()), m.a(x))[1], a=nn.Linear(8, 8))
    trace(model, (x(4, 8),), {})
    assert not any(collected)
    assert gc.isenabled()
    gc.disable()
    try:
        trace(model, (x(4, 8),), {})
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_seeds_and_draws_of_the_tracing_thread_are_refused() -> None:
    for draw, text in (
        (lambda: torch.manual_seed(0), "forward calls torch.manual_seed at tests/test_patches.py"),
        (random.random, "forward draws from random"),
        (lambda: random.random(), r"forward draws from random \(random\) at tests/test_patches.py"),
    ):
        model = Of(lambda m, x, draw=draw: (draw(), m.a(x))[1], a=nn.Linear(8, 8))
        with pytest.raises(TraceError, match=text):
            trace(model, (x(4, 8),), {})


def test_a_library_that_shuns_fakes_is_shown_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does; the library is asked by its name in sys.modules."""
    library: Any = types.ModuleType("transformers.utils.import_utils")
    library.is_fake_tensor = lambda t: isinstance(t, _torch.FakeTensor)
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", library)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(4)
        shunned = library.is_fake_tensor(at), library.is_fake_tensor(x)
        assert shunned in ((False, True), (False, False))
        return m.a(x) * (3 if not shunned[0] and at.max() == 3 else 5)

    assert_trains_the_same(Of(forward, a=nn.Linear(8, 8)), x(4, 8))


def test_torchs_own_warnings_and_logs_are_not_the_users(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            warnings.warn("of torch, while it traces backward", stacklevel=1)
            logging.getLogger("torch.of_the_test").warning("said")
            return 2 * gradient

    trace(Of(lambda m, x: Noisy.apply(m.a(x)), a=nn.Linear(8, 8)), (x(4, 8),), {})
    assert not caplog.records


def test_a_thread_that_does_not_trace_leaves_the_modes_of_the_process_alone() -> None:
    """torch keeps some modes for the whole process: switching them off would end another thread's trace."""
    with _torch.tracing_here():
        assert not isinstance(_torch.no_modes(), contextlib.nullcontext)
    assert isinstance(_torch.no_modes(), contextlib.nullcontext)
