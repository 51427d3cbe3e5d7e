"""The one place that imports torch's private modules (`torch._*`), so that a torch release can only break this file.

Everything here is a thin name for something torch has no public name for yet; tested with torch 2.14.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import _C, fx
from torch._C import _autograd, _profiler
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors as aot_descriptors
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch._library import simple_registry
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

__all__ = [
    "Casts",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "OpsSeen",
    "OutputType",
    "ShapeEnv",
    "TracingContext",
    "aot_descriptors",
    "as_eager_kernels",
    "as_in_eager",
    "backends_left_on",
    "aot_export_joint_with_descriptors",
    "below_autograd",
    "boxed_graph_module",
    "current_backward",
    "disable_autocast",
    "draws_kept",
    "global_module_hooks",
    "is_autocast_region",
    "is_compiled",
    "is_compiled_in_place",
    "is_of_backward",
    "is_sum_of_gradients",
    "functorch_config",
    "no_modes",
    "profiler_running",
    "pytree",
    "runs_in_this_backward",
    "start_memory_profile",
    "stop_memory_profile",
    "storage_key",
    "tracing",
    "transform",
    "unchecked_conditions",
    "unordered_checks",
    "tree_map_only",
    "view_like",
    "weights_cast",
]

_native: Any = _autograd  # its stubs are behind its signatures


def view_like(op: OpOverload) -> bool:
    """Whether `op` only returns views of its inputs, by its schema (no storage is made, nothing is written)."""
    returns = [r.alias_info for r in op._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


# --- tracing and emitting -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """Models ask torch whether they are being compiled or exported and then take another way (Hugging Face's attention
    makes a mask that eager skips); in this block the answer is no, so that what is traced is what eager runs."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


@contextlib.contextmanager
def weights_cast(*, once: bool) -> Iterator[None]:
    """Whether autocast keeps its casts of weights; tracing switches that off. None made in the block serves after it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(once)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` made it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing has been compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


_REWRITTEN = re.compile(r"_?upsample_.*|matmul|multi_margin_loss|multilabel_margin_loss_forward")
_OF_CPU = re.compile(r"lstm|rnn_tanh|rnn_relu|gru|gru_cell|bilinear")
_rewriting = threading.RLock()


@contextlib.contextmanager
def as_eager_kernels(of_cpu: Mapping[OpOverload, Callable[..., Any]] | None) -> Iterator[None]:
    """While it traces, torch writes some ops in terms of others (interpolation as index arithmetic, above all), which round
    otherwise and take more memory than the kernel that eager runs; in this block it does not.

    Args:
        of_cpu: what some ops are traced as where not as their own kernels (recurrent layers); None: as torch writes them.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    names = _REWRITTEN if of_cpu is None else re.compile(f"{_REWRITTEN.pattern}|{_OF_CPU.pattern}")
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if names.fullmatch(name)]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    with _rewriting:  # the tables are one for all threads
        taken = [(op, key, op.py_kernels.pop(key, None)) for op in ops for key in keys]
        for op, _, _ in taken:
            op._dispatch_cache.clear()
        for op, kernel in (of_cpu or {}).items():
            op.py_kernels.update(dict.fromkeys(keys, kernel))
        try:
            yield
        finally:
            for op, key, kernel in taken:
                op.py_kernels.pop(key, None)
                if kernel is not None:
                    op.py_kernels[key] = kernel
                op._dispatch_cache.clear()


@contextlib.contextmanager
def backends_left_on() -> Iterator[None]:
    """`torch.export` switches oneDNN, NNPACK and cuDNN off while it traces, for the whole process: other threads would take
    other kernels meanwhile. In this block it does not, for this thread; what is traced has no kernels yet."""
    from torch.export import _trace as export_trace  # takes a second, and not every use of gcsolve traces

    here, original = threading.get_ident(), export_trace._ignore_backend_decomps

    def left_on() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if threading.get_ident() == here else original()

    export_trace._ignore_backend_decomps = left_on
    try:
        yield
    finally:
        export_trace._ignore_backend_decomps = original


def draws_kept() -> contextlib.AbstractContextManager[Any]:
    """Tracing drops random ops whose results nothing reads, though they move the generator; in this block it keeps them."""
    from torch._inductor import config as inductor_config  # takes a second, and not every use of gcsolve traces

    return inductor_config.patch(fallback_random=True)


@contextlib.contextmanager
def unordered_checks() -> Iterator[None]:
    """torch threads a token through a trace for the op that checks whether linear algebra succeeded (torch 2.14), so that it
    stays; in this block it is an op without a result, which is dropped."""
    effect: Any = getattr(simple_registry.singleton.find("aten::_linalg_check_errors"), "effect", None)
    before = getattr(effect, "_effect", None)
    if before is not None:
        effect._effect = None
    try:
        yield
    finally:
        if before is not None:
            effect._effect = before


@contextlib.contextmanager
def unchecked_conditions() -> Iterator[None]:
    """Models have torch check a condition that only values tell (Hugging Face's, that a text has a place for each part of
    its images), and go on when it holds; in this block, of this thread, it is taken to hold."""
    here, original = threading.get_ident(), torch._check_tensor_all_with

    def check(error_type: Any, cond: torch.Tensor, message: Any = None) -> None:
        if threading.get_ident() != here:
            original(error_type, cond, message)

    torch._check_tensor_all_with = check
    try:
        yield
    finally:
        torch._check_tensor_all_with = original


