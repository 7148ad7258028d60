"""The report of a night: page and Markdown hold verdict, reasons, numbers and lineage; nothing in them is obeyed."""

from __future__ import annotations

from dataclasses import replace

from rl_core.nightly.text import night_markdown, night_words
from rl_core.pages.report import night_page
from tests.unit.test_nights import UNKNOWN, night, outcome

KEY = "nightly-2026-11-30"
FACTS = {"serve": "python -m sglang.launch_server --model-path /m", "commit": "4f"}
EVIL = "<script>alert(1)</script>|x"


def test_a_report_says_what_came_out_and_why() -> None:
    came = outcome(f"{KEY}.1")
    for report in (night_page(night(KEY), came, FACTS), night_markdown(night(KEY), came, FACTS)):
        for said in (KEY, "promoted", "so it is", "nightly-2026-11-29 (champion, version 3)", "+0.05 to +0.15", "+0.1",
                     "0.8", "a note", "learner.lr", "0.01", "launch_server --model-path /m", "4f"):
            assert said in report, said


def test_what_is_unknown_is_a_dash_and_has_no_drawing() -> None:
    came = outcome(KEY)
    page = night_page(night(KEY), came, FACTS)
    assert page.count("<svg") == 1, "of two numbers one has an interval"
    assert "<td>-</td>" in page and "nan" not in page.lower().replace("governance", "")
    assert "| samples_per_s | - | 80 | - | - | answers/s |" in night_markdown(night(KEY), came, FACTS)


def test_a_matrix_has_a_row_for_each_run() -> None:
    came = outcome(f"{KEY}.1")
    came = replace(came, compared=(*came.compared, replace(came.compared[0], run_key=f"{KEY}.2",
                                                           differences=(UNKNOWN,))))
    for report in (night_page(night(KEY, runs=2), came, FACTS), night_markdown(night(KEY, runs=2), came, FACTS)):
        assert f"{KEY}.1" in report and f"{KEY}.2" in report and "seed" in report


def test_hostile_words_are_text() -> None:
    came = replace(outcome(KEY), reasons=(EVIL,), notes=(EVIL,), changed={EVIL: (EVIL, EVIL)})
    page = night_page(night(KEY), came, {EVIL: EVIL})
    assert "<script>alert" not in page and page.count("&lt;script&gt;alert") >= 6
    markdown = night_markdown(night(KEY), came, {EVIL: EVIL})
    assert "<script" not in markdown and "\\|x" in markdown


def test_the_words_for_a_webhook_are_json() -> None:
    words = night_words(night(KEY), outcome(KEY), 4)
    assert (words["verdict"], words["model"], words["night"]) == ("promote", "nightly/4", KEY)
    assert words["text"] == f"{KEY}: promoted: so it is"
    assert words["differences"]["samples_per_s"]["low"] is None
