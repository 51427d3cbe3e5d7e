"""What of the devices is on this machine: whether a device is here, and how much of its memory is free now."""

from __future__ import annotations

import contextlib

import torch

from gcsolve.cost.devices import DeviceSpec, get_device


def is_here(device: DeviceSpec) -> bool:
    """Whether this machine can run what would run on `device`."""
    return device.kind == "cpu" or (torch.cuda.is_available() and get_device("cuda").name == device.name)


def free_memory_bytes(device: DeviceSpec) -> int:
    """Bytes that could be allocated on `device` now; a quarter of its memory where the system does not tell."""
    if device.kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return device.memory_bytes // 4
