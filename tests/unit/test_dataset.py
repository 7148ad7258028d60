"""Data files: one meaning of a row whatever the file, and the place of everything that is wrong with one."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, DataError
from rl_core.hub import HubId
from rl_core.rollout import data_tables, dataset
from rl_core.rollout.data_files import LINE_BYTES, read_file
from rl_core.rollout.data_rows import Keys, Row
from rl_core.rollout.data_tables import Table
from rl_core.rollout.dataset import hub_files, split_patterns, training_data, validation_data


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the form that the ending says; objects of a CSV file as JSON text."""
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(rows[0])
                writer.writerows([value if isinstance(value, str) else json.dumps(value) for value in row.values()]
                                 for row in rows)
    return path


def rows_of(table: Table) -> list[Row]:
    return [table.row(i) for i in range(len(table))]


# -- shapes

VERL = [{"data_source": source,
         "prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": text}],
         "ability": "math", "reward_model": {"style": "rule", "ground_truth": truth},
         "extra_info": {"index": i, "hint": hint}}
        for i, (source, text, truth, hint) in enumerate([
            ("gsm8k", "1+1?", "2", "add"), ("math", "näh, 2+2?", "4", None),
            ("gsm8k", "line\nend, \"quoted\"", "", "x")])]
SHAPES: dict[str, tuple[list[dict[str, Any]], list[Any], list[str], list[str]]] = {
    "text and answer": (
        [{"prompt": "1+1?", "answer": "2", "level": "a"}, {"prompt": "ü?", "answer": "3", "level": "b"}],
        ["1+1?", "ü?"], ["2", "3"], ["rows", "rows"]),
    "chat and answer": (
        [{"prompt": user("1+1?"), "answer": "2"}, {"prompt": [*user("1"), {"role": "assistant", "content": "2"},
                                                              *user("3")], "answer": "4"}],
        [user("1+1?"), [*user("1"), {"role": "assistant", "content": "2"}, *user("3")]], ["2", "4"], ["rows", "rows"]),
    "verl": (VERL, [row["prompt"] for row in VERL], ["2", "4", ""], ["gsm8k", "math", "gsm8k"]),
    "verl, ground truth of two kinds": (
        [{"prompt": user("a"), "reward_model": {"ground_truth": ["1", "2"]}},
         {"prompt": user("b"), "reward_model": {"ground_truth": ["3"]}}],
        [user("a"), user("b")], ['["1", "2"]', '["3"]'], ["rows", "rows"]),
    "content of text parts": (
        [{"prompt": user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]), "answer": "2"}],
        [user("1+1?")], ["2"], ["rows"]),
    "messages with more than role and content": (
        [{"prompt": [{"role": "tool", "content": "7", "name": "calculator"}], "answer": "2"}],
        [[{"role": "tool", "content": "7", "name": "calculator"}]], ["2"], ["rows"]),
}
ENDINGS = (".jsonl", ".parquet", ".csv")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_means_the_same_in_every_file(name: str, ending: str, tmp_path: Path) -> None:
    rows, prompts, answers, sources = SHAPES[name]
    table = read_file(write(tmp_path / f"rows{ending}", rows), Keys(needs_answer=False))
    read = rows_of(table)
    assert [row.prompt for row in read] == prompts
    assert [row.answer for row in read] == answers
    assert [row.data_source for row in read] == sources
    plain = rows_of(read_file(write(tmp_path / "rows.jsonl", rows), Keys(needs_answer=False)))
    assert [replace(row, where="") for row in read] == [replace(row, where="") for row in plain]
    assert (table.facts.key == read_file(tmp_path / "rows.jsonl", Keys(needs_answer=False)).facts.key).all()


def test_the_columns_of_verl_go_along_as_json_values(tmp_path: Path) -> None:
    for ending in ENDINGS:
        row = read_file(write(tmp_path / f"rows{ending}", VERL), Keys(needs_answer=False)).row(0)
        assert row.columns == {"ability": "math", "reward_model": {"style": "rule", "ground_truth": "2"},
                               "extra_info": {"index": 0, "hint": "add"}, "data_source": "gsm8k"}, ending


