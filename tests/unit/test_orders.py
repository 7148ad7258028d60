"""Orders of prompts by a function of a user's: written before they are used, the same after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, SamplerError, SamplerTimeout
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import put_claim
from rl_core.experience.shards import ShardWriter
from rl_core.plan import check
from rl_core.rollout.order_calls import as_order, is_order
from rl_core.rollout.orders import Orders, Sampler, Seen, seen
from rl_core.rollout.prompts import PromptSource, load_tokenizer
from rl_core.run_dir import OwnerLock, RunDir, read_json
from rl_core.tokenizer import write_tokenizer
from rl_core.types import ShardRef
from tests.builders import make_claim, make_group

SAMPLERS = """
import random, time

def best_first(epoch, prompts, rows, seed, history):
    last = {seen["prompt"]: seen["reward"] for seen in history}
    return sorted(prompts, key=lambda p: -last.get(p, 0.5))

def backwards(epoch, prompts, rows, seed, history):
    return list(reversed(prompts)) if epoch % 2 else prompts

def by_row(epoch, prompts, rows, seed, history):
    return [p for _, p in sorted(zip(rows, prompts), reverse=True)]

def any_order(epoch, prompts, rows, seed, history):
    return random.sample(prompts, len(prompts))

def hangs(epoch, prompts, rows, seed, history):
    time.sleep(60)

def raises(epoch, prompts, rows, seed, history):
    raise OSError("no net")

def short(epoch, prompts, rows, seed, history):
    return prompts[1:]
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "mine.py").write_text(SAMPLERS)
    return directory


def config(name: str, **data: Any) -> Config:
    return Config.model_validate({"seed": 3, "data": {"sampler": f"./mine.py:{name}", "train": "sort", "size": 6,
                                                      "validation": None, **data}})


def orders(run: RunDir, work: Path, name: str, *history: Seen) -> Orders:
    return Orders(run, config(name), lambda: history, cwd=work)


def landed(prompt: int, reward: float, epoch: int = 0) -> Seen:
    return Seen(dataset_epoch=epoch, prompt=prompt, try_no=0, reward=reward, spread=1.0)


PROMPTS = np.arange(5)


def test_an_order_sees_what_has_landed_and_stands_from_then_on(run: RunDir, work: Path) -> None:
    first = orders(run, work, "best_first", landed(3, 0.9), landed(0, 0.1)).order(1, PROMPTS, PROMPTS)
    assert first.tolist() == [3, 1, 2, 4, 0]
    assert read_json(run.order(1)) == {"format": 1, "epoch": 1, "sampler": "./mine.py:best_first",
                                       "order": [3, 1, 2, 4, 0]}
    again = orders(run, work, "best_first", landed(4, 1.0)).order(1, PROMPTS, PROMPTS)
    assert again.tolist() == first.tolist(), "more has landed since: the order stands"
    assert orders(run, work, "raises").order(1, PROMPTS, PROMPTS).tolist() == first.tolist(), "nobody is asked again"
    assert orders(run, work, "best_first", landed(4, 1.0)).order(2, PROMPTS, PROMPTS).tolist() == [4, 0, 1, 2, 3]


def test_random_numbers_of_a_sampler_follow_from_seed_and_epoch(tmp_path: Path, work: Path) -> None:
    def drawn(name: str, epoch: int) -> list[int]:
        (tmp_path / name).mkdir(exist_ok=True)
        return orders(RunDir(tmp_path / name), work, "any_order").order(epoch, PROMPTS, PROMPTS).tolist()

    assert drawn("a", 0) == drawn("b", 0) != drawn("a", 1)


@pytest.mark.parametrize(("name", "error", "words"), [
    ("raises", SamplerError, "data.sampler ./mine.py:raises: raised OSError: no net"),
    ("short", SamplerError, "data.sampler ./mine.py:short: the order of dataset epoch 0 has 4 prompts and must have 5"),
    ("absent", SamplerError, "cannot be loaded: ValueError: ./mine.py has no function 'absent'")])
