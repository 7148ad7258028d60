"""A user's afternoon, three times over: their rows, their reward and their model directory, from the check of the data
to a model that transformers loads.

The rows and rewards are written as users of verl, of TRL and of reasoning-gym have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rl_core.checkpoint import newest_whole
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import read_groups
from rl_core.records import recorded_steps
from tests.runs import Home

STEPS = 3
SMALL = (f"total_steps={STEPS}", "groups_per_step=2", "group_size=2", "sampling.max_new_tokens=8",
         "validation.every=100", "validation.sampled=true", "validation.n=2", "data.validation_size=4",
         "data.max_prompt_tokens=400", "learner.lr=1e-3", "model.type=local", "model.path=./model")
COMPUTE_SCORE = '''
"""A reward as it is written for verl."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "school/sums" and isinstance(extra_info, dict) and extra_info["index"] >= 0
    right = solution_str.strip() == ground_truth
    length = len(solution_str)
    return {"score": 0.1 * length + right, "acc": right, "pred": solution_str.strip(), "letters": length}
'''
TRL_REWARD = '''
"""A reward as it is written for TRL's GRPOTrainer."""


def close_to(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer)
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text) & set(truth)) / 10 + len(text) / 100 for text, truth in zip(texts, answer)]
'''


def verl_rows(place: Path, name: str, n: int, first: int) -> None:
    rows = [{"data_source": "school/sums", "prompt": [{"role": "user", "content": f"What is {i} + {i + 1}?"}],
             "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
             "extra_info": {"index": i, "split": "train"}} for i in range(first, first + n)]
    pq.write_table(pa.Table.from_pylist(rows), place / name)


def verl(place: Path) -> list[str]:
    verl_rows(place, "train.parquet", 24, 0)
    verl_rows(place, "test.parquet", 8, 100)
    (place / "reward.py").write_text(COMPUTE_SCORE)
    return ["data.train=train.parquet", "data.validation=test.parquet", "reward=./reward.py:compute_score"]


def trl(place: Path) -> list[str]:
    for name, first, n in (("train.jsonl", 0, 24), ("test.jsonl", 100, 8)):
        rows = [{"prompt": [{"role": "user", "content": f"Name the number after {i}."}], "answer": str(i + 1)}
                for i in range(first, first + n)]
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text(TRL_REWARD)
    return ["data.train=train.jsonl", "data.validation=test.jsonl", "reward=./reward.py:close_to"]


def reasoning(place: Path) -> list[str]:
    return ["reward=reasoning_gym:basic_arithmetic", "data.size=24"]


AFTERNOONS: dict[str, Callable[[Path], list[str]]] = {"verl": verl, "trl": trl, "reasoning_gym": reasoning}
SLOW = pytest.mark.slow  # `make test` has one of the three


def bytes_model(directory: Path) -> None:
    """A Qwen2 of random weights whose tokenizer takes any text, byte by byte, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *specials])}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
                               "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    torch.manual_seed(0)
    settings = Qwen2Config(vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
                           eos_token_id=vocabulary["<|im_end|>"], pad_token_id=vocabulary["<|endoftext|>"])
    Qwen2ForCausalLM(settings).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True)
class Afternoon:
    """What was trained, measured and exported, and where."""

    name: str
    place: Path
    measured: dict[str, Any]


@pytest.fixture(scope="module", params=["verl", pytest.param("trl", marks=SLOW),
                                        pytest.param("reasoning_gym", marks=SLOW)])
def afternoon(request: pytest.FixtureRequest, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Afternoon:
    name: str = request.param
    place = tmp_path_factory.mktemp(name)
    bytes_model(place / "model")
    train = home.start("train", "--preset", "local-model-cpu", *words(AFTERNOONS[name](place)), "--run-key", name,
                       "--json", key=name, cwd=place)
    assert train.wait(180) == 0, train.said
    assert (train.json["status"], train.json["steps"], train.err) == ("completed", STEPS, "")
    validate = home.start("validate", name, "--json", cwd=place)
    export = home.start("export", name, "--out", "out", "--json", cwd=place)
    for command in (validate, export):
        assert command.wait(120) == 0, command.said
    return Afternoon(name, place, validate.json)


def words(settings: list[str]) -> list[str]:
    return [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


def test_what_was_trained_on_own_rows_and_reward_is_measured(home: Home, afternoon: Afternoon) -> None:
    measured, name = afternoon.measured, afternoon.name
    assert measured["n"] == 4 and len(measured["sampled_reward_interval"]) == 2
    [source] = measured["by_source"]
    assert source == {"verl": "school/sums", "trl": "test", "reasoning_gym": "reasoning_gym:basic_arithmetic"}[name]
    groups = read_groups(home.run(name), read_claim(home.run(name), 0))
    parts = {part for group in groups for answer in group["responses"] for part in answer["parts"]}
    assert parts == ({"letters"} if name == "verl" else set())


def test_the_export_is_loaded_by_transformers_with_equal_log_probs(home: Home, afternoon: Afternoon) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(afternoon.place / "out", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(afternoon.place / "model", dtype=torch.float32)
    run = home.run(afternoon.name)
    checkpoint = newest_whole(run)
    assert checkpoint is not None and checkpoint.state.n == recorded_steps(run)[-1] + 1 == STEPS
    ours.load_state_dict({name: torch.as_tensor(value) for name, value in checkpoint.parameters.items()}, strict=False)
    group = read_groups(run, read_claim(run, STEPS - 1))[0]
    ids = torch.tensor([[*group["prompt_ids"], *group["responses"][0]["ids"]]])
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits.log_softmax(-1), ours(ids).logits.log_softmax(-1))
    assert AutoTokenizer.from_pretrained(afternoon.place / "out").chat_template
