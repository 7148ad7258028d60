"""Weights of sources, and the rows of every dataset epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from rl_core.rollout.mixture import Mixture

MIXTURES: dict[str, tuple[list[int], list[float], int, list[list[int]], list[list[int]]]] = {
    # rows and weights of the sources, positions, prompt indices and rows of epochs 0 and 1 without shuffle
    "one source": ([3], [1.0], 3, [[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]),
    "two sources": ([2, 2], [1.0, 1.0], 4, [[0, 1, 2, 3]] * 2, [[0, 1, 2, 3]] * 2),
    "twice": ([2, 1], [2.0, 1.0], 5, [[0, 1, 2, 3, 4]] * 2, [[0, 1, 0, 1, 2]] * 2),
    "every second": ([4, 1], [0.5, 1.0], 3, [[0, 2, 4], [1, 3, 4]], [[0, 2, 4], [1, 3, 4]]),
    "once and a half": ([4], [1.5], 6, [[0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 5, 7]],
                        [[0, 1, 2, 3, 0, 2], [0, 1, 2, 3, 1, 3]]),
    "less than one row": ([3, 1], [0.1, 1.0], 2, [[0, 3], [1, 3]], [[0, 3], [1, 3]]),
    "a share that does not divide": ([5], [0.4], 2, [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize(("sizes", "weights", "positions", "indices", "rows"), MIXTURES.values(), ids=MIXTURES)
def test_an_epoch_takes_each_source_by_its_weight(sizes: list[int], weights: list[float], positions: int,
                                                  indices: list[list[int]], rows: list[list[int]]) -> None:
    mixture = Mixture(sizes, weights)
    assert mixture.positions == positions
    for epoch in (0, 1):
        order = mixture.order(1, epoch, shuffle=False).tolist()
        assert order == indices[epoch]
        assert [mixture.row(idx) for idx in order] == rows[epoch]


@pytest.mark.parametrize(("sizes", "weights"), [([7, 5, 11], [0.3, 2.6, 1.0]), ([100], [0.01]), ([10, 1], [3.25, 0.5])])
def test_no_index_stands_twice_in_an_epoch_and_every_row_has_its_turn(sizes: list[int], weights: list[float]) -> None:
    mixture = Mixture(sizes, weights)
    seen: Counter[int] = Counter()
    for epoch in range(100):
        order = mixture.order(1, epoch, shuffle=True).tolist()
        assert len(set(order)) == len(order) == mixture.positions
        assert all(0 <= idx < mixture.indices for idx in order)
        assert order == Mixture(sizes, weights).order(1, epoch, shuffle=True).tolist(), "a function of its arguments"
        seen.update(mixture.row(idx) for idx in order)
    assert set(seen) == set(range(sum(sizes)))
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        share = sum(seen[row] for row in range(first, first + size)) / (100 * size)
        assert share == pytest.approx(max(weight, 1 / size), abs=0.5 / size)
        first += size
