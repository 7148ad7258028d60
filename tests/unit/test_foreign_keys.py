"""The map of other systems' settings: it leads to fields that exist, the documents show it, and people are answered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.presets import load_preset
from rl_core.config import field_kinds
from rl_core.errors import ConfigError
from rl_core.foreign_keys import FOREIGN_KEYS, NOT_HERE, answer, ours, table, unknown_targets
from rl_core.plan import parse_overrides, resolve

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
TINY = load_preset("tiny-cpu")
PAIRS = [(system, theirs, text) for system, names in FOREIGN_KEYS.items() for theirs, text in names.items()]


def refusal(*sets: str) -> str:
    """What somebody reads who sets these on top of tiny-cpu."""
    with pytest.raises(ConfigError) as refused:
        resolve(TINY, parse_overrides(sets))
    return str(refused.value)


def test_every_name_leads_to_a_field_of_ours_or_says_why_there_is_none() -> None:
    assert unknown_targets() == set()
    assert [theirs for _, theirs, text in PAIRS if not ours(text).fields and len(ours(text).note) < 8] == []
    assert {system: len(names) >= 40 for system, names in FOREIGN_KEYS.items()} == dict.fromkeys(
        ("verl", "TRL", "AReaL", "slime"), True)


@pytest.mark.parametrize("system", FOREIGN_KEYS)
def test_the_document_has_the_map_row_by_row(system: str) -> None:
    """If not: write what `table(system)` gives into docs/coming-from.md."""
    shown = re.search(rf"^\| {system} \| Headway \| note \|\n(?:\|.*\n)+", DOCUMENT.read_text(), re.MULTILINE)
    assert shown is not None
    assert shown.group() == table(system)
    rows = [line.split(" | ") for line in shown.group().splitlines()[2:]]
    assert [row[0].removeprefix("| ").strip("`") for row in rows] == list(FOREIGN_KEYS[system])
    assert all(len(row) == 3 for row in rows), "a bar inside a note"


@pytest.mark.parametrize("system", FOREIGN_KEYS)
def test_every_key_given_by_set_is_answered_with_our_name(system: str) -> None:
    known = field_kinds()
    wrong: list[str] = []
    for theirs, text in FOREIGN_KEYS[system].items():
        key = theirs.replace(".*", ".anything")
        if theirs in known:  # the same name in both: nothing to answer, and it must mean the same
            wrong += [theirs] if ours(text).fields != (theirs,) else []
            continue
        said = refusal(f"{key}=1")
        expected = [f"`{field}`" for field in ours(text).fields] or [ours(text).note]
        if not said.startswith(f"{key}: unknown here; ") or not all(part in said for part in expected):
            wrong.append(f"{theirs}: {said}")
    assert wrong == []


ANSWERS = {
    "under its full root": ("actor_rollout_ref.actor.ppo_epochs", "calls it `learner.passes`"),
    "under half of its root": ("actor.optim.lr", "calls it `learner.lr`"),
    "under one root more": ("config.actor_rollout_ref.rollout.n", "calls it `group_size`"),
    "without its root": ("ppo_mini_batch_size", "calls it `learner.minibatch_groups`"),
    "a flat name behind a root of ours": ("learner.num_generations", "calls it `group_size`"),
    "with a plus, as hydra adds keys": ("+data.seed", "calls it `seed`"),
    "with dashes in front": ("--rollout-batch-size", "calls it `groups_per_step`"),
    "with dashes": ("rollout-batch-size", "calls it `groups_per_step`"),
    "with underscores": ("rollout_batch_size", "calls it `groups_per_step`"),
    "below what is not here": ("cluster.name_resolve.etcd3_addr", "Ray finds its actors by name"),
    "a leaf that another part has, too": ("critic.optim.lr", "calls it `learner.critic.lr` and `learner.critic.path`"),
    "two fields": ("epsilon", "calls it `learner.loss.clip_low` and `learner.loss.clip_high`"),
    "what two systems mean differently": ("loss_type", "TRL's is `learner.loss.aggregation`: .*; slime's is "
                                                       "`learner.loss.name`"),
}


@pytest.mark.parametrize(("key", "said"), ANSWERS.values(), ids=ANSWERS)
def test_a_key_is_found_however_it_is_spelled(key: str, said: str) -> None:
    assert re.search(said, answer(key) or "")
    assert re.search(said, refusal(f"{key}=1"))


@pytest.mark.parametrize("key", ["learner.lrr", "n", "path", "enable", "learner.name", "data.num_workers", "nothing"])
def test_a_name_that_means_nothing_or_too_much_is_not_answered(key: str) -> None:
    assert answer(key) is None


def test_every_leaf_of_a_foreign_file_is_answered() -> None:
    said = refusal("actor.optim.lr=1", "actor.ppo_epochs=2", "reward.num_workers=3", "nothing.at.all=4")
    lines = said.splitlines()
    assert {line.split(":")[0] for line in lines} == {"actor.optim.lr", "actor.ppo_epochs", "reward.num_workers",
                                                      "nothing.at.all"}
    assert sum("unknown here; Headway calls it" in line for line in lines) == 3


def test_the_value_of_a_table_is_read() -> None:
    assert (ours("learner.lr").fields, ours("learner.lr").note) == (("learner.lr",), "")
    assert ours("a.b, c: of both").fields == ("a.b", "c")
    assert ours("a.b, c: of both").note == "of both"
    assert ours(f"{NOT_HERE}: why: so").fields == () and ours(f"{NOT_HERE}: why: so").note == "why: so"
