"""Which devices this machine has, and how much of their memory is free now."""

from __future__ import annotations

import contextlib

import torch

from gcsolve.cost.devices import DeviceSpec, get_device


def is_here(device: DeviceSpec) -> bool:
    """Whether `device` is this machine's: a CPU always, a GPU if it is of the same model."""
    return device.kind == "cpu" or (torch.cuda.is_available() and get_device("cuda").name == device.name)


def free_memory_bytes(device: DeviceSpec) -> int:
    """Bytes that can be allocated on `device` now; a quarter of its memory if the system does not report them."""
    if device.kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return device.memory_bytes // 4
