"""ops/peak_meter.py: peaks of allocations whose sizes are known, and interleaved timing."""

from __future__ import annotations

import threading

import pytest
import torch

from gcsolve.errors import CallError
from gcsolve.ops.peak_meter import PeakMeter, interleaved_times, peak_of_events

KB = 1 << 10


def test_events_sum_in_order():
    events = [(1, 100), (2, 50), (1, -100), (3, 70), (2, -50)]
    assert peak_of_events(events) == (150, 70)


def test_events_of_tensors_from_before_are_left_out():
    # The allocator's table can hold a stale size for an address that this list never allocated.
    assert peak_of_events([(9, -1000), (1, 100), (1, -100)]) == (100, 0)


def test_address_given_out_twice_counts_once():
    assert peak_of_events([(1, 100), (1, 60)]) == (100, 60)


def test_known_allocations():
    with PeakMeter() as meter:
        a = torch.empty(3 * KB, dtype=torch.uint8)
        b = torch.empty(5 * KB, dtype=torch.uint8)
        del a
        c = torch.empty(1 * KB, dtype=torch.uint8)
    assert meter.peak_bytes == 8 * KB
    assert meter.end_bytes == 6 * KB
    del b, c


def test_nothing_allocated():
    with PeakMeter() as meter:
        pass
    assert (meter.peak_bytes, meter.end_bytes) == (0, 0)


def test_workspace_inside_an_op_is_seen():
    values = torch.ones(1000, 1000)
    mask = torch.zeros(1000, 1000, dtype=torch.bool)
    with PeakMeter() as meter:
        product = values * mask  # on CPU the mask is cast to float32 first, inside the op
    assert meter.end_bytes == product.nbytes
    assert meter.peak_bytes >= 2 * product.nbytes


@pytest.mark.filterwarnings("ignore")
def test_free_of_an_older_tensor_makes_no_room():
    unprofiled = torch.empty(100 * KB, dtype=torch.uint8)
    with PeakMeter():
        profiled = torch.empty(200 * KB, dtype=torch.uint8)
    with PeakMeter() as meter:
        del unprofiled, profiled
        kept = torch.empty(3 * KB, dtype=torch.uint8)
    assert (meter.peak_bytes, meter.end_bytes) == (3 * KB, 3 * KB)
    del kept


def test_training_step_peak_by_hand():
    """Forward keeps h; backward makes h's gradient, then both weight gradients."""
    n = 256
    x, w1, w2 = (torch.randn(n, n, requires_grad=i > 0) for i in range(3))
    with PeakMeter() as meter:
        ((x @ w1) @ w2).backward(torch.ones(n, n))
    square = n * n * 4
    assert meter.end_bytes == 2 * square
    # alive at once: the passed gradient, h, grad of w2, grad of h (the output itself is dropped on the way)
    assert meter.peak_bytes in (4 * square, 5 * square)
    assert w1.grad is not None
    assert w2.grad is not None


def test_measuring_twice_gives_the_same():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))
    x = torch.randn(32, 64)
    peaks = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with PeakMeter() as meter:
            model(x).sum().backward()
        peaks.append((meter.peak_bytes, meter.end_bytes))
    assert len(set(peaks)) == 1


def test_meter_does_not_touch_the_random_state():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with PeakMeter():
        torch.empty(10)
    assert torch.equal(before, torch.get_rng_state())


def test_refuses_under_a_profiler():
    with torch.profiler.profile(acc_events=True), pytest.raises(CallError, match="profiler"), PeakMeter():
        pass


def test_error_inside_stops_the_recording():
    with pytest.raises(ZeroDivisionError), PeakMeter():
        raise ZeroDivisionError
    with PeakMeter() as meter:
        x = torch.empty(KB, dtype=torch.uint8)
    assert meter.peak_bytes == KB
    del x


def test_other_python_threads_do_not_corrupt_the_count():
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.empty(64 * KB, dtype=torch.uint8)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        with PeakMeter() as meter:
            for _ in range(200):
                x = torch.empty(KB, dtype=torch.uint8)
                del x
    finally:
        stop.set()
        thread.join()
    assert meter.peak_bytes == KB
    assert meter.end_bytes == 0


def test_quiet(capfd):
    with PeakMeter():
        torch.empty(KB)
    assert capfd.readouterr() == ("", "")


def test_interleaved_times_runs_in_turn():
    ran: list[str] = []
    times = interleaved_times([lambda: ran.append("a"), lambda: ran.append("b")], repeats=3, warmup=1)
    assert len(times) == 2
    assert all(t >= 0 for t in times)
    assert ran == ["a", "b", "a", "b", "b", "a", "b", "a"]


def test_interleaved_rounds_begin_with_each_in_turn():
    ran: list[int] = []
    interleaved_times([lambda i=i: ran.append(i) for i in range(3)], repeats=6, warmup=0)
    assert ran == [0, 1, 2, 2, 1, 0, 1, 2, 0, 0, 2, 1, 2, 0, 1, 1, 0, 2]


def test_interleaved_times_reads_the_given_clock():
    ticks = iter([0.0, 1.0, 10.0, 15.0, 20.0, 22.0])
    assert interleaved_times([lambda: None], repeats=3, warmup=0, clock=lambda: next(ticks)) == [2.0]


@pytest.mark.gpu
def test_cuda_peak():
    with PeakMeter("cuda") as meter:
        a = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        del a
        b = torch.empty(1 << 19, dtype=torch.uint8, device="cuda")
    assert meter.peak_bytes == 1 << 20
    assert meter.end_bytes == 1 << 19
    del b
