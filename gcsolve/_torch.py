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
import torch.distributions
import torch.utils._pytree as pytree
from torch import _C, fx
from torch._C import _autograd, _profiler
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors as aot_descriptors
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import _symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

__all__ = [
    "BACKWARD_AUTOCAST_SETTING",
    "DISTRIBUTION_CHECKS",
    "EFFECT_OF_OP",
    "EXPORT_SWITCHES",
    "GENERATOR_STATE_KEPT",
    "KERNELS_OF_OP",
    "KERNEL_CACHE_OF_OP",
    "METHODS_OF_FX",
    "MOCK_IN_AOT",
    "PACK_PADDED_SEQUENCE",
    "RANDOM_OPS_SETTING",
    "UNREAD_DRAWS_SETTING",
    "VALUE_CHECK",
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
    "aot_export_joint_with_descriptors",
    "below_autograd",
    "boxed_graph_module",
    "current_backward",
    "disable_autocast",
    "enter_as_no_grad",
    "forward_metadata",
    "functorch_config",
    "global_module_hooks",
    "is_autocast_region",
    "is_compiled",
    "is_compiled_in_place",
    "is_of_backward",
    "is_step_of_vmap",
    "is_sum_of_gradients",
    "kernels_looked_up",
    "no_modes",
    "op_name",
    "profiler_running",
    "pytree",
    "rewritten_for_cpu",
    "rewritten_ops",
    "runs_in_this_backward",
    "start_memory_profile",
    "stop_memory_profile",
    "storage_key",
    "tracing",
    "tracing_here",
    "transform",
    "tree_map_only",
    "view_like",
    "weights_cast",
    "with_kernel",
]

_native: Any = _autograd  # its stubs are behind its signatures


