"""Schedules at the steps where they turn, by hand."""

from __future__ import annotations

import pytest

from rl_core.config import Config, LearnerConfig
from rl_core.schedules import is_scheduled_publication, last_scheduled, learning_rate, learning_rates, updates_before


def config(**learner) -> Config:
    return Config(total_steps=105, publish_every=4, groups_per_step=16, learner=LearnerConfig(lr=1.0, **learner))


SHAPES = {
    "constant after five steps of ramp": ({"decay": "constant"}, {0: 0.2, 3: 0.8, 4: 1.0, 5: 1.0, 500: 1.0}),
    "no ramp": ({"decay": "constant", "warmup_steps": 0}, {0: 1.0, 50: 1.0}),
    "a straight line to 5 %": ({"decay": "linear"}, {0: 0.2, 5: 1.0, 55: 0.525, 104: 0.0595, 105: 0.05, 300: 0.05}),
    "half a cosine to 10 %": ({"decay": "cosine", "final_lr_ratio": 0.1}, {5: 1.0, 55: 0.55, 105: 0.1, 300: 0.1}),
    "an end of its own": ({"decay": "linear", "decay_steps": 15, "final_lr_ratio": 0}, {5: 1.0, 10: 0.5, 15: 0.0}),
}


@pytest.mark.parametrize(("options", "expected"), SHAPES.values(), ids=SHAPES.keys())
def test_the_learning_rate_turns_where_it_should(options, expected):
    assert learning_rates(expected, config(**options)) == pytest.approx(list(expected.values()))


def test_the_learning_rate_scales_with_its_peak():
    tenth = Config(total_steps=105, learner=LearnerConfig(lr=0.1, decay="linear"))
    assert learning_rate(55, tenth) == pytest.approx(0.0525)


def test_publications_are_scheduled_every_k_steps_and_at_the_start():
    settings = config()
    assert [n for n in range(10) if is_scheduled_publication(n, settings)] == [0, 4, 8]
    assert [last_scheduled(n, settings) for n in (0, 3, 4, 11)] == [0, 0, 4, 8]


def test_updates_before_a_step_count_passes_and_minibatches():
    assert updates_before(10, config(passes=2, minibatch_groups=6)) == 10 * 2 * 3
