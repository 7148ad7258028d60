"""Functions of a user's inside a training step: the numbers of what they copy, and a named end where they fail."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.advantage_settings import FunctionAdvantage, GroupAdvantage
from rl_core.config import Config
from rl_core.correction_settings import CorrectionConfig
from rl_core.errors import ConfigError, DataError, HookFailed
from rl_core.experience.reader import ClaimRows
from rl_core.hooks.kinds import Hook, hooks_of, is_function
from rl_core.hooks.loading import digest, hook, learner_hooks
from rl_core.hooks.trial import check_hooks, whole_target
from rl_core.learner.advantages.estimate import advantages, answers_of
from rl_core.learner.correction import correction_weights, mean_weight
from rl_core.learner.objective import chosen_loss
from rl_core.learner.own_metrics import own_metrics
from rl_core.learner.sums import Bounds
from rl_core.metrics import MAX_PARTS, check, is_of_step, is_tracked, names, part_metrics
from rl_core.plan import check as check_plan
from rl_core.rollout.dataset import training_data, validation_data
from tests.golden.losses import random_case
from tests.unit.test_golden_losses import tokens_of

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hooks.py"
MINE = """
import numpy as np

def dr_grpo(answers):
    sizes = np.bincount(answers.group_N)
    means = np.bincount(answers.group_N, weights=answers.reward_N) / sizes
    return answers.reward_N - means[answers.group_N]

def truncated(d, sequence, sequences):
    return d.exp().clamp(max=2.0)

def short(answers):
    return answers.reward_N[:-1]

def nan(answers):
    return answers.reward_N * float("nan")

def raises(*anything):
    raise OSError("no net")

def negative(d, sequence, sequences):
    return -d.exp()

def counts(step):
    return {"answers": len(step["rewards_N"]), "oldest": step["age_G"].max(), "step": step["step"]}

def rows(size, seed, held_out):
    return [{"prompt": f"{i} of {held_out}", "answer": str(seed)} for i in range(size)]

