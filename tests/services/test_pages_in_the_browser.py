"""The trajectory viewer in a real browser: switches, filters, search, a group side by side, and hostile answers.

Pages are files that are opened as such: no server, and no other host is asked for anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.experience.ledger import put_claim
from rl_core.experience.shards import ShardWriter
from rl_core.learner.token_states import StepLogprobs
from rl_core.pages.answers import step_page, validation_page
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import open_identity
from rl_core.tokenizer import character_tokenizer, write_tokenizer
from rl_core.types import ShardRef, WeightVersion
from rl_core.versions import put_version
from tests.browser import listened, pictured
from tests.builders import make_claim, make_runs
from tests.looking import small_run, spoken_group

pytestmark = [pytest.mark.slow, pytest.mark.browser]

GROUPS = 125
"""Of eight answers: 1,000 trajectories."""
OPENS_S = 1.0
HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with listened() as page:
        yield page


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a step with 1,000 trajectories of 60 tokens."""
    path = tmp_path_factory.mktemp("thousand") / "answers.html"
    path.write_text(step_page(thousand_answers(path.parent / "run"), 0), encoding="utf-8")
    return path


def thousand_answers(path: Path) -> RunDir:
    """Step 0 with GROUPS groups of eight; answer 3 of group 7 says "needle"."""
    run, tokenizer, draws = RunDir(path), character_tokenizer(), np.random.default_rng(1)
    open_identity(run, "many", "tiny-cpu", Config())
    write_tokenizer(run.model, 64)
    for v in range(3):
        put_version(run, WeightVersion(v=v, step=v, idx=v, attempt=1, digest=f"w{v}"))
    groups = []
    for i in range(GROUPS):
        versions = ((0,), (0, 1), (2,))[i % 3]
        group = spoken_group(i, versions=versions)
        answers = []
        for j in range(8):
            words = "".join(draws.choice(list("0123456789 "), 60))
            if (i, j) == (7, 3):
                words = f"needle {words}"[:60]
            ids = np.array(tokenizer.encode(words, add_special_tokens=False).ids, np.int32)
            logprobs = -draws.exponential(1.0, 60).astype(np.float32)
            answers.append(replace(
                group.trajectories[j % 4], token_ids_L=ids, behavior_logprobs_L=logprobs,
                loss_mask_L=np.ones(60, np.uint8), turn_end=np.array([60], np.int32),
                version_runs=make_runs(60, versions)))
        groups.append(replace(group, trajectories=tuple(answers), lease=replace(group.lease, n_expected=8)))
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    landed = [writer.land(groups[lo:lo + 25]) for lo in range(0, GROUPS, 25)]
    claim = make_claim(run, [ShardRef(stream=one.stream, seq=one.seq) for one in landed])
    put_claim(run, claim, fsync=False)
    return run


def opened(browser: Any, path: Path) -> None:
    browser.said.clear()
    browser.got.clear()
    browser.goto(path.as_uri())
    browser.wait_for_selector("body[data-ready]")


def written(path: Path, page: str) -> Path:
    path.write_text(page, encoding="utf-8")
    return path


def count(browser: Any) -> str:
    return browser.locator("#count").text_content().split(":")[0]


def colours(browser: Any) -> list[str]:
    """Background of the tokens of the first answer on the screen."""
    return browser.locator("[data-answer]").first.locator("[data-token]").evaluate_all(
        "nodes => nodes.map(node => node.style.backgroundColor)")


def switch(browser: Any, name: str, value: str) -> None:
    browser.locator(f"input[name={name}][value={value}]").check()


def test_a_thousand_trajectories_open_in_a_second_and_few_of_them_are_made(browser: Any, thousand: Path,
                                                                           tmp_path: Path) -> None:
    opened(browser, thousand)  # once, so that the browser itself has started
    opened(browser, thousand)
    with pictured(browser, tmp_path / "thousand.png"):
        shown_s = browser.evaluate("performance.getEntriesByName('answers shown')[0].startTime") / 1000
        assert shown_s <= OPENS_S
        assert count(browser) == "1000 of 1000 answers, 125 of 125 groups"
        assert 0 < browser.locator("[data-answer]").count() < 25
        browser.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
        browser.locator("[data-answer='999']").wait_for()
        assert 0 < browser.locator("[data-answer]").count() < 25
        switch(browser, "colour", "version")
        assert browser.locator("[data-answer='999']").is_visible(), "what was scrolled to stays where it is"
    assert browser.got == [thousand.as_uri()] and browser.said == []


def test_the_switches_recolour_every_token(browser: Any, tmp_path: Path) -> None:
    run = small_run(tmp_path / "small")
    learner = StepLogprobs(proximal_T=np.linspace(-1, 0, 16, dtype=np.float32),
                              policy_T=np.linspace(-1, 1, 16, dtype=np.float32))
    opened(browser, written(tmp_path / "step.html", step_page(run, 2, learner)))
    seen: dict[str, list[str]] = {}
    for mode in ("none", "advantage", "ratio", "gap", "logprob", "version", "mask"):
        switch(browser, "colour", mode)
        seen[mode] = colours(browser)
    assert seen["none"] == ["", ""] and all(len(found) == 2 for found in seen.values())
    assert len({tuple(found) for found in seen.values()}) == 7, seen
    assert seen["advantage"][0] == seen["advantage"][1] != "", "one advantage for all tokens of an answer"
    assert seen["version"][0] != seen["version"][1], "it was sampled by versions 1 and 2"
    switch(browser, "colour", "version")
    assert browser.locator("#legend .swatch").all_text_contents() == ["v0", "v1", "v2"]
    browser.locator("[data-token]").first.hover()
    told = browser.locator("#tip").text_content().splitlines()
    assert told[0].startswith('"1"  id 9') and "advantage 1.300" in told and "log-prob -0.500" in told
    assert "log-prob gap -0.500" in told and "ratio 1.000" in told and "version 1" in told and "in the loss" in told


