"""Is the slow link named, or the slow node?"""

from __future__ import annotations

import itertools

import pytest

from rpipe.doctor import link_rows
from rpipe.policy.links import Link, judge, rounds


def links(count: int, slow: set[tuple[str, str]] = frozenset(), rate: float = 10e9) -> list[Link]:  # type: ignore[assignment]
    names = [f"n{i}" for i in range(1, count + 1)]
    return [Link(a, b, rate / (4 if (a, b) in slow else 1)) for a, b in itertools.combinations(names, 2)]


def all_of(node: str, count: int) -> set[tuple[str, str]]:
    names = [f"n{i}" for i in range(1, count + 1)]
    return {pair for pair in itertools.combinations(names, 2) if node in pair}


@pytest.mark.parametrize("count", [3, 4, 6, 20])
def test_a_node_all_of_whose_links_are_slow_is_named(count):
    verdict = judge(links(count, all_of("n3", count)))
    assert verdict.slow_nodes == ("n3",) and verdict.slow_links == ()


@pytest.mark.parametrize("count", [3, 4, 20])
def test_a_link_alone_is_named_as_a_link(count):
    verdict = judge(links(count, {("n1", "n2")}))
    assert verdict.slow_nodes == () and [link.name for link in verdict.slow_links] == ["n1 - n2"]


def test_two_bad_nodes_of_six_are_both_named():
    assert judge(links(6, all_of("n1", 6) | all_of("n5", 6))).slow_nodes == ("n1", "n5")


@pytest.mark.parametrize("count", [2, 3, 6])
def test_links_that_are_alike_are_fine(count):
    verdict = judge(links(count))
    assert verdict.slow_nodes == () and verdict.slow_links == () and verdict.median_bytes_per_s == 10e9


@pytest.mark.parametrize("count", [2, 3, 4, 7, 20])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count):
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)


def test_doctor_says_which_and_what_to_look_at():
    rows = link_rows(links(4, all_of("n2", 4)), 2e9, "gloo")
    assert rows[0].state == "wrong" and "6 pairs over gloo: median 6.25 GB/s, slowest 2.50 GB/s; node n2" in rows[0].found
    assert link_rows(links(4), 2e9, "gloo")[0].state == "ok"
