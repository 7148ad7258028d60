"""The same model, batch, rewards and settings give the same loss and gradient norm as TRL's own trainers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.peer.cases import SAME, WAYS

RELATIVE = 1e-5
PINS = Path(__file__).parent / "requirements.txt"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_norm_are_those_of_trl(same_as, name, way):
    theirs, ours = same_as(name, way)
    assert ours.loss == pytest.approx(theirs["loss"], rel=RELATIVE, abs=0)
    assert ours.norm == pytest.approx(theirs["norm"], rel=RELATIVE, abs=0)


@pytest.mark.parametrize("name", SAME)
def test_advantages_are_those_of_trl(same_as, name):
    theirs, ours = same_as(name, "own advantages")
    assert ours.advantages == pytest.approx(theirs["advantages"], rel=RELATIVE, abs=1e-7)


def test_the_table_tells_losses_apart(both):
    """No two cases of one batch have the same gradient by chance, or because a setting was not heard."""
    norms = {name: both.trl(name, "advantages given")["norm"] for name, case in SAME.items()}
    alike = {frozenset((one, two)) for one, two in itertools.combinations(SAME, 2)
             if norms[one] == pytest.approx(norms[two], rel=1e-4)}
    assert alike <= SAME_BY_MEANING, alike - SAME_BY_MEANING


SAME_BY_MEANING = {frozenset(pair) for pair in itertools.combinations(
    ("dapo", "bnpo, one micro-batch", "rewards by the batch's deviation", "rewards not scaled"), 2)}
"""With advantages given, and all tokens in one micro-batch."""


def test_it_was_the_pinned_trl(both):
    assert f"trl=={both.results['version']}" in PINS.read_text().splitlines()