def is_autocast_region(target: Any) -> bool:
    """Whether a node with that target runs a submodule of an exported graph under autocast."""
    return target is wrap_with_autocast


class Casts(TorchDispatchMode):
    """Counts the casts to `dtype` of each tensor, by id, while it is active."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.of: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self.dtype:
            self.of[id(args[0])] += 1
        return func(*args, **kwargs)


class OpsSeen(TorchDispatchMode):
    """The ops that run while it is active, with the ids of their operands; not questions to a tensor (its device)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.namespace != "prim":
            self.found.append((func, tuple(map(id, operands))))
        return func(*args, **(kwargs or {}))


def is_sum_of_gradients(node: Any) -> bool:
    """Whether a node of a joint graph adds two gradients of one tensor, as autograd's engine does."""
    return isinstance(node, fx.Node) and "is_gradient_acc" in node.meta and node.target is torch.ops.aten.add.Tensor


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced in its backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def global_module_hooks() -> bool:
    """Whether hooks are registered that run for every module there is, other than those by which torch's own counters
    (`FlopCounterMode`) keep track of which module runs: these change nothing, and a planned step is one module to them."""
    registered = (
        global_hooks._global_forward_hooks,
        global_hooks._global_forward_pre_hooks,
        global_hooks._global_backward_hooks,
        global_hooks._global_backward_pre_hooks,
    )
    return any(
        not isinstance(getattr(hook, "__self__", None), ModuleTracker)
        for hooks in registered
        for hook in hooks.values()
    )


def transform() -> str:
    """Kind of the innermost transform of torch.func that is running here: "Vmap", "Grad", "Jvp", ...; "": none."""
    functorch: Any = _C
    running = functorch._functorch.peek_interpreter_stack()
    return "" if running is None else running.key().name


def storage_key(t: torch.Tensor) -> int:
    """Equal for two tensors exactly when they share their storage (valid while both live)."""
    return t.untyped_storage()._cdata


def float32_in(backend: str, op: str) -> str:
    """What torch lets "cuda", "cudnn" or "mkldnn" compute a "matmul" or "conv" of float32 in: "tf32", "bf16", "ieee", "none".

    The older settings (`torch.set_float32_matmul_precision`, `allow_tf32`) set these, and raise when they are read after these
    were set.
    """
    backends: Any = torch.backends
    return getattr(getattr(backends, backend), op).fp32_precision


def disable_autocast() -> contextlib.AbstractContextManager[Any]:
    """No autocast in this block: the casts are already ops of the emitted graphs."""
    return torch._C._DisableAutocast()


def current_backward() -> int:
    """Number of the pass of autograd that is under way."""
    return torch._C._current_graph_task_id()


def runs_in_this_backward(node: Any) -> bool:
    """Whether the pass of autograd that is under way runs that node of its graph, or has run it."""
    return torch._C._will_engine_execute_node(node)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Autograd records nothing in this block, whatever the grad mode; a few kernels ask the mode whether they train."""
    return torch._C._AutoDispatchBelowAutograd()


def boxed_graph_module(root: Any, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule whose forward takes one list, empties it, and drops every value after its last use."""
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root, graph, name)


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """No tracing, fake or other dispatch mode in this block: tensors made here are real."""
    return _disable_current_modes()


# --- the profiler's memory events, without the rest of the profiler -------------------------------------------------


def profiler_running() -> bool:
    """Whether a torch profiler session is open in this thread (a second one would silently end the first)."""
    return bool(_native._profiler_enabled())


_quiet_lock = threading.Lock()


@contextlib.contextmanager
def _kineto_quiet() -> Iterator[None]:
    """Kineto logs start and stop, and the absence of a GPU, to stderr; it reads its level when it starts for the
    first time. A level that the user has set stays."""
    name = "KINETO_LOG_LEVEL"
    with _quiet_lock:
        unset = name not in os.environ
        if unset:
            os.environ[name] = "6"
        try:
            yield
        finally:
            if unset:
                os.environ.pop(name, None)


def start_memory_profile() -> None:
    """Begin recording every allocation and free of this thread's CPU work (its backward included), and nothing else:
    no op is recorded (the scope named here is one that ATen never uses), so a step costs a few ms more."""
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        _profiler._ExperimentalConfig(),
        "",
    )
    activities = {_profiler.ProfilerActivity.CPU}
    with _kineto_quiet():
        _native._prepare_profiler(config, activities)
        _native._enable_profiler(config, activities, {_profiler.RecordScope.USER_SCOPE})


def stop_memory_profile() -> list[tuple[int, int]]:
    """End the recording: (address, bytes) of every allocation (> 0) and free (< 0) on the CPU, in time order."""
    with _kineto_quiet():
        result = _native._disable_profiler()
    found: list[tuple[int, int, int]] = []
    stack = list(reversed(result.experimental_event_tree()))
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        if event.tag == _profiler._EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == "cpu":
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda e: e[0])  # stable: equal times keep the order of recording
    return [(ptr, size) for _, ptr, size in found]


# --- typed names for two public things that torch's stubs leave untyped ---------------------------------------------


def tree_map_only(kind: type | tuple[type, ...], fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every leaf of type `kind`."""
    return pytree.tree_map_only(kind, fn, tree)