def test_numbers_are_answers_as_their_text(tmp_path: Path) -> None:
    for ending in (".jsonl", ".parquet"):
        for values, texts in (([2, -3], ["2", "-3"]), ([0.5, 42.0, 1e16], ["0.5", "42", "10000000000000000"])):
            rows = [{"prompt": "a", "answer": value} for value in values]
            table = read_file(write(tmp_path / f"rows{ending}", rows), Keys())
            assert [row.answer for row in rows_of(table)] == texts


def test_other_columns_can_be_prompt_and_answer(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "solution": "2", "prompt_id": 7}]
    for ending in (".jsonl", ".parquet"):
        row = read_file(write(tmp_path / f"rows{ending}", rows), Keys(prompt="question", answer="solution")).row(0)
        assert (row.prompt, row.answer) == ("1+1?", "2")
        assert row.columns == {"question": "1+1?", "solution": "2", "prompt_id": 7}, "as a TRL reward names them"


def test_values_of_parquet_that_are_no_json_become_text(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "answer": ["1"], "day": pa.array([20_000], pa.date32()),
                      "price": pa.array([None], pa.decimal128(5, 2)), "kind": pa.array(["x"]).dictionary_encode(),
                      "long": pa.array(["y"], pa.large_string()), "flags": [[True, None]]})
    pq.write_table(table, tmp_path / "rows.parquet")
    row = read_file(tmp_path / "rows.parquet", Keys()).row(0)
    assert row.columns == {"day": "2024-10-04", "price": None, "kind": "x", "long": "y", "flags": [True, None]}


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    line = b'{"prompt": "a", "answer": "1"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    assert [row.where[-2:] for row in rows_of(read_file(tmp_path / "a.jsonl", Keys()))] == [":1", ":3"]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"a\r\nb",1\r\nc,2\r\n')
    rows = rows_of(read_file(tmp_path / "a.csv", Keys()))
    assert [(row.prompt, row.where[-2:]) for row in rows] == [("a\r\nb", ":2"), ("c", ":4")]


# -- storage


def test_rows_are_the_same_from_memory_and_from_a_spilled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": user(f"{i}+1?"), "answer": str(i + 1), "level": i % 3, "hint": None if i % 300 == 299 else ""}
            for i in range(1000)]
    expected = {ending: read_file(write(tmp_path / f"rows{ending}", rows), Keys()) for ending in ENDINGS}
    monkeypatch.setattr(data_tables, "SPILL_BYTES", 1000)
    for module in ("data_files", "data_parquet"):
        monkeypatch.setattr(f"rl_core.rollout.{module}.BATCH_ROWS", 64)
    for ending, table in expected.items():
        spilled = read_file(tmp_path / f"rows{ending}", Keys())
        assert len(spilled.batches) == 16
        assert rows_of(spilled) == rows_of(table)
        assert spilled.digest == table.digest, "whatever the batches"
    assert len(list(tmp_path.iterdir())) == len(ENDINGS), "no file is left"


def test_unusual_rows_among_usual_ones_are_stored_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_tables, "SPILL_BYTES", 1000)
    monkeypatch.setattr("rl_core.rollout.data_parquet.BATCH_ROWS", 64)
    rows = [{"prompt": [{"role": "user", "content": f"{i}", "name": "ann" if i == 100 else None}],
             "reward_model": {"ground_truth": f"{i}"}} for i in range(200)]
    table = read_file(write(tmp_path / "rows.parquet", rows), Keys())
    assert [table.row(i).prompt for i in (99, 100, 101)] == [
        user("99"), [{"role": "user", "content": "100", "name": "ann"}], user("101")]
    large = pa.Table.from_pylist(rows).cast(pa.schema([
        ("prompt", pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string()),
                                            ("name", pa.large_string())]))),
        ("reward_model", pa.struct([("ground_truth", pa.large_string())]))]))
    pq.write_table(large, tmp_path / "large.parquet")  # as Polars writes it
    again = read_file(tmp_path / "large.parquet", Keys())
    assert [(row.prompt, row.answer) for row in rows_of(again)] == [(row.prompt, row.answer) for row in rows_of(table)]
    assert (again.facts.key == table.facts.key).all()


