"""Facts about one node of a joint graph: its tensors, its half of the step, whether it may run twice, where it comes from."""

from __future__ import annotations

import torch
from torch import fx

from gcsolve._torch import OpOverload, is_of_backward, storage_key
from gcsolve.capture.joint import MODEL_PREFIX, Joint
from gcsolve.util.source import is_user_file, shown_path

# Discrete choices: a rerun that breaks a tie differently would change the result.
_DISCRETE = {
    "topk", "sort", "argsort", "argmax", "argmin", "multinomial", "nonzero", "unique", "_unique2", "unique_dim",
    "unique_consecutive", "kthvalue", "mode", "median", "nanmedian", "msort", "randperm",
}  # fmt: skip

_FUSED_RECURRENT = "_rnn"
"""In the names of fused recurrent layers, whose kernels keep a buffer for backward only while gradients are recorded."""

_KNOWN_NAMESPACES = ("aten", "prims", "torchvision", "gcsolve")

# In training these normalize by the batch alone; the running statistics only go into the new running statistics, and
# those of a rerun are dropped. So a rerun gives the same values although the buffers have moved on since.
_BATCH_NORMS = ("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional")


# --- tensors --------------------------------------------------------------------------------------------------------------


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node makes (one, several, or none)."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def tensor_text(t: torch.Tensor) -> str:
    """dtype and shape, as in "float32[8, 32]"."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def is_view(node: fx.Node) -> bool:
    """Whether every tensor that the node makes lives in the storage of one of its inputs."""
    if node.op != "call_function":
        return False
    outputs = tensors_of(node)
    storages_read = {storage_key(t) for arg in node.all_input_nodes for t in tensors_of(arg)}
    return bool(outputs) and all(storage_key(t) in storages_read for t in outputs)


# --- forward or backward --------------------------------------------------------------------------------------------------


def backward_nodes(joint: Joint) -> set[fx.Node]:
    """The nodes of the backward: tangents, what depends on one, and what autograd added for the backward; but nothing that
    a result of the forward depends on."""
    backward = set(joint.tangent_nodes)
    for node in joint.graph_module.graph.nodes:
        if node.op == "call_function" and (
            is_of_backward(node) or any(arg in backward for arg in node.all_input_nodes)
        ):
            backward.add(node)
    stack = [n for n in joint.results[: joint.n_forward_outputs] if n is not None]
    while stack:
        node = stack.pop()
        backward.discard(node)
        stack.extend(arg for arg in node.all_input_nodes if arg in backward)
    return backward


# --- running twice --------------------------------------------------------------------------------------------------------


def may_rerun(node: fx.Node) -> bool:
    """Whether running the op again gives the same value and has no second effect."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _KNOWN_NAMESPACES:
        return False
    name = target._schema.name.split("::")[-1]
    return name not in _DISCRETE and _FUSED_RECURRENT not in name and not target._schema.is_mutable


def deciding_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that a rerun's values depend on: all of them, except the running statistics of a training BatchNorm."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.split("::")[-1] not in _BATCH_NORMS:
        return node.all_input_nodes
    arguments = {arg.name: value for arg, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    if arguments.get("training") is False:
        return node.all_input_nodes
    return [v for name, v in arguments.items() if isinstance(v, fx.Node) and not name.startswith("running_")]


# --- where it comes from --------------------------------------------------------------------------------------------------


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that the op ran in, as in `model.named_modules()`; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(MODEL_PREFIX) if path != MODEL_PREFIX[:-1] else ""


def source_line(node: fx.Node) -> str:
    """The innermost line of the user's code that called the op, as "file:line"; "" where the trace has not kept it."""
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        line = line.strip()
        if line.startswith('File "'):
            filename, _, rest = line[6:].partition('", line ')
            if is_user_file(filename):
                return f"{shown_path(filename)}:{rest.split(',')[0]}"
    return ""
