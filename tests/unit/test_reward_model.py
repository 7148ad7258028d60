"""A sequence classifier as a reward: the process that it runs in, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError
from rl_core.plan import parse_overrides, resolve
from rl_core.rollout.rewards.reward_model import check_classifier, scorer_of
from rl_core.rollout.rewards.scoring import check_reward, make_scorer
from rl_core.tokenizer import VOCABULARY, write_tokenizer
from rl_core.types import Prompt
from tests.learning import write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("classifier"), vocab=len(VOCABULARY))
    model = Qwen3ForSequenceClassification.from_pretrained(made, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    model.config.pad_token_id = 0
    model.save_pretrained(made)
    write_tokenizer(made, 256)
    return made


def expected(directory: Path, text: str) -> float:
    """By the stock model, over the ids of the ChatML text."""
    ids, rest = [], text
    while rest:
        token = max((t for t in VOCABULARY if rest.startswith(t)), key=len)
        ids.append(VOCABULARY.index(token))
        rest = rest[len(token):]
    model = Qwen3ForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


TEXT = "<|im_start|>user\n3 1 2<|im_end|>\n<|im_start|>assistant\n1 2 3<|im_end|>\n"


def task(directory: Path, **changes: object) -> dict:
    return {"path": str(directory), "label": None, "squash": False, "right": None, "threads": 1,
            "device": "cpu", "dtype": "float32", **changes}


def test_the_reward_is_the_classifiers_output_for_prompt_and_answer_as_one_chat(directory: Path) -> None:
    value = expected(directory, TEXT)
    plain = scorer_of(task(directory))("1 2 3", "", "3 1 2")
    assert plain == {"reward": pytest.approx(value, rel=1e-5), "correct": None}
    chat = [{"role": "user", "content": "3 1 2"}]
    squashed = scorer_of(task(directory, squash=True, right=0.0))("1 2 3", "", chat)
    assert squashed == {"reward": pytest.approx(1 / (1 + np.exp(-value)), rel=1e-5), "correct": True}


def test_it_computes_in_bfloat16_near_float32_and_only_where_there_is_a_device(directory: Path) -> None:
    exact, rounded = (scorer_of(task(directory, dtype=dtype))("1 2 3", "", "3 1 2")["reward"]
                      for dtype in ("float32", "bfloat16"))
    assert 0 < abs(rounded - exact) < 0.05 * max(1.0, abs(exact))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"scoring.model.device: .*sees no GPU.*rollout.engine.device"):
            scorer_of(task(directory, device="cuda"))


def test_a_trial_of_it_needs_no_gpu(directory: Path) -> None:
    assert check_reward(resolve(load_preset("tiny-cpu"), parse_overrides(
        ["reward=reward_model", f"scoring.model.path={directory}", "scoring.model.device=cuda"]))) == ()


def test_an_answer_that_is_longer_than_the_model_reads_is_an_error(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt and answer have 5\d\d tokens, and the reward model takes 256"):
        scorer_of(task(directory))("1" * 500, "", "3 1 2")


def settings(directory: Path) -> Config:
    return resolve(load_preset("tiny-cpu"), parse_overrides(["reward=reward_model",
                                                             f"scoring.model.path={directory}"]))


@pytest.mark.slow
@pytest.mark.algorithms
def test_it_scores_in_a_process_of_its_own_and_fails_answers_by_name(directory: Path) -> None:
    made = make_scorer(settings(directory))
    prompt = Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer="", columns={
        "prompt": "3 1 2"}, data_source="sort")
    try:
        assert made(prompt, "1 2 3").reward == pytest.approx(expected(directory, TEXT), rel=1e-5)
        with pytest.raises(RewardError, match=r"reward reward_model: .*the reward model takes 256"):
            made(prompt, "1" * 500)
    finally:
        made.close()


def test_what_is_no_trained_classifier_is_refused_before_anything_starts(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scoring.model.path: has no config.json"):
        check_reward(settings(tmp_path))
    policy = write_model(tmp_path / "policy", vocab=len(VOCABULARY))
    with pytest.raises(ConfigError, match=r"holds \['Qwen3ForCausalLM'\], not a sequence classifier"):
        check_classifier(str(policy), None)
    with pytest.raises(ConfigError, match=r"scoring.model.label: .* has 1 outputs, from 0 on"):
        check_classifier(str(directory), 1)
    shutil.copytree(directory, tmp_path / "headless")
    headless = Qwen3ForSequenceClassification.from_pretrained(directory).model
    headless.save_pretrained(tmp_path / "headless")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "headless" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks \['score.weight'\]: its score would be of weights drawn by lot"):
        scorer_of(task(tmp_path / "headless"))