CHANGES: dict[str, dict[str, Any]] = {
    "answer": {"answer": "9"}, "prompt": {"prompt": "b"}, "data source": {"data_source": "x"},
    "another column": {"extra": {"level": 2}},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_value_of_a_row_changes_the_digest(change: str, ending: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": "1", "data_source": "s", "extra": {"level": 1}}
    one = read_file(write(tmp_path / f"rows{ending}", [row, row]), Keys()).digest
    assert read_file(write(tmp_path / f"rows{ending}", [row, row]), Keys()).digest == one
    assert read_file(write(tmp_path / f"rows{ending}", [row, row | CHANGES[change]]), Keys()).digest != one


def test_a_text_is_the_same_prompt_as_a_chat_of_one_user_message(tmp_path: Path) -> None:
    text = read_file(write(tmp_path / "a.jsonl", [{"prompt": text, "answer": "1"} for text in ("ab", "a")]), Keys())
    chat = read_file(write(tmp_path / "b.parquet", [
        {"prompt": user("ab"), "answer": "2"}, {"prompt": [*user("a"), *user("b")], "answer": "2"},
        {"prompt": [{"role": "system", "content": "ab"}], "answer": "2"}]), Keys())
    assert text.facts.key[0] == chat.facts.key[0]
    assert len(np.unique(np.concatenate([text.facts.key, chat.facts.key]))) == 4
    assert chat.facts.kind[0] == text.facts.kind[0] != chat.facts.kind[1]


def test_the_first_row_without_a_column_is_known(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", **extra} for extra in ({"x": 1, "y": 1}, {"x": 1}, {"x": None, "z": 1})]
    table = read_file(write(tmp_path / "a.jsonl", rows), Keys())
    assert [table.without(name) for name in ("x", "y", "z", "w", "prompt")] == [None, 1, 0, 0, None]


# -- what is wrong with Parquet and CSV files (of JSONL: test_prompts.py)

PARQUET: dict[str, tuple[Any, str]] = {
    "no prompt column": (pa.table({"answer": ["1"]}),
                         r": no column `prompt`; the file has \['answer'\]; data.prompt_key"),
    "no answer column": (pa.table({"prompt": ["a"]}), r": no column `answer`; .*; data.answer_key names another one"),
    "prompt is a number": (pa.table({"prompt": [1], "answer": ["1"]}),
                           r": column `prompt` is of type int64; it must be text \(string\), a chat"),
    "prompt is a list of texts": (pa.table({"prompt": [["a"]], "answer": ["1"]}), r"column `prompt` is of type list<"),
    "answer is a truth value": (pa.table({"prompt": ["a"], "answer": [True]}),
                                "column `answer` is of type bool; it must be text or a number"),
    "bytes in a column": (pa.table({"prompt": ["a"], "answer": ["1"], "raw": [{"b": b"x"}]}),
                          "column `raw` .* no JSON value that a reward could get; leave the column out"),
    "two columns of one name": (pa.table([["a"], ["b"], ["1"]], names=["prompt", "prompt", "answer"]),
                                "two columns are called 'prompt'"),
    "null prompt": (pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), r" row 1: no `prompt`; the row has"),
    "null answer": (pa.table({"prompt": ["a", "b"], "answer": ["1", None]}), r" row 1: no `answer`; the row has"),
    "blank prompt": (pa.table({"prompt": ["a", " \n"], "answer": ["1", "2"]}), r" row 1: `prompt` is ' \\n'"),
    "blank answer": (pa.table({"prompt": ["a", "b"], "answer": ["1", ""]}),
                     r" row 1: `answer` is ''; it must be a text that is not empty"),
    "not UTF-8": (pa.table({"prompt": pa.array([b"a", b"\xff"]).view(pa.string()), "answer": ["1", "2"]}),
                  r" row 1: not UTF-8"),
    "empty chat": (pa.table({"prompt": [user("a"), []], "answer": ["1", "2"]}), r" row 1: `prompt` is \[\]"),
    "unknown role": (pa.table({"prompt": [user("a"), [{"role": "robot", "content": "b"}]], "answer": ["1", "2"]}),
                     r" row 1: message 0 of `prompt` has the role 'robot'"),
    "assistant last": (pa.table({"prompt": [user("a"), [{"role": "assistant", "content": "b"}]], "answer": [1, 2]}),
                       r" row 1: the last message of `prompt` is of the assistant"),
    "null content": (pa.table({"prompt": [user("a"), user(None)], "answer": ["1", "2"]}),
                     r" row 1: message 0 of `prompt`"),
    "negative token": (pa.table({"prompt": [[1], [-1]], "answer": ["1", "2"]}), r" row 1: token id -1 is outside"),
    "images": (pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "images": [None, [{"bytes": b"x"}]]}),
               r" row 1: the row has `images`, and a text model takes text alone; leave such rows out"),
    "image part": (pa.table({"prompt": [user([{"type": "text", "text": "a"}, {"type": "image", "text": None}])],
                             "answer": ["1"]}), r" row 0: message 0 of `prompt` has a part of type 'image'"),
    "no ground truth": (pa.table({"prompt": ["a", "b"],
                                  "reward_model": [{"ground_truth": "1"}, {"ground_truth": None}]}),
                        r" row 1: no `reward_model.ground_truth`"),
    "reward_model is a list": (pa.table({"prompt": ["a"], "reward_model": [["1"]]}),
                               "column `reward_model` is of type "),
    "reward_model is no object": (pa.table({"prompt": ["a"], "reward_model": ["rule"]}),
                                  r" row 0: `reward_model` is 'rule'; it must be an object with `ground_truth`"),
    "shapes mixed by nulls": (
        pa.table({"prompt": ["a", "b"], "answer": ["1", None], "reward_model": [None, {"ground_truth": "1"}]}),
        r" row 1: the row has its answer in `reward_model.ground_truth`, and .* row 0 has its answer in `answer`"),
    "no rows": (pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
                "the data file is empty"),
}


