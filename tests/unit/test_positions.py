from __future__ import annotations

import itertools

import numpy as np
import pytest

from rl_core.experience.positions import FINISHED, Positions, Slot


def slot(position: int, try_no: int = 0, epoch: int = 0) -> Slot:
    return Slot(dataset_epoch=epoch, position=position, try_no=try_no)


def opened(n: int = 3, epochs: int | None = 1) -> Positions:
    positions = Positions()
    positions.open(n, epochs)
    return positions


def drain(positions: Positions, most: int = 100) -> list[Slot]:
    taken: list[Slot] = []
    while len(taken) < most and (next_slot := positions.take()) is not None:
        taken.append(next_slot)
    return taken


def test_positions_are_leased_in_order_over_all_dataset_epochs() -> None:
    positions = opened(2, 2)
    assert drain(positions) == [slot(0), slot(1), slot(0, epoch=1), slot(1, epoch=1)]
    assert positions.exhausted


def test_endless_data_is_never_exhausted() -> None:
    positions = opened(2, None)
    assert drain(positions, 5)[-1] == slot(0, epoch=2)
    assert not positions.exhausted


def test_nothing_is_leased_before_the_prompts_are_known() -> None:
    positions = Positions()
    assert positions.take() is None and not positions.exhausted


def test_an_ended_try_is_followed_by_the_next_and_a_lost_one_by_itself() -> None:
    positions = opened()
    assert positions.take() == slot(0)
    assert positions.take() == slot(1)
    positions.ended(slot(1))
    positions.lost(slot(0))
    assert not positions.exhausted and positions.waiting_again == 2
    assert drain(positions) == [slot(0), slot(1, 1), slot(2)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_facts_may_be_told_in_any_order(order: tuple[int, ...]) -> None:
    """Try 0 dropped, try 1 failed, try 2 landed: nothing is to be leased again."""
    positions = opened()
    facts = [lambda: positions.ended(slot(1)), lambda: positions.ended(slot(1, 1)), lambda: positions.known(slot(1, 2))]
    for i in order:
        facts[i]()
    assert positions.try_of(0, 1) == 2
    assert drain(positions) == [slot(0), slot(2)]


@pytest.mark.parametrize("finish_first", [True, False])
def test_a_finished_position_is_never_leased_again(finish_first: bool) -> None:
    positions = opened()
    facts = [lambda: positions.known_array(np.array([0], np.int32), np.array([1])), lambda: positions.ended(slot(1))]
    for fact in facts if finish_first else reversed(facts):
        fact()
    positions.lost(slot(1))
    assert positions.try_of(0, 1) == FINISHED
    assert drain(positions) == [slot(0), slot(2)]


def test_tries_over_the_limit_are_listed_to_be_given_up() -> None:
    positions = opened()
    positions.ended(slot(1, 2))
    assert positions.over(3) == [slot(1, 3)]
    positions.finished(slot(1, 3))
    assert positions.over(3) == [] and drain(positions) == [slot(0), slot(2)]


def test_candidates_are_the_places_where_an_adopted_group_may_be() -> None:
    positions = opened(5)
    drain(positions, 2)
    positions.ended(slot(0))
    assert positions.candidates(0, 0) == [2, 3, 4]
    assert positions.candidates(0, 1) == [0]
