from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsolve.errors import InvalidSchedule
from gcsolve.schedule import Compute, Free, Schedule, schedule_from_order
from gcsolve.simulate import simulate
from tests.graphs import once_and_pinned, training_chain
from tests.oracles import Broken, slow_simulate
from tests.strategies import orders, problems


def schedule(*actions: str) -> Schedule:
    """ "3" runs node 3, "-3" frees value 3."""
    return Schedule(tuple(Free(int(a[1:])) if a.startswith("-") else Compute(int(a)) for a in actions))


def test_a_chain_by_hand():
    problem = training_chain(2, 99)  # values 4, 4, 1, 1
    replay = simulate(problem, schedule("0", "1", "2", "-1", "3", "-0", "-2", "-3"))
    assert replay.bytes_at == (4, 8, 9, 5, 6, 2, 1, 0)
    assert (replay.peak_bytes, replay.peak_action, replay.cost, replay.overhead) == (9, 2, 4.0, 0.0)


def test_a_rerun_costs_and_the_breakdown_sums_to_the_peak():
    problem = once_and_pinned(99)
    replay = simulate(problem, schedule_from_order(problem.graph, (0, 1, 2, 3, 4, 1, 5, 6, 7)))
    assert replay.overhead == pytest.approx(2 / 6)
    assert replay.peak_bytes == 33
    assert dict(replay.breakdown) == {"parameters": 10, "activations": 20, "workspace": 3}
    stored = simulate(problem, schedule_from_order(problem.graph, range(8)))
    assert dict(stored.breakdown) == {"parameters": 10, "activations": 14, "workspace": 12}


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (("1",), "n1 reads n0, which is not live"),
        (("0", "-0", "1"), "n1 reads n0"),
        (("-0",), "frees n0, which is not live"),
        (("0", "0"), "makes n0, which is live already"),
        (("0", "1", "2", "2"), "n2 may run only once"),
        (("0", "1", "2"), "n3 never runs"),
        ((), "n0 never runs"),
    ],
)
def test_a_broken_schedule_is_refused_by_name(actions, says):
    with pytest.raises(InvalidSchedule, match=says):
        simulate(training_chain(2, 99), schedule(*actions))


def test_a_pinned_value_stays_until_its_last_reader_has_run():
    with pytest.raises(InvalidSchedule, match="result, which is pinned"):
        simulate(once_and_pinned(99), schedule("0", "1", "2", "3", "-3"))


@given(problems(), st.data())
def test_the_fast_and_the_slow_simulator_agree(problem, data):
    order = data.draw(orders(problem))
    actions = list(schedule_from_order(problem.graph, order).actions)
    for _ in range(data.draw(st.integers(0, 2))):  # now and then disturbed
        at = data.draw(st.integers(0, len(actions) - 1)) if actions else 0
        kind = data.draw(st.sampled_from(["drop", "double", "swap"]))
        if not actions:
            break
        if kind == "drop":
            del actions[at]
        elif kind == "double":
            actions.insert(at, actions[at])
        else:
            actions[at], actions[at - 1] = actions[at - 1], actions[at]
    played = Schedule(tuple(actions))
    try:
        peak, cost = slow_simulate(problem, played.as_tuples())
    except Broken:
        with pytest.raises(InvalidSchedule):
            simulate(problem, played)
        return
    replay = simulate(problem, played)
    assert replay.peak_bytes == peak
    assert replay.cost == pytest.approx(cost)
    assert max(replay.bytes_at, default=0) <= replay.peak_bytes
    assert sum(size for _, size in replay.breakdown) == replay.peak_bytes
    assert replay.overhead == pytest.approx((cost - problem.total_cost) / (problem.total_cost or 1.0))
