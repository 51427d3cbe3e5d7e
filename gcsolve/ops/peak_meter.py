"""Measured peak memory and step time: the numbers that predictions are held against.

On CPU the peak is the running sum of the allocator's own events (what `torch.profiler(profile_memory=True)` records),
so workspace that ops take and give back inside one call is seen. Not seen: memory that a library takes past torch's
allocator, allocations by other Python threads, and rounding (sizes are as asked for). On CUDA it is
`torch.cuda.max_memory_allocated`.
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
    """(peak, end) bytes of a list of (address, bytes) events, frees negative.

    A free counts only when the same address was allocated in the list: a tensor from before is not part of the sum,
    so giving it back must not make room in it. (The allocator's table may even hold a wrong size for such an address.)
    """
    live: dict[int, int] = {}
    now = peak = 0
    for address, size in events:
        if size > 0:
            # An address can only be handed out again after a free that was not recorded (another thread's).
            now += size - live.get(address, 0)
            live[address] = size
            peak = max(peak, now)
        else:
            now -= live.pop(address, 0)
    return peak, now


class PeakMeter:
    """Context manager: the most memory that was allocated inside and alive at one moment.

    Args:
        device: "cpu" or a CUDA device; what runs elsewhere is not counted.

    After the block: `peak_bytes`, `end_bytes` (what was allocated inside and is still alive at its end). Both are on
    top of what lived at entry. On CPU, a tensor from before that is freed inside makes no room in the count, so let
    nothing that matters die inside (set gradients to None before, not within).

    Raises:
        CallError: a torch profiler is running in this thread; the two cannot be on at once.

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
        self._before = 0

    def __enter__(self) -> PeakMeter:
        gc.collect()  # garbage from before must not be freed within: see above
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        if _torch.profiler_running():
            raise CallError("memory cannot be measured while a torch profiler is running in this thread; stop it first")
        _torch.start_memory_profile()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.end_bytes = torch.cuda.memory_allocated(self.device) - self._before
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
    """Seconds of each run of each callable, all of them run in turn in every round so that drift hits them alike.

    Args:
        callables: what to time.
        repeats: rounds; every second one runs in reverse order, and every two begin with another callable, as what ran
            before leaves the memory and the caches in its own state.
        warmup: untimed rounds before.
        device: where they run; on CUDA each run is waited for.
        clock: seconds; `time.process_time` (CPU seconds of all threads) is the one to trust on a busy machine.

    Returns:
        for each callable its seconds, one a round, in the order of the rounds.
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
    """Median seconds of each callable; `options` as for `interleaved_samples`."""
    return [statistics.median(s) for s in interleaved_samples(callables, repeats, **options)]
