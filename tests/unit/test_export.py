"""Exports: what transformers loads of them, which weights they are, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_core.export
import rl_core.kept_weights
from flows.cli import main
from flows.exporting import export_model
from rl_core.config import Config, LearnerConfig, LocalModel
from rl_core.errors import BrokenFile
from rl_core.export import config_digest, export
from rl_core.kept_weights import described, sources
from rl_core.learner.learner import Learner
from rl_core.learner.policy import load_policy
from rl_core.model_setup import check_model, copy_model, model_digests, set_up_model
from rl_core.records import read_record
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import open_identity
from rl_core.tokenizer import write_tokenizer
from rl_core.versions import read_versions
from rl_core.weights import digest_tensors, load_weights, publish
from tests.learning import (
    all_by,
    answer_logprobs,
    claim_groups,
    random_groups,
    sampled_by,
    start_attempt,
    write_model,
)

PROMPT, ANSWER = [5, 9, 60, 7], [11, 80, 3, 1]
KEY = "k"


def new_run(home: Path, family: str = "qwen3", **settings: Any) -> tuple[RunDir, Config]:
    """A run with its copy of a model, before the first step. The model's own files have things that an export keeps."""
    run = RunDir(home / "runs" / KEY)
    write_model(run.model, family)
    write_tokenizer(run.model, 256)
    edit(run.model / "config.json", lab="ours", torch_dtype="bfloat16")
    (run.model / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6, "lab": "ours"}')
    config = Config.model_validate({"model": {"type": "local", "path": "there"}, "groups_per_step": 4, "group_size": 4,
                                    "total_steps": 20, **settings})
    open_identity(run, KEY, "local-model-cpu", config)
    start_attempt(run)
    return run, config


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def loaded(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Path]:
    """Four steps: checkpoints behind 2 and 4, versions of the last two steps, validations of steps 0, 2 and 3."""
    home = tmp_path_factory.mktemp("home")
    run, config = new_run(home, weights={"keep": 2}, learner=LearnerConfig(lr=1e-3, warmup_steps=0, token_budget=100))
    stock = loaded(run.model, dtype=torch.float32)
    for step in range(4):
        claim_groups(run, config, step, [sampled_by(stock, all_by(0, group)) for group in random_groups(step, 4)])
    learner = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    for step in range(4):
        learner.train(step)
        if step % 2:
            learner.checkpoint()
    for step, right, reward in ((0, 0.2, 0.9), (2, 0.5, 0.1), (3, 0.8, 0.3)):
        put_if_absent(run.validation(step), to_json({"step": step, "greedy_accuracy": right, "greedy_reward": reward}))
    return run, home


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a command sets for its own process: the environment of quiet libraries, and the end by SIGTERM."""
    environment, on_sigterm = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture
def run(trained: tuple[RunDir, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A copy that a test may damage, under the key `k` of a home of its own."""
    shutil.copytree(trained[0].root, tmp_path / "home" / "runs" / KEY)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return RunDir(tmp_path / "home" / "runs" / KEY)


# -- what is in it


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_transformers_computes_the_same_and_a_new_run_takes_it_as_its_model(family: str, tmp_path: Path) -> None:
    """Tied and untied embeddings, log-probs equal to the bit."""
    run, config = new_run(tmp_path, family)
    other = loaded(write_model(tmp_path / "other", family, seed=1), dtype=torch.float32)
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in other.named_parameters()}
    version = publish(run, weights, 1, 1, 1, config)
    report = export(run, tmp_path / "out")
    assert (report.step, report.version, report.source, report.weights_digest) == (1, 0, "publication", version.digest)

    mine = loaded(tmp_path / "out")
    assert mine.dtype == torch.float32
    assert torch.equal(answer_logprobs(mine, PROMPT, ANSWER), answer_logprobs(other, PROMPT, ANSWER))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(run.model / "model.safetensors").keys()

    again = Config(model=LocalModel(path=str(tmp_path / "out")))
    copy_model(set_up_model(again, tmp_path / "cache"), tmp_path / "copy")
    assert check_model(tmp_path / "copy") == check_model(run.model)
    policy = load_policy(tmp_path / "copy", logits_chunk=64, dtype=torch.float32, device=torch.device("cpu"))
    assert digest_tensors(policy.weights().items()) == version.digest


