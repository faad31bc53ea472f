"""Selection: the first R that the filter keeps, whatever answers first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpipe.control.selection import Selection


@given(st.data(), st.integers(1, 6), st.integers(0, 3), st.integers(0, 6), st.sets(st.integers(0, 14)))
def test_the_first_kept_by_submission_order_are_selected_whatever_is_answered_first(data, wanted, ahead, refill, refused):
    random = data.draw(st.randoms(use_true_random=False))
    selection = Selection(wanted, ahead, refill)
    selection.drew(wanted + ahead)
    open_orders, to_draw, selected = list(range(wanted + ahead)), 0, set(range(wanted))
    while open_orders or to_draw:
        if to_draw and (not open_orders or random.random() < 0.5):
            open_orders += range(selection.drawn, selection.drawn + to_draw)
            selection.drew(to_draw)
            to_draw = 0
            selected |= {order for order in range(selection.drawn) if selection.needs(order)}
            continue
        order = open_orders.pop(random.randrange(len(open_orders)))
        if order in refused:
            selected |= set(selection.refuse(order))
            selected.discard(order)
            to_draw += selection.ask()
        assert selection.selected <= wanted and selection.drawn + to_draw <= wanted + ahead + refill
        assert selected == {o for o in range(selection.drawn) if selection.needs(o)}
    kept = [order for order in range(selection.drawn) if order not in refused]
    assert sorted(selected) == kept[:wanted]
    assert selection.final and (len(selected) == wanted or selection.drawn == selection.most)
    trained = [order for order in range(selection.most) if order not in refused][:wanted]
    end = trained[-1] + 1 if len(trained) == wanted else selection.most
    assert selection.drawn == min(end + ahead, selection.most), "as many, whatever is answered first"


def test_a_group_beyond_r_is_needed_only_when_one_before_it_is_dropped():
    selection = Selection(wanted=2, ahead=1)
    selection.drew(3)
    assert [selection.needs(order) for order in range(3)] == [True, True, False]
    assert selection.refuse(0) == [2] and selection.needs(2)


def test_no_more_is_asked_for_than_the_limit_allows():
    selection = Selection(wanted=2, refill=1)
    selection.drew(2)
    selection.refuse(0)
    assert selection.ask() == 1 and selection.ask() == 0
    selection.drew(1)
    selection.refuse(1)
    assert selection.ask() == 0 and selection.final and selection.selected == 1


def test_one_that_is_dropped_before_its_turn_comes_is_not_replaced_until_it_comes():
    selection = Selection(wanted=2, ahead=1, refill=2)
    selection.drew(3)
    assert selection.refuse(2) == [] and selection.ask() == 0, "0 and 1 may be kept: then 2 would not have been looked at"
    assert selection.refuse(0) == [] and selection.ask() == 2, "2 was its replacement"
    selection.drew(2)
    assert selection.needs(3) and not selection.needs(4)
