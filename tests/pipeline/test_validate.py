"""A start that only validates, the start behind it that trains, and what `headway validate` measures of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_core.records import recorded_steps
from rl_core.validation import read_table, read_validation, validated_steps
from tasks.measurement import measure, of_run, open_subject
from tests.runs import Command, Home


def files_of(command: Command) -> dict[Path, int]:
    """All but what services that end may still write."""
    ending = (command.run.services, command.run.logs)
    return {path: path.stat().st_mtime_ns for path in command.run.root.rglob("*")
            if path.is_file() and path.parent not in ending}


def test_a_run_that_was_only_validated_goes_on_and_is_measured_without_services(
        home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"prompt": f"sort {text}", "answer": "".join(sorted(text))}) for text in ("21", "312", "4130")]
    (tmp_path / "three.jsonl").write_text("\n".join(rows) + "\n")
    settings = ("total_steps=2", "data.validation=[sort, three.jsonl]", "validation.n=2")
    only = home.train("only", *settings, "validation.only=true", cwd=tmp_path)
    assert only.wait() == 0, (only.out, only.err)
    accuracy = round(read_validation(only.run, 0)["greedy_accuracy"], 6)
    assert (only.json["status"], only.json["steps"], only.json["accuracy_end"]) == ("completed", 0, accuracy)
    assert "validation.only: this start trained nothing" in only.out
    assert recorded_steps(only.run) == [] and validated_steps(only.run) == [0]
    assert not only.run.streams.exists() or list(only.run.streams.iterdir()) == [], "no rollout worker"

    more = home.start("train", "--run-key", "only", "--json", key="only", cwd=tmp_path)  # by its stored settings
    assert more.wait() == 0, (more.out, more.err)
    assert (more.json["status"], more.json["steps"]) == ("completed", 2)
    assert validated_steps(more.run) == [0, 2]
    _, points = home.tracked(more.json["mlflow_run_id"])
    assert all(points[f"validation/source_{source}_accuracy", step] == 1 for source in ("sort", "three")
               for step in (0, 2))
    assert len(read_table(more.run, 2)) == 16 * 3

    before = files_of(more)
    monkeypatch.setenv("HEADWAY_HOME", str(home.path))
    monkeypatch.chdir(tmp_path)
    subject = of_run("only", None, {})
    measuring = open_subject(subject)
    report, table = measure(subject, measuring, lambda scored, total: None)
    measuring.close()
    assert files_of(more) == before, "nothing in the run has changed"
    stored = read_validation(more.run, 2)
    same = {name: value for name, value in stored.items() if name in report and name != "seconds"}
    assert {name: report[name] for name in same} == same and table == read_table(more.run, 2)
    assert same["by_source"].keys() == {"sort", "three"} and same["sampling"]["n"] == 2