@pytest.mark.parametrize(("table", "message"), PARQUET.values(), ids=PARQUET)
def test_a_bad_parquet_file_is_named_by_column_or_row(table: Any, message: str, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet" + ("" if message[0] in " :" else ".*") + message):
        read_file(tmp_path / "d.parquet", Keys())


def test_empty_images_are_fine(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"],
                      "images": pa.array([None, []], pa.list_(pa.struct([("bytes", pa.binary())])))})
    pq.write_table(table, tmp_path / "d.parquet")
    assert read_file(tmp_path / "d.parquet", Keys()).row(1).columns == {}


def test_a_parquet_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [{"prompt": "a" * i, "answer": "1"} for i in range(1, 100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"d\.parquet: cannot be read as Parquet \(.*\); write the file again"):
        read_file(path, Keys())


CSV: dict[str, tuple[str, str]] = {
    "fields missing": ("prompt,answer\na,1\nb\n", r"d\.csv:3: the record has 1 fields, and the header 2"),
    "fields too many": ("prompt,answer\na,b,1\n", r"d\.csv:2: the record has 3 fields, .* put fields with commas"),
    "a quote that is not closed": ('prompt,answer\n"a,1\nb,2\n', r"d\.csv:2: not CSV \("),
    "a name twice": ("prompt,prompt,answer\na,b,1\n", r"d\.csv:1: the header names 'prompt' twice"),
    "no answer column": ("prompt,solution\na,1\n", r"d\.csv:2: no `answer`; the row has \['prompt', 'solution'\]"),
    "header alone": ("prompt,answer\n", r"d\.csv: the data file is empty; a header with"),
    "chat that is no chat": ('prompt,answer\n"[{""role"": ""user""}]",1\n', r"d\.csv:2: message 0 of `prompt`"),
    "a field over the limit": (f"prompt,answer\n{'a' * (LINE_BYTES + 1)},1\n",
                               r"d\.csv:2: the line is longer than 16777216"),
}


@pytest.mark.parametrize(("text", "message"), CSV.values(), ids=CSV)
def test_a_bad_csv_file_is_named_by_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / "d.csv", Keys())


def test_a_huge_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "d.jsonl").open("wb") as file:
        file.write(b'{"prompt": "a", "answer": "1"}\n')
        file.truncate(2**40)  # a terabyte of zeros, none of it on the disk
    with pytest.raises(DataError, match=r"d\.jsonl:2: the line is longer than 16777216 bytes, the limit of one row"):
        read_file(tmp_path / "d.jsonl", Keys())


# -- sources


def test_max_samples_takes_the_first_rows_of_each_training_source(tmp_path: Path) -> None:
    for ending in ENDINGS:
        write(tmp_path / f"rows{ending}", [{"prompt": f"{i}", "answer": "1"} for i in range(9)])
    paths = [str(tmp_path / f"rows{ending}") for ending in ENDINGS]
    config = Config.model_validate({"data": {"train": [*paths, "sort"], "validation": paths, "max_samples": 4,
                                             "validation_size": 6}})
    assert [len(source) for source in training_data(config).sources] == [4, 4, 4, 4]
    assert [len(source) for source in validation_data(config).sources] == [6, 6, 6]
    assert [row.prompt for row in training_data(config).rows([0, 5, 11])] == ["0", "1", "3"]