def test_a_sampler_that_fails_is_a_named_end_and_no_order_is_written(run: RunDir, work: Path, name: str,
                                                                     error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        orders(run, work, name).order(0, PROMPTS, PROMPTS)
    assert not run.orders.exists() or not list(run.orders.glob("*.json"))


def test_a_sampler_that_hangs_ends_by_its_deadline(work: Path) -> None:
    sampler = Sampler("./mine.py:hangs", cwd=work, deadline_s=0.5)
    with pytest.raises(SamplerTimeout, match=r"no answer within 0\.5 s"):
        sampler(0, PROMPTS, PROMPTS, 1, [])
    sampler.close()


def test_a_stored_order_of_another_data_set_is_refused(run: RunDir, work: Path) -> None:
    orders(run, work, "backwards").order(0, PROMPTS, PROMPTS)
    with pytest.raises(SamplerError, match=r"epoch-000000.json: the stored order has 5 prompts and must have 4"):
        orders(run, work, "backwards").order(0, PROMPTS[:4], PROMPTS[:4])


@pytest.mark.parametrize(("order", "words"), [
    ([0, 1, 2, 3], None), ([3, 1, 0, 2], None), ([0, 1, 2], "has 3 prompts"), ([0, 1, 2, 2], "3 is not in it"),
    ([0, 1, 2, 4], "3 is not in it")])
def test_what_is_an_order(order: list[int], words: str | None) -> None:
    problem = is_order(order, [0, 1, 2, 3])
    assert problem is None if words is None else problem is not None and words in problem


@pytest.mark.parametrize("value", [None, "0123", 3, [0.5], [True], ["1"], {1: 2}])
def test_what_is_no_list_of_prompts_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="it must be a list of the prompts"):
        as_order(value)
    assert as_order(np.array([2, 1])) == [2, 1]


def test_prompts_come_in_the_order_of_the_function(run: RunDir, work: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 256)
    settings = config("backwards")
    source = PromptSource(settings, load_tokenizer(tmp_path), vocab_size=58)
    source.sampled = Orders(run, settings, lambda: [], cwd=work).order
    assert [source.prompt_idx(epoch, i) for epoch in (0, 1) for i in range(6)] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    assert source.at(1, 0).prompt_idx == 5
    plain = PromptSource(Config.model_validate({"seed": 3, "data": {"train": "sort", "size": 6, "validation": None}}),
                         load_tokenizer(tmp_path), vocab_size=58)
    assert sorted(plain.prompt_idx(0, i) for i in range(6)) == [0, 1, 2, 3, 4, 5], "without a sampler nothing is asked"


def test_the_history_is_what_has_landed_also_after_a_restart(run: RunDir) -> None:
    writer = ShardWriter(run, "w", 1, {}, False)
    shard = writer.land([make_group(4, n=4, rewards=[0.0, 1.0, 1.0, 0.0]), make_group(2, n=2, rewards=[0.25, 0.25])])
    both = [landed(2, 0.25), landed(4, 0.5)]
    for settings, expected in ((config("backwards"), both), (config("backwards"), both), (Config(), [])):
        lock = OwnerLock(run)
        experience = Experience(run, settings, lock.next_attempt(0, None))
        lock.release()  # the second start finds them claimed
        experience.discover(full=True)
        found = sorted(seen(experience.landed_groups()))
        assert [(s.prompt, s.reward) for s in found] == [(s.prompt, s.reward) for s in expected]
        assert [s.spread for s in found] == ([0.0, 1.0] if found else [])
        if not run.claim(0).exists():
            put_claim(run, make_claim(run, [ShardRef(stream=shard.stream, seq=shard.seq)]), fsync=False)


def test_a_run_on_another_runs_shards_has_no_order_to_make() -> None:
    with pytest.raises(ConfigError, match=r"data.sampler: .*this run samples none"):
        check(Config.model_validate({"data": {"shards_from": "other", "sampler": "./mine.py:backwards"}}))
