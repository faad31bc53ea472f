"""Does every rank get one seat, whole engines and tensor-parallel groups one node, and a job that does not fit one line?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpipe.policy.seating import Node, Seat, SeatingError, apart, parts, same_grouping, smallest_devices, together


def nodes(*devices: int, prefix: str = "n") -> list[Node]:
    return [Node(f"{prefix}{number}", count) for number, count in enumerate(devices, 1)]


def where(seats: list[Seat]) -> list[tuple[str, int]]:
    return [(seat.node, seat.device) for seat in seats]


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    engines=st.integers(1, 6),
    engine_tp=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
)
def test_every_rank_once_no_device_twice_no_unit_on_two_nodes(counts, engines, engine_tp, replicas, tp, pp, cp, ep):
    training = replicas * tp * pp * cp * ep
    both = parts(engines * engine_tp, engine_tp, training, tp, pp, cp, ep)
    have = nodes(*counts)
    try:
        seats = together(have, both)
    except SeatingError:
        return
    assert [seat.rank for seat in seats] == list(range(engines * engine_tp + training))
    assert len(set(where(seats))) == len(seats)
    for node in have:
        assert [d for name, d in where(seats) if name == node.name] == list(range(sum(s.node == node.name for s in seats)))
        assert sum(s.node == node.name for s in seats) <= node.devices
    for part in both:
        own = [seat for seat in seats if seat.role == part.role]
        for start in range(0, len(own), part.unit):
            assert len({seat.node for seat in own[start : start + part.unit]}) == 1
        members = [seat.member for seat in own]
        assert {m: members.count(m) for m in set(members)} == dict.fromkeys(range(part.members), part.ranks // part.members)


def test_an_engine_that_does_not_fit_behind_the_others_goes_to_the_next_node():
    seats = together(nodes(8, 8, 8), parts(12, 4, 8, 8, 1, 1, 1))
    assert [seat.node for seat in seats] == ["n1"] * 8 + ["n2"] * 4 + ["n3"] * 8  # tp 8 leaves four of n2 alone


def test_the_a800_cluster_is_filled_to_the_last_device():
    seats = together(nodes(*[8] * 6), parts(24, 4, 24, 4, 1, 1, 1))
    assert where(seats) == [(f"n{n}", d) for n in range(1, 7) for d in range(8)]
    assert [seat.member for seat in seats[::4]] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_a_replicas_pipeline_stages_lie_apart_as_megatron_numbers_them():
    seats = together(nodes(8), parts(0, 1, 8, 2, 2, 1, 1))
    assert [seat.member for seat in seats] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_that_share_experts_are_one_replica():
    seats = together(nodes(8), parts(0, 1, 8, 1, 2, 1, 2))
    assert [seat.member for seat in seats] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_components_of_a_heterogeneous_job_take_one_role_each():
    seats = apart((nodes(2, prefix="r"), nodes(4, 4, prefix="t")), parts(2, 2, 8, 4, 1, 1, 1))
    assert [seat.node for seat in seats] == ["r1"] * 2 + ["t1"] * 4 + ["t2"] * 4
    with pytest.raises(SeatingError, match=r"cluster.rollout_ranks = 4 \(engine.tp 2\) do not fit on 1 node of 2 devices"):
        apart((nodes(2), nodes(8)), parts(4, 2, 8, 4, 1, 1, 1))


def test_what_does_not_fit_is_told_what_would():
    with pytest.raises(SeatingError, match=r"training.tp 4\) do not fit on 5 nodes of 8 devices; wanted: sbatch --nodes=6"):
        together(nodes(*[8] * 5), parts(24, 4, 24, 4, 1, 1, 1))
    with pytest.raises(SeatingError, match=r"engine.tp = 16 does not fit into one node of 8 devices; wanted: at most 8"):
        together(nodes(8, 8), parts(16, 16, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("rollout, training, used", [(1, 2, 1), (2, 1, 1), (2, 4, 2), (1, 1, 1)])
def test_without_devices_ranks_are_spread_over_all_nodes(rollout, training, used):
    assert smallest_devices((["n1", "n2", "n3"],), parts(rollout, 1, training, 1, 1, 1, 1)) == used


def test_a_world_that_sits_otherwise_than_planned_is_seen():
    seats = together(nodes(2, 1), parts(1, 1, 2, 1, 1, 1, 1))
    assert same_grouping(seats, ["a", "a", "b"]) is None  # other names are not another plan
    assert same_grouping(seats, ["a", "b", "b"]) == (0, 1)
    assert same_grouping(seats, ["a", "a", "a"]) == (0, 2)