def test_rows_of_a_reasoning_gym_task_are_made_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_core.rollout.environments import reasoning

    def made(name: str, size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
        return [{"prompt": f"{name} {seed} {held_out} {i}", "answer": "", "metadata": {"n": i}} for i in range(size)]

    monkeypatch.setattr(reasoning, "reasoning_rows", made)
    config = Config.model_validate({"seed": 7, "reward": "reasoning_gym:spell", "data": {
        "train": "reasoning_gym:spell", "validation": "reasoning_gym:spell", "size": 3, "validation_size": 2}})
    rows = list(training_data(config).rows(range(3)))
    assert [row.prompt for row in rows] == ["spell 7 False 0", "spell 7 False 1", "spell 7 False 2"]
    assert (rows[2].columns, rows[2].data_source) == ({"metadata": {"n": 2}}, "reasoning_gym:spell")
    assert [row.prompt for row in validation_data(config).rows(range(2))] == ["spell 7 True 0", "spell 7 True 1"]


def test_the_hub_that_cannot_be_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADWAY_HUB_OFFLINE", raising=False)
    with pytest.raises(DataError, match=r"data.train: 'hf:owner/name' is not in the cache and could not be downloaded"):
        training_data(Config.model_validate({"data": {"train": "hf:owner/name:test"}}))


HUB: dict[str, tuple[list[str], str, list[str]]] = {
    "data directory": (["data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/test-0.parquet"],
                       "hf:o/n", ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet"]),
    "split": (["train.parquet", "test.parquet"], "hf:o/n:test", ["test.parquet"]),
    "subset": (["main/train-0.parquet", "socratic/train-0.parquet"], "hf:o/n/main:train", ["main/train-0.parquet"]),
    "the hub's own conversion": (["default/train/0000.parquet"], "hf:o/n", ["default/train/0000.parquet"]),
}


def a_hub(root: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that finds these files, each with one row."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name, [{"prompt": name, "answer": "1"}])

    def fetched(field: str, wanted: HubId, **_: Any) -> Path:
        assert wanted.name == "o/n" and field == "data.train"
        return root

    monkeypatch.setattr(dataset, "fetch", fetched)


@pytest.mark.parametrize(("names", "path", "expected"), HUB.values(), ids=HUB)
def test_the_files_of_a_split_are_found(names: list[str], path: str, expected: list[str], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    a_hub(tmp_path, names, monkeypatch)
    data = training_data(Config.model_validate({"data": {"train": path}}))
    assert [row.prompt for row in data.rows(range(len(data)))] == expected
    assert data.row(0).data_source == path.removeprefix("hf:").partition(":")[0], "one name for all shards"
    assert data.where(0) == f"{path} {Path(expected[0]).parent.name or tmp_path.name}/{Path(expected[0]).name} row 0"


HUB_REFUSED: dict[str, tuple[list[str], str, str]] = {
    "several subsets": (["main/train-0.parquet", "socratic/train-0.parquet"], "hf:o/n",
                        r"hf:o/n has the subsets main, socratic; write one, as in hf:o/n/main:train"),
    "no such split": (["train.parquet"], "hf:o/n:dev", r"hf:o/n:dev has no Parquet files of a split 'dev'"),
}


@pytest.mark.parametrize(("names", "path", "message"), HUB_REFUSED.values(), ids=HUB_REFUSED)
def test_a_split_that_cannot_be_told_is_refused(names: list[str], path: str, message: str, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    a_hub(tmp_path, names, monkeypatch)
    with pytest.raises(DataError, match=message):
        hub_files(path, "data.train", 1.0)


def test_a_split_is_no_prefix_of_another() -> None:
    assert split_patterns("", "train")[:2] == ["train.parquet", "*/train.parquet"]
    assert "train_extra.parquet" not in split_patterns("", "train")


def test_a_name_that_is_none_of_the_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.train: write hf:owner/name"):
        hub_files("hf:nothing", "data.train", 1.0)
