"""memo: results are kept for all threads, the ones used last, in a limited number."""

from __future__ import annotations

import threading

from gcsolve.util.memo import Memo


def test_a_result_is_computed_once() -> None:
    memo, calls = Memo[int | None](size=10), []

    def compute() -> int | None:
        calls.append(1)
        return None

    assert [memo.recall("key", compute) for _ in range(3)] == [None] * 3  # None is a result too
    assert len(calls) == 1
    assert "key" in memo
    assert "other" not in memo


def test_the_results_used_last_are_kept() -> None:
    memo = Memo[int](size=2)
    memo.keep("a", 1)
    memo.keep("b", 2)
    assert memo.get("a") == 1  # used again, so b is the oldest
    memo.keep("c", 3)
    assert (len(memo), memo.get("a"), memo.get("b"), memo.get("c")) == (2, 1, None, 3)
    memo.recall("a", lambda: 0)
    memo.recall("d", lambda: 4)
    assert ("a" in memo, "c" in memo, "d" in memo) == (True, False, True)
    memo.clear()
    assert len(memo) == 0


def test_the_first_result_stays() -> None:
    memo = Memo[int](size=2)
    assert (memo.keep("a", 1), memo.keep("a", 2), memo.recall("a", lambda: 3)) == (1, 1, 1)


def test_threads_get_the_same_results_and_no_more_are_kept() -> None:
    few, many, start = Memo[int](size=50), Memo[object](size=5000), threading.Barrier(4)
    results: list[list[object]] = []

    def use() -> None:
        start.wait(10)
        assert [few.recall(k % 60, lambda k=k: k % 60) for k in range(3000)] == [k % 60 for k in range(3000)]
        results.append([many.recall(k, object) for k in range(3000)])

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(few) == 50
    assert len(results) == 4
    assert all(result is first for list_ in results for result, first in zip(list_, results[0], strict=True))
