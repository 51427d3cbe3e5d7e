"""Measured peak memory and run time of code: the figures that predictions are compared with.

On CPU the peak is the largest running sum of the allocator's own events (what `torch.profiler(profile_memory=True)`
records), so it includes workspace that an op allocates and frees inside one call. It does not include memory that a library
allocates without torch's allocator, allocations by other Python threads, and rounding (sizes are those requested). On CUDA
the peak is `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from gcsolve import _torch
from gcsolve.errors import CallError


def peak_of_events(events: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(largest, last) value of the running sum of allocated bytes.

    Args:
        events: (address, bytes) of each allocation (bytes > 0) and each free (bytes < 0), in order.

    A free counts only if the same address was allocated within `events`. The running sum does not include a tensor from
    before, so freeing it must not lower the sum. (The allocator's table may even hold a wrong size for such an address.)
    """
    live_bytes: dict[int, int] = {}  # by address
    total_bytes = peak_bytes = 0
    for address, size in events:
        if size > 0:
            # An address is allocated twice only if a free between was not recorded (another thread's).
            total_bytes += size - live_bytes.get(address, 0)
            live_bytes[address] = size
            peak_bytes = max(peak_bytes, total_bytes)
        else:
            total_bytes -= live_bytes.pop(address, 0)
    return peak_bytes, total_bytes


class PeakMeter:
    """Context manager that measures the peak of the memory allocated within its block.

    Args:
        device: "cpu" or a CUDA device; allocations on other devices are not counted.

    Attributes:
        peak_bytes: the most bytes that were allocated within the block and alive at one moment, set when the block ends.
        end_bytes: the bytes that were allocated within the block and are alive at its end, set when the block ends.

    Neither includes what was alive when the block began. On CPU, freeing a tensor from before the block does not lower
    the count, so free such tensors before the block (set gradients to None before, not within).

    Raises:
        CallError: a torch profiler is running in this thread; two cannot run at once.

    Examples:
        >>> with PeakMeter() as meter:
        ...     x = torch.ones(1000)
        >>> meter.peak_bytes
        4000
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.end_bytes = 0
        self._entry_bytes = 0

    def __enter__(self) -> PeakMeter:
        gc.collect()  # garbage that is freed within the block would not lower the count
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._entry_bytes = torch.cuda.memory_allocated(self.device)
            return self
        if _torch.profiler_running():
            raise CallError("memory cannot be measured while a torch profiler is running in this thread; stop it first")
        _torch.start_memory_profile()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._entry_bytes
            self.end_bytes = torch.cuda.memory_allocated(self.device) - self._entry_bytes
            return
        self.peak_bytes, self.end_bytes = peak_of_events(_torch.stop_memory_profile())


def interleaved_samples(
    callables: Sequence[Callable[[], Any]],
    repeats: int = 5,
    *,
    warmup: int = 1,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of each run of each callable. Every round runs all of them, so that a machine's drift affects all alike.

    Args:
        callables: the functions to time.
        repeats: timed rounds. Every second round runs in reverse order, and every pair of rounds begins with another
            callable, because a run depends on the memory and the caches that the run before it leaves.
        warmup: untimed rounds before.
        device: where they run; on CUDA the clock stops when the device has finished.
        clock: returns seconds; `time.process_time` (CPU seconds of all threads) is more reliable on a busy machine.

    Returns:
        a list for each callable: its seconds in each round, in the order of the rounds.
    """

    def finish() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    seconds: list[list[float]] = [[] for _ in callables]
    for round_ in range(-warmup, repeats):
        start = round_ // 2 % max(1, len(callables))
        order = [*range(start, len(callables)), *range(start)]
        for i in order if round_ % 2 == 0 else reversed(order):
            finish()
            started = clock()
            callables[i]()
            finish()
            if round_ >= 0:
                seconds[i].append(clock() - started)
    return seconds


def interleaved_times(callables: Sequence[Callable[[], Any]], repeats: int = 5, **options: Any) -> list[float]:
    """Median seconds of each callable; `options`: the keyword arguments of `interleaved_samples`."""
    return [statistics.median(samples) for samples in interleaved_samples(callables, repeats, **options)]