def test_all_but_the_weights_is_the_runs_own(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export(run, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "headway.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json"]
    before, after = (model_digests(directory) for directory in (run.model, out))
    assert (before["tokenizer"], before["chat_template"]) == (after["tokenizer"], after["chat_template"])
    assert (out / "generation_config.json").read_bytes() == (run.model / "generation_config.json").read_bytes()
    settings = json.loads((run.model / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == settings | {"dtype": "float32", "torch_dtype": "float32"}
    assert AutoTokenizer.from_pretrained(out, local_files_only=True).decode([6, 7]) == AutoTokenizer.from_pretrained(
        run.model, local_files_only=True).decode([6, 7])

    told = json.loads((out / "headway.json").read_text())
    identity = json.loads(run.run_json.read_text())
    newest = read_record(run, 3)
    assert told == {
        "format": 1, "run_key": KEY, "run_uuid": identity["run_uuid"], "step": 4, "version": 4, "source": "checkpoint",
        "weights_digest": newest.weights_digest, "revision": 0,
        "config_digest": config_digest(Config.model_validate(identity["config"])), "dtype": "float32", "best": None,
        "headway": report.headway}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # whoever reads the one can read the other


def test_without_a_generation_config_of_the_model_the_export_has_one(run: RunDir, tmp_path: Path) -> None:
    (run.model / "generation_config.json").unlink()
    export(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 1
    assert check_model(tmp_path / "out").eos_token_ids == (1,)


def test_bfloat16_is_the_float32_weights_rounded(run: RunDir, tmp_path: Path) -> None:
    export(run, tmp_path / "wide")
    report = export(run, tmp_path / "half", dtype="bfloat16")
    wide, half = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "half"))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(half[name], wide[name].to(torch.bfloat16)) for name in wide)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded(tmp_path / "half").dtype == torch.bfloat16
    assert report.weights_digest == read_record(run, 3).weights_digest  # that of the run's weights


def test_large_weights_are_written_in_parts_with_an_index(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export(run, out, shard_size="100KB")
    parts = sorted(path.name for path in out.glob("*.safetensors"))
    assert parts[0] == f"model-00001-of-{len(parts):05d}.safetensors" and len(parts) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == parts
    assert digest_tensors(loaded(out).named_parameters()) == report.weights_digest
    check_model(out)


# -- which weights


WEIGHTS: dict[str, tuple[dict[str, Any], tuple[int, str]]] = {
    "the newest": ({}, (4, "checkpoint")),
    "a checkpoint": ({"step": 2}, (2, "checkpoint")),
    "a publication": ({"step": 3}, (3, "publication")),
    "the initial model": ({"step": 0}, (0, "initial model")),
    "the best": ({"best": "greedy_accuracy"}, (3, "publication")),
    "the best is the initial model": ({"best": "greedy_reward"}, (0, "initial model")),
}


@pytest.mark.parametrize(("options", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_by_their_step(options: dict[str, Any], expected: tuple[int, str], trained: tuple[RunDir, Path],
                               tmp_path: Path) -> None:
    run = trained[0]
    report = export(run, tmp_path / "out", **options)
    assert (report.step, report.source) == expected
    digest = read_versions(run)[0].digest if report.step == 0 else read_record(run, report.step - 1).weights_digest
    assert digest_tensors(loaded(tmp_path / "out").named_parameters()) == report.weights_digest == digest


def test_where_the_best_weights_are_gone_the_checkpoint_before_them_is_taken_and_said(
        run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.weights(3))
    report = export(run, tmp_path / "out", best="greedy_accuracy")
    assert (report.step, report.best) == (2, {"field": "greedy_accuracy", "value": 0.8, "step": 3})
    assert export_model(KEY, str(tmp_path / "two"), step=None, best=True, by=None, dtype="float32", as_json=False) == 0
    assert "greedy_accuracy 0.8 after 3 steps; no weights of it are left, the checkpoint before it is after 2" in \
        capsys.readouterr().out


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


def test_damaged_weights_are_taken_from_elsewhere_or_refused(run: RunDir, tmp_path: Path) -> None:
    flip(run.checkpoint(4) / "parameters.safetensors")
    assert export(run, tmp_path / "out").source == "publication"
    flip(run.weights(4) / "model.safetensors")
    with pytest.raises(BrokenFile, match=r"weights behind 4 training steps cannot be read \(.*n-000000004.*; "
                                         r".*v-00000004.*are steps 0 \(initial model\); 3, 4 \(publication\); 2, 4"):
        export(run, tmp_path / "two")
    flip(run.model / "model.safetensors")
    with pytest.raises(BrokenFile, match="is not the model that the run published at its start"):
        export(run, tmp_path / "two", step=0)
    assert not (tmp_path / "two").exists()


def test_what_the_run_prunes_meanwhile_is_looked_for_again(
        run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run.weights(4))
    read, pruned = rl_core.kept_weights.read_parameters, []

    def read_late(found: RunDir, n: int) -> Any:
        if not pruned:
            pruned.append(n)
            shutil.rmtree(run.checkpoint(n))
        return read(found, n)

    monkeypatch.setattr(rl_core.kept_weights, "read_parameters", read_late)
    assert (export(run, tmp_path / "out").step, pruned) == (3, [4])


# -- what is refused, and what a failure leaves


def occupied(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "not empty": (occupied, {}, "--out '{out}': is not empty, and an export overwrites nothing; remove it, or give a "
                                "directory that does not exist or is empty"),
    "a file": (lambda out: out.write_text("x"), {}, "--out '{out}': is a file"),
    "in the run": (bool, {"out": "{run}/export"}, "lies in the run directory"),
    "no place": (bool, {"out": ""}, "--out: must be a directory (got '')"),
    "a step that is gone": (bool, {"step": 1}, "--step 1: {run} has no weights behind 1 training steps; there are "
                                               "steps 0 (initial model); 3, 4 (publication); 2, 4 (checkpoint)"),
    "a step and the best": (bool, {"step": 2, "best": True}, "--step 2: and --best exclude each other"),
    "a field that no validation has": (
        bool, {"by": "mean_at_n"}, "--best: no validation of {run} has a number 'mean_at_n'; there are "
                                   "greedy_accuracy, greedy_reward"),
    "a dtype": (bool, {"dtype": "float16"}, "--dtype 'float16': use float32 or bfloat16"),
    "no such run": (bool, {"run_key": "j"}, "run 'j': there is no such run under {home}/runs; there are k"),
}


@pytest.mark.parametrize(("prepare", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_is_refused(
        prepare: Callable[[Path], object], options: dict[str, Any], message: str, trained: tuple[RunDir, Path],
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, home = trained
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    prepare(tmp_path / "out")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    words = {"out": tmp_path / "out", "run": run.root, "home": home}
    asked: dict[str, Any] = {"run_key": KEY, "out": "{out}", "step": None, "best": False, "by": None,
                             "dtype": "float32", **options}
    asked["out"] = asked["out"].format(**words)
    assert export_model(asked.pop("run_key"), asked.pop("out"), as_json=True, **asked) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and message.format(**words) in said.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_run_without_weights_and_one_without_validations_are_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    run, _ = new_run(tmp_path)
    ask: dict[str, Any] = {"step": None, "by": None, "dtype": "float32", "as_json": False}
    assert export_model(KEY, str(tmp_path / "out"), best=True, **ask) == 2
    assert "no validation of" in (said := capsys.readouterr().err) and "there are no validations yet" in said
    shutil.rmtree(run.model)
    assert export_model(KEY, str(tmp_path / "out"), best=False, **ask) == 2
    assert "has no weights yet; wait until the run has set up its model" in capsys.readouterr().err


def test_an_empty_directory_is_taken_and_the_last_line_is_json(
        run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main(["export", KEY, "--out", str(out), "--step", "2", "--dtype", "bfloat16", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["step"], report["dtype"], report["directory"]) == (2, "bfloat16", str(out))
    assert (out / "model.safetensors").exists()


def test_a_full_disk_and_sigterm_leave_nothing_and_the_next_export_clears_up_after_a_killed_one(
        run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "outs" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(rl_core.export.shutil, "copyfile", full)
        assert export_model(KEY, str(out), step=None, best=False, by=None, dtype="float32", as_json=False) == 1
    assert capsys.readouterr().err == f"error: --out {str(out)!r}: nothing was written (No space left on device)\n"
    assert list(out.parent.iterdir()) == []
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(rl_core.export.shutil, "copyfile", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
        export_model(KEY, str(out), step=None, best=False, by=None, dtype="float32", as_json=False)
    assert list(out.parent.iterdir()) == []
    left = out.parent / ".out.0123456789ab.export"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    export(run, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_export_reads_the_run_and_changes_nothing_in_it(run: RunDir, tmp_path: Path) -> None:
    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in run.root.rglob("*")}

    before = state()
    export(run, tmp_path / "out", best="greedy_accuracy")
    assert state() == before
    version = read_versions(run)[3]
    assert described(sources(run)) == "0 (initial model); 3, 4 (publication); 2, 4 (checkpoint)"
    assert digest_tensors(load_weights(run.weights(3), version).items()) == version.digest