def test_what_is_not_recorded_has_no_colour_and_says_why(browser: Any, tmp_path: Path) -> None:
    opened(browser, written(tmp_path / "step.html", step_page(small_run(tmp_path / "small"), 2)))
    switch(browser, "colour", "gap")
    assert colours(browser) == ["", ""]
    assert "not recorded: log-probs of the learner take its weights" in browser.locator("#legend").text_content()


FILTERS = {
    "reward": ({"rewardMin": "0.2", "rewardMax": "0.5"}, "250 of 1000 answers, 125 of 125 groups"),
    "length": ({"lengthMin": "61"}, "0 of 1000 answers, 0 of 125 groups"),
    "correct": ({"correct": "right"}, "250 of 1000 answers, 125 of 125 groups"),
    "version": ({"version": "1"}, "336 of 1000 answers, 42 of 125 groups"),
    "how it ended": ({"finish": "length"}, "250 of 1000 answers, 125 of 125 groups"),
    "source": ({"source": "chat"}, "496 of 1000 answers, 62 of 125 groups"),
    "search": ({"search": "NEEDLE"}, "1 of 1000 answers, 1 of 125 groups"),
    "a group": ({"search": "e0-p12-t0"}, "8 of 1000 answers, 1 of 125 groups"),
}


@pytest.mark.parametrize(("asked", "left"), FILTERS.values(), ids=FILTERS)
def test_filters_and_search_narrow_what_is_shown(browser: Any, thousand: Path, asked: dict[str, str],
                                                 left: str) -> None:
    opened(browser, thousand)
    for name, value in asked.items():
        field = browser.locator(f"[name={name}]")
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    browser.wait_for_function("left => document.getElementById('count').textContent.startsWith(left)", arg=left)
    browser.get_by_role("button", name="reset").click()
    browser.wait_for_function("() => document.getElementById('count').textContent.startsWith('1000 of')")


def test_a_search_marks_what_it_has_found(browser: Any, thousand: Path) -> None:
    opened(browser, thousand)
    browser.locator("[name=search]").fill("needle")
    browser.locator(".hit").first.wait_for()
    assert "".join(browser.locator(".hit").all_text_contents()) == "needle"


def test_the_answers_of_a_group_stand_side_by_side(browser: Any, thousand: Path, tmp_path: Path) -> None:
    opened(browser, thousand)
    switch(browser, "layout", "groups")
    with pictured(browser, tmp_path / "groups.png"):
        first = browser.locator("[data-group]").first
        assert first.locator("[data-answer]").count() == 8
        tops = {round(box["y"]) for box in (node.bounding_box() for node in first.locator("[data-answer]").all())}
        assert len(tops) == 1, "beside each other, not below"
        assert "sort 31" in first.locator(".prompt").text_content()
        browser.locator("[name=correct]").select_option("right")
        browser.wait_for_function("() => document.getElementById('count').textContent.startsWith('250 of')")
        assert browser.locator("[data-group]").first.locator("[data-answer]").count() == 2
        browser.locator("[data-open]").first.click()
        dialog = browser.locator("dialog")
        assert dialog.locator("[data-answer]").count() == 8, "the whole group, whatever the filters leave"
        assert dialog.locator("[data-token]").count() == 8 * 60
        assert dialog.locator(".chip.part").all_text_contents() == ["digits 1.000", "digits 1.000", "digits 0.500",
                                                                   "digits 1.500"] * 2
        dialog.get_by_label("colour by").select_option("version")
        assert dialog.locator(".swatch").all_text_contents() == ["v0", "v1", "v2"]
        assert dialog.locator("[data-token]").count() == 8 * 60
        browser.keyboard.press("Escape")
        assert not dialog.is_visible()


def test_markup_in_an_answer_stays_text_and_nothing_of_it_runs(browser: Any, tmp_path: Path) -> None:
    run = small_run(tmp_path / "small")
    row = {"data_source": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE, "mode": "greedy", "text": HOSTILE,
           "reward": 1.0, "correct": None, "extracted": HOSTILE, "length": 3, "finish": "stop"}
    put_if_absent(run.validation_table(0), to_json({"rows": [row, row | {"text": f"2 {HOSTILE}"}]}))
    opened(browser, written(tmp_path / "hostile.html", validation_page(run, 0)))
    assert browser.title() == "small: answers of the validation after 0 steps"
    assert browser.locator(".words").all_text_contents() == [HOSTILE, f"2 {HOSTILE}"]
    assert browser.locator("img").count() == 0 and browser.locator("script").count() == 1
    browser.locator("[data-open]").first.click()
    assert browser.locator("dialog .prompt").text_content() == HOSTILE
    assert browser.title() == "small: answers of the validation after 0 steps" and browser.said == []


def test_a_script_that_got_in_would_not_run(browser: Any, tmp_path: Path) -> None:
    page = step_page(small_run(tmp_path / "small"), 2)
    foreign = f"{HOSTILE.removeprefix('</script>')}<p style='color: red'>x</p>"
    spoiled = page.replace("<main ", f"{foreign}<main ")
    opened(browser, written(tmp_path / "spoiled.html", spoiled))
    assert browser.title() == "small: answers of step 2"
    assert sum("Content Security Policy" in line for line in browser.said) >= 3, browser.said
    assert browser.got == [(tmp_path / "spoiled.html").as_uri()]