def none(size, seed, held_out):
    return []
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the command, with the files in it."""
    (tmp_path / "mine.py").write_text(MINE)
    shutil.copy(EXAMPLES, tmp_path / "hooks.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- numbers


def test_a_loss_written_out_is_ppo_clip_to_the_bit() -> None:
    case = random_case(3)
    own = Config.model_validate({"learner": {"loss": {"name": "function", "path": "./hooks.py:loss"}}}).learner
    ours = Config.model_validate({"learner": {"loss": {"name": "ppo_clip", "dual_clip": None}}}).learner
    mine, theirs = tokens_of(case), tokens_of(case)
    found, expected = chosen_loss(mine, own), chosen_loss(theirs, ours)
    assert torch.equal(found.loss_S, expected.loss_S) and torch.equal(found.ratio_S, expected.ratio_S)
    assert not found.low_S.any() and not found.high_S.any(), "a plain tensor says nothing of bounds"
    for loss, tokens in ((found, mine), (expected, theirs)):
        loss.loss_S.sum().backward()
        assert tokens.policy_S.grad is not None
    assert torch.equal(mine.policy_S.grad, theirs.policy_S.grad)


def test_an_estimator_written_out_is_dr_grpo_also_where_answers_are_absent() -> None:
    answers = answers_of(np.array([1.0, 0.0, 0.5, 3.0, -1.0]), np.array([0, 0, 1, 1, 1]))
    present = np.array([True, True, False, True, True])
    own = FunctionAdvantage(path="./mine.py:dr_grpo")
    ours = GroupAdvantage(normalize_by_std=False)
    for there in (None, present):
        np.testing.assert_array_equal(advantages(answers, own, present_N=there),
                                      advantages(answers, ours, present_N=there))


def test_weights_written_out_are_truncated_ones_and_are_normalised_alike() -> None:
    d, sequence = torch.tensor([0.1, -0.4, 2.0, 0.0, -3.0]), torch.tensor([0, 0, 1, 1, 1])
    own = CorrectionConfig(weights="function", path="./mine.py:truncated", normalize=True)
    ours = CorrectionConfig(weights="token_truncate", cap=2.0, normalize=True)
    found, expected = correction_weights(d, sequence, 2, own), correction_weights(d, sequence, 2, ours)
    assert found is not None and expected is not None and torch.equal(found, expected)
    assert torch.equal(mean_weight(found, sequence, 2, own), mean_weight(expected, sequence, 2, ours))
    assert Bounds.of(own).high == float("inf"), "no token counts as cut by a cap that is not there"


def rows_of_a_claim() -> Any:
    return SimpleNamespace(reward_N=np.array([0, 1], np.float32), correct_N=np.array([0, np.nan], np.float32),
                           length_N=np.array([3, 4], np.int32), finish_N=np.array([0, 1], np.int8),
                           group_N=np.array([0, 0], np.int32), idx_min_G=np.array([2], np.int32), sources=("s",),
                           source_G=np.array([0], np.int32), parts={}, groups=1)


def test_own_metrics_are_recorded_and_take_the_places_of_parts() -> None:
    rows: ClaimRows = rows_of_a_claim()
    claim: Any = SimpleNamespace(step=7, idx=5, policy="keep")
    found = own_metrics("./mine.py:counts", rows, claim, {"reward/mean": 0.5})
    assert found == {"own/answers": 2.0, "own/oldest": 3.0, "own/step": 7.0, "own/failed": 0.0}
    assert all(is_tracked(name) and is_of_step(name) for name in found)
    parts = part_metrics({f"p{i}": 0.0 for i in range(9)}, MAX_PARTS - len(found))
    assert len(parts) == 2
    check(dict.fromkeys(names("learner"), 0.0) | found | parts, "learner")
    assert own_metrics(None, rows, claim, {}) == {}


def test_own_metrics_that_fail_are_counted_and_end_no_run(caplog: pytest.LogCaptureFixture) -> None:
    claim: Any = SimpleNamespace(step=7, idx=5, policy="keep")
    assert own_metrics("./mine.py:raises", rows_of_a_claim(), claim, {}) == {"own/failed": 1.0}
    assert "step 7 has no metrics of your own: learner.metrics ./mine.py:raises raised OSError: no net" in caplog.text


# -- named ends


FAILING: dict[str, tuple[Any, str]] = {
    "a short result": (lambda: advantages(answers_of(np.ones(3), np.zeros(3, int)), FunctionAdvantage(
        path="./mine.py:short")), r"learner.advantage.path ./mine.py:short: the result has the shape \(2,\)"),
    "not finite": (lambda: advantages(answers_of(np.ones(3), np.zeros(3, int)), FunctionAdvantage(
        path="./mine.py:nan")), "the advantage of answer 0 is nan"),
    "raises": (lambda: advantages(answers_of(np.ones(3), np.zeros(3, int)), FunctionAdvantage(
        path="./mine.py:raises")), "learner.advantage.path ./mine.py:raises raised OSError: no net"),
    "negative weights": (lambda: correction_weights(torch.zeros(3), torch.zeros(3, dtype=torch.int64), 1,
                                                    CorrectionConfig(weights="function", path="./mine.py:negative")),
                         "learner.correction.path ./mine.py:negative: a weight is -1.0"),
}


@pytest.mark.parametrize(("call", "words"), FAILING.values(), ids=FAILING)
def test_a_hook_that_fails_in_a_step_is_a_named_end(call: Any, words: str) -> None:
    with pytest.raises(HookFailed, match=words):
        call()


# -- loading, and what replay knows


def test_a_file_is_loaded_once_and_its_digest_is_that_of_its_bytes(work: Path) -> None:
    assert hook("loss", "learner.loss.path", "./hooks.py:loss") is hook("loss", "learner.loss.path", "./hooks.py:loss")
    before = digest("./mine.py:rows", work)
    (work / "mine.py").write_text(MINE + "\n")
    assert digest("./mine.py:rows", work) != before and digest("./none.py:f", work) == "absent"
    assert digest("rl_core.rollout.rewards.exact:exact", work) == digest("rl_core.rollout.rewards.exact:other", work)
    assert digest("no.such.module:f", work) == "absent"


def test_the_functions_of_a_step_are_part_of_its_environment(work: Path) -> None:
    learner = {"loss": {"name": "function", "path": "./hooks.py:loss"}, "metrics": "./mine.py:counts"}
    config = Config.model_validate({"learner": learner, "reward": "./mine.py:x",
                                    "data": {"sampler": "./hooks.py:sampler"}})
    text = learner_hooks(config)
    assert text == (f"learner.loss.path=./hooks.py:loss {digest('./hooks.py:loss', work)}; "
                    f"learner.metrics=./mine.py:counts {digest('./mine.py:counts', work)}")
    assert learner_hooks(Config()) == "" and list(hooks_of(Config())) == []
    assert Hook("sampler", "data.sampler", "./hooks.py:sampler") in list(hooks_of(config))


@pytest.mark.parametrize(("text", "found"), [
    ("./mine.py:loss", ("loss", "./mine.py:loss")), ("metrics=./mine.py:counts", ("metrics", "./mine.py:counts")),
    ("my.package:group_filter", ("group_filter", "my.package:group_filter"))])
def test_the_kind_of_a_hook_is_its_name_or_stands_before_it(text: str, found: tuple[str, str]) -> None:
    assert whole_target(text) == found


@pytest.mark.parametrize("text", ["./mine.py:f", "los=./mine.py:f", "./mine.py", "loss"])
def test_a_hook_of_no_kind_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no kind of hook; write KIND="):
        whole_target(text if text != "loss" else "lo=ss")


@pytest.mark.parametrize(("learner", "words"), [
    ({"correction": {"weights": "function"}}, "learner.correction.path: belongs to learner.correction.weights=f"),
    ({"correction": {"path": "./mine.py:truncated"}}, "learner.correction.path: belongs to"),
    ({"correction": {"mode": "bypass", "weights": "function", "path": "./mine.py:truncated"},
      "loss": {"name": "function", "path": "./hooks.py:loss"}}, "learner.correction.weights: with mode=bypass")])
def test_combinations_that_make_no_sense_are_refused(learner: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_plan(Config.model_validate({"learner": learner}))


def test_hooks_are_tried_before_a_start(work: Path) -> None:
    check_hooks(Config.model_validate({"learner": {"metrics": "./mine.py:counts"}}))
    with pytest.raises(ConfigError, match=r"learner.metrics: ./mine.py:raises: .*raised OSError: no net"):
        check_hooks(Config.model_validate({"learner": {"metrics": "./mine.py:raises"}}))
    with pytest.raises(ConfigError, match=r"learner.metrics: no such file"):
        check_hooks(Config.model_validate({"learner": {"metrics": "./none.py:f"}}))


# -- rows by a function


def data(train: str, **more: Any) -> Config:
    return Config.model_validate({"seed": 5, "data": {"train": train, "validation": "./mine.py:rows", "size": 4,
                                                      "validation_size": 2, **more}})


def test_rows_are_made_by_a_function_and_are_another_data_set_when_they_change(work: Path) -> None:
    made, held_out = training_data(data("./mine.py:rows")), validation_data(data("./mine.py:rows"))
    assert [(made.row(i).prompt, made.row(i).answer) for i in range(len(made))] == [
        (f"{i} of False", "5") for i in range(4)]
    assert [held_out.row(i).prompt for i in range(len(held_out))] == ["0 of True", "1 of True"]
    assert made.where(2) == "data.train row 2"
    assert training_data(data("./mine.py:rows", size=3)).digest != made.digest
    assert training_data(data("./mine.py:rows")).digest == made.digest


@pytest.mark.parametrize(("path", "error", "words"), [
    ("./mine.py:none", DataError, "data.train: ./mine.py:none: 0 rows; there must be 1 to 4"),
    ("./mine.py:raises", DataError, "data.train: ./mine.py:raises raised TypeError"),
    ("./mine.py:absent", ConfigError, "data.train: ./mine.py:absent cannot be loaded"),
    ("../out.py:rows", ConfigError, "data.train: .*lies outside the working directory")])
def test_rows_that_cannot_be_made_are_refused_by_name(path: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        training_data(data(path))


@pytest.mark.parametrize(("source", "told"), [
    ("./mine.py:rows", True), ("a/b.py:f", True), ("train.jsonl", False), ("reasoning_gym:x", False),
    ("hf:a/b:train", False), ("mine.py", False), ("./mine.py:", False), ("c:/x.py", False)])
def test_what_is_a_function_of_rows(source: str, told: bool) -> None:
    assert is_function(source) == told