def view_like(op: OpOverload) -> bool:
    """Whether `op` only returns views of its inputs, by its schema (no storage is made, nothing is written)."""
    returns = [r.alias_info for r in op._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


# --- tracing and emitting -------------------------------------------------------------------------------------------


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


def is_autocast_region(target: Any) -> bool:
    """Whether a node with that target runs a submodule of an exported graph under autocast."""
    return target is wrap_with_autocast


class Casts(TorchDispatchMode):
    """`of`: id of a tensor -> number of its casts to `dtype` while the mode is active."""

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
    """`calls`: the ops that run while it is active, with the ids of their operands; not questions to a tensor (its device)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.namespace != "prim":
            self.calls.append((func, tuple(map(id, operands))))
        return func(*args, **(kwargs or {}))


def is_sum_of_gradients(node: Any) -> bool:
    """Whether a node of a joint graph adds two gradients of one tensor, as autograd's engine does."""
    return isinstance(node, fx.Node) and "is_gradient_acc" in node.meta and node.target is torch.ops.aten.add.Tensor


def forward_metadata(captured: Any) -> Any:
    """AOTAutograd's account of the inputs and outputs of the forward that it captured."""
    return captured._aot_state.fw_metadata


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


def is_step_of_vmap(function: Any) -> bool:
    """Whether it is one of the functions that torch itself calls around a vmap."""
    return getattr(function, "__module__", "") == "torch._functorch.predispatch"


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


_of_thread = threading.local()  # `tracing`: this thread traces a step


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """In this block, this thread is the one that traces."""
    before = getattr(_of_thread, "tracing", False)
    _of_thread.tracing = True
    try:
        yield
    finally:
        _of_thread.tracing = before


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """No tracing, fake or other dispatch mode in this block: tensors made here are real.

    torch keeps the modes that see an op before autograd does for the whole process: a thread that neither traces nor has a
    mode of its own must leave them alone, for they are another thread's trace.
    """
    if getattr(_of_thread, "tracing", False) or torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return contextlib.nullcontext()


# --- what a trace replaces in torch (`capture/patches.py` says by what, and why): owner and name --------------------------


def _export() -> Any:
    from torch.export import _trace  # takes a second to import, and not every use of gcsolve traces

    return _trace


def _inductor_settings() -> type:
    from torch._inductor import config  # takes a second to import

    return type(config)


VALUE_CHECK = (torch, "_check_tensor_all_with")
DISTRIBUTION_CHECKS = (torch.distributions.Distribution, "_validate_args")
EFFECT_OF_OP = (lambda: sys.modules["torch._higher_order_ops.effects"], "_get_effect")
EXPORT_SWITCHES = (_export, ("_ignore_backend_decomps", "_compiling_state_context", "_override_builtin_ops"))
METHODS_OF_FX = (_symbolic_trace._Patcher, "patch_method")
GENERATOR_STATE_KEPT = (aot_autograd, "preserve_rng_state")
MOCK_IN_AOT = (aot_autograd, "patch")
RANDOM_OPS_SETTING = (type(functorch_config), "functionalize_rng_ops")
BACKWARD_AUTOCAST_SETTING = (type(functorch_config), "backward_pass_autocast")
UNREAD_DRAWS_SETTING = (_inductor_settings, "fallback_random")

PACK_PADDED_SEQUENCE: Any = getattr(torch, "_pack_padded_sequence")  # noqa: B009 -- its stubs hide it

_REWRITTEN = re.compile(r"_?upsample_.*|matmul|multi_margin_loss|multilabel_margin_loss_forward")
_REWRITTEN_FOR_CPU = re.compile(r"lstm|rnn_tanh|rnn_relu|gru|gru_cell|bilinear")
_REWRITING_KEYS = (_C.DispatchKey.Autograd, _C.DispatchKey.CompositeImplicitAutograd)


def rewritten_ops() -> list[OpOverload]:
    """The ops that torch writes in terms of others while it traces, though eager runs a kernel of their own."""
    return _ops_named(_REWRITTEN)


def rewritten_for_cpu() -> list[OpOverload]:
    """Of recurrent layers and bilinear maps, the same: these have kernels of their own on the CPU alone."""
    return _ops_named(_REWRITTEN_FOR_CPU)


def _ops_named(names: re.Pattern[str]) -> list[OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if names.fullmatch(name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


KERNELS_OF_OP, KERNEL_CACHE_OF_OP = "py_kernels", "_dispatch_cache"


def with_kernel(kernels: Mapping[Any, Any], kernel: Callable[..., Any] | None) -> dict[Any, Any]:
    """An op's `KERNELS_OF_OP` without what torch would write in its place; instead of that, `kernel`, unless it is None."""
    others = {key: rewriting for key, rewriting in kernels.items() if key not in _REWRITING_KEYS}
    return others if kernel is None else others | dict.fromkeys(_REWRITING_KEYS, kernel)


@contextlib.contextmanager
def kernels_looked_up(op: OpOverload) -> Iterator[None]:
    """In this block torch looks the kernels of the op up at every call, in place of remembering them for all threads."""
    remembered = op._dispatch_cache
    op._dispatch_cache = _Forgetful()
    try:
        yield
    finally:
        remembered.clear()
        op._dispatch_cache = remembered


class _Forgetful(dict[Any, Any]):
    """torch's C++ reads it past these methods: only a dictionary that stays empty answers every thread rightly."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def enter_as_no_grad(mode: torch.inference_mode) -> None:
    """`mode.__enter__()`, of a `torch.no_grad` in place of an inference mode; its own `__exit__` ends it."""
    state: Any = mode
    state._inference_mode_context = torch.set_grad_enabled(not mode.mode)


def op_name(op: Any) -> str:
    """As "aten::add"; "" of what is no op of torch's dispatcher."""
    return op.name().partition(".")[0] if isinstance(op, OpOverload) else ""


# --- the profiler's memory events, without the rest of the profiler -------------------------------------------------


def profiler_running() -> bool:
    """Whether a torch profiler session is open in this thread (a second one would silently end the first)."""
    return bool(_native._profiler_enabled())


_quiet_lock = threading.Lock()
_recording = threading.RLock()


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
    no op is recorded (the scope named here is one that ATen never uses), so a step costs a few ms more.

    Two recordings at once would lose each other's events: another thread's waits until this one is stopped.
    """
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
    _recording.acquire()
    try:
        with _kineto_quiet():
            _native._prepare_profiler(config, activities)
            _native._enable_profiler(config, activities, {_profiler.RecordScope.USER_SCOPE})
    except BaseException:
        _recording.release()
        raise


def stop_memory_profile() -> list[tuple[int, int]]:
    """End the recording: (address, bytes) of every allocation (> 0) and free (< 0) on the CPU, in time order."""
    try:
        with _kineto_quiet():
            result = _native._disable_profiler()
    finally:
        _recording.release()
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
