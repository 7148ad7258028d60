"""`headway data check`: lengths, repeats, what would be left out, one prompt with its mask; the same in the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.checking import check_files
from flows.command import QUIET
from flows.launch import show_plan
from flows.presets import load_preset
from rl_core.plan import describe, make_plan, parse_overrides, resolve
from rl_core.preflight import inspect_inputs

ROWS = [{"prompt": f"sort {number}", "answer": "1", "data_source": source} for number, source in (
    ("21", "short"), ("321", "short"), ("21", "short"), ("7654321", "long"), ("54321", "short"))]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_HUB_OFFLINE", "1")
    for name, value in QUIET.items():  # a command sets them for good
        monkeypatch.setenv(name, value)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def checked(capsys: pytest.CaptureFixture[str], *sets: str, row: int = 0) -> tuple[int, dict[str, Any]]:
    code = check_files(["rows.jsonl"], "tiny-cpu", sets, row=row, as_json=True)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_report_counts_what_a_run_would_take(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(capsys)
    assert (code, report["holds"], report["rows"], report["positions"]) == (0, True, 5, 5)
    assert report["sources"] == [{"path": "rows.jsonl", "rows": 5, "weight": 1.0, "prompt": "text", "answer": "answer",
                                  "data_sources": {"short": 4, "long": 1}}]
    assert report["tokens"] == {"min": 15, "median": 16, "p95": 20, "max": 20, "mean": 16.8}
    assert report["overlong"] == {"limit": 64, "policy": "refuse", "count": 0, "first": []}
    assert report["duplicates"] == {"count": 1, "first": {"where": "rows.jsonl:3", "repeats": "rows.jsonl:1"}}


def test_the_median_of_two_lengths_lies_between_them(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], ROWS[3])))  # 15 and 20 tokens
    _, report = checked(capsys)
    assert report["tokens"] == {"min": 15, "median": 17.5, "p95": 20, "max": 20, "mean": 17.5}


def test_the_example_has_mask_0_until_the_answer_is_sampled(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = checked(capsys, row=3)
    example = report["example"]
    assert (example["where"], example["answer"], example["data_source"]) == ("rows.jsonl:4", "1", "long")
    assert example["text"] == "<|im_start|>user\nsort 7654321<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(token["text"] for token in example["tokens"]) == example["text"]
    assert [token["mask"] for token in example["tokens"]] == [0] * 20
    assert example["sampled_at"] == 20


@pytest.mark.parametrize(("policy", "code", "positions"), [("refuse", 1, 4), ("drop", 0, 4)])
def test_prompts_over_the_limit_are_named(policy: str, code: int, positions: int, rows: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    found, report = checked(capsys, "data.max_prompt_tokens=18", f"data.overlong={policy}")
    assert (found, report["positions"], report["holds"]) == (code, positions, code == 0)
    assert report["overlong"] == {"limit": 18, "policy": policy, "count": 1,
                                  "first": [{"where": "rows.jsonl:4", "tokens": 20}]}


def test_people_get_a_table(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_files(["rows.jsonl"], "tiny-cpu", ["data.max_prompt_tokens=18"], row=1, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:9] == [
        "source      rows.jsonl: 5 rows, prompt: text, answer: `answer`",
        "            short 4, long 1",
        "prompts     5; 4 positions in a dataset epoch",
        "tokens      min 15  median 16  p95 20  max 20; limit 18 (data.max_prompt_tokens)",
        "over limit  1 would be refused (data.overlong=drop leaves them out)",
        "            rows.jsonl:4: 20 tokens",
        "duplicates  1, first rows.jsonl:3, which repeats rows.jsonl:1",
        "",
        "rows.jsonl:2, answer '1', data source short, columns prompt"]
    assert lines[-2:] == ["    15        6  0     '\\n'",
                          "    16           1     sampled from here: the answer, at most 8 tokens"]


REFUSED = {
    "a bad row": (["rows.jsonl", "bad.jsonl"], [], 0, "error: bad.jsonl:1: no `answer`; the row has ['prompt']"),
    "no such row": (["rows.jsonl"], [], 5, "error: --row 5: there are 5 prompts that are used, from 0"),
    "no model": (["rows.jsonl"], ["model.type=local", "model.path=''"], 0, "error: model.path: must be set (got '')"),
    "a bad setting": (["rows.jsonl"], ["data.overlong=cut"], 0, "error: data.overlong: "),
}


@pytest.mark.parametrize(("files", "sets", "row", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused(files: list[str], sets: list[str], row: int, message: str, rows: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    (rows.parent / "bad.jsonl").write_text('{"prompt": "a"}\n')
    assert check_files(files, "tiny-cpu", sets, row=row, as_json=False) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message) and not out, (out, err)


# -- the plan


def test_the_plan_counts_prompts_and_warns_of_them(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["data.train=[{path: rows.jsonl, weight: 2}, sort]", "data.size=100", "data.validation=rows.jsonl",
            "data.max_prompt_tokens=18", "data.overlong=drop"]
    config = resolve(load_preset("tiny-cpu"), parse_overrides(sets))
    facts = inspect_inputs(config).facts
    left = facts.rows - 2 * 4
    plan = make_plan(config, facts)
    assert (facts.dropped, facts.dropped_validation, facts.validation_rows) == (1 + 100 - left, 1, 4)
    assert dict(describe(config, plan))["prompts"] == (
        f"{facts.rows} of 2 sources, {facts.dropped} over data.max_prompt_tokens left out; 4 held out, 1 over "
        "data.max_prompt_tokens left out")
    assert [warning.split(" (")[0] for warning in plan.warnings] == [
        f"data.train: 1 of {4 + left} prompts repeat an earlier one",
        "data.validation: 4 of 4 held-out prompts are training prompts, too"]
    assert show_plan("tiny-cpu", sets, None, as_json=True) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out.splitlines()[-1])
    assert shown["plan"]["prompts_left_out"] == facts.dropped and len(shown["warnings"]) == 2
    assert shown["plan"]["warnings"] == list(plan.warnings)
    assert err.count("warning: data.") == 2


def test_rows_that_the_default_toy_model_cannot_take_are_not_blamed_on_the_person(
        rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.write_text(json.dumps({"prompt": "What is 1+1?", "answer": "2"}) + "\n")
    assert check_files(["rows.jsonl"], "tiny-cpu", [], row=0, as_json=False) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "of preset tiny-cpu" in last and "--preset local-model-cpu --set model.path=DIR" in last


def test_a_directory_is_no_file_and_needs_no_other_model(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows.parent / "many").mkdir()
    assert check_files(["many"], "tiny-cpu", [], row=0, as_json=False) == 2
    assert capsys.readouterr().err == ("error: many: is a directory, not a JSONL, CSV or Parquet file; name its files: "
                                       "data.train=[a.parquet, b.parquet]\n")
