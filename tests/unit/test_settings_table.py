"""`headway settings` and docs/settings.md: every setting, once for each meaning, with what may be written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.config import field_kinds
from rl_core.errors import ConfigError
from rl_core.settings_table import Setting, markdown, settings

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def one(name: str, *only: str) -> Setting:
    [found] = [row for row in settings() if row.name == name and (not only or row.only == only)]
    return found


def test_every_setting_is_there_with_its_kind_and_says_what_it_is() -> None:
    rows = [row for row in settings() if "[]" not in row.name]
    assert {row.name: row.kind for row in rows} == field_kinds()
    assert [row.name for row in settings() if not row.text or not row.values] == []


def test_the_document_has_them() -> None:
    """If not: write what `markdown()` gives behind the head of docs/settings.md."""
    text = DOCUMENT.read_text()
    assert text[text.index("## The run"):] == markdown()
    for line in text.splitlines():
        assert not line.startswith("| `") or line.replace("\\|", "").count("|") == 6, f"a bar inside a cell: {line}"


ROWS = {
    "a number with limits": ("learner.final_lr_ratio", "number, >= 0, <= 1", "0.05"),
    "one that may be absent": ("staleness.hard_max", "integer or null, >= 0", "null"),
    "words": ("staleness.policy", "keep, mask, drop, wait", "keep"),
    "a switch": ("data.shuffle", "true or false", "true"),
    "two numbers": ("learner.betas", "list of 2", "[0.9, 0.95]"),
    "a list of parts": ("data.train", "list", "[{path: sort}]"),
    "a choice with all that can be chosen": ("model.type", "tiny, local", "tiny"),
    "a field of each element": ("scoring.parts[].weight", "number", "1"),
    "a long text is cut": ("scoring.judge.prompt", "text", "Rate an answer to a question. ..."),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_says_what_may_be_written(case: str) -> None:
    name, values, default = ROWS[case]
    row = one(name)
    assert (row.values, row.default, row.only) == (values, default, ())


def test_what_belongs_to_one_choice_says_to_which_and_another_meaning_has_a_row_of_its_own() -> None:
    assert one("model.path").only == ("local",) and one("model.path").default == "required"
    assert one("learner.loss.clip_low", "gspo").default == "0.0003"
    assert "ppo_clip" in next(row.only for row in settings() if row.name == "learner.loss.clip_low")


def test_a_name_leads_to_what_stands_below_it_and_a_wrong_one_to_the_nearest() -> None:
    assert {row.name.split(".")[0] for row in settings("staleness")} == {"staleness"}
    assert [row.name for row in settings("staleness.bound")] == ["staleness.bound"]
    assert [row.name for row in settings("data.train")] == ["data.train", "data.train[].path", "data.train[].weight"]
    for wrong, near in (("learner.los", "learner.loss"), ("stalenes.bound", "staleness.bound")):
        with pytest.raises(ConfigError, match=f"^{wrong}: no such setting; did you mean `{near}`\\?$"):
            settings(wrong)
    with pytest.raises(ConfigError, match="see `headway settings`"):
        settings("qqq")
