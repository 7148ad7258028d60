"""The contract of every kind of hook: kept by the examples of docs/examples/hooks.py, and asked of a function of yours
by `pytest --hook ./mine.py:loss`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.hooks.contract import problems
from rl_core.hooks.kinds import FIELDS, KINDS, Kind
from rl_core.hooks.loading import hook
from rl_core.hooks.trial import try_hook, whole_target

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def test_a_function_of_yours_keeps_its_contract(own_hook: str) -> None:
    """Of the functions that `--hook` names; none is named, none is asked."""
    kind, target = whole_target(own_hook)
    assert try_hook(kind, target) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_every_kind_keeps_its_contract(kind: Kind) -> None:
    assert problems(kind, hook(kind, FIELDS[kind], f"./hooks.py:{kind}", EXAMPLES)) == []


BROKEN = """
import random, time
import numpy as np

def constant_reward(completion): return 1.0
def random_reward(completion): return random.random() + len(completion)
def nan_reward(completion): return float("nan")
def no_verdict(group): pass
def random_verdict(group): return random.random() < 0.5
def rejects_all(group): return "bad"
def half_order(epoch, prompts, rows, seed, history): return prompts[:len(prompts) // 2 + 1]
def twice(epoch, prompts, rows, seed, history): return [prompts[0]] * len(prompts)
def drifting(epoch, prompts, rows, seed, history, calls=[]):
    calls.append(0)
    return prompts[len(calls) % len(prompts):] + prompts[:len(calls) % len(prompts)]
def same_rows(size, seed, held_out): return [{"prompt": str(i), "answer": "1"} for i in range(size)]
def no_answers(size, seed, held_out): return [{"prompt": f"{i} {held_out}"} for i in range(size)]
def too_many(size, seed, held_out): return [{"prompt": "", "answer": ""}] * (size + 1)
def a_scalar(answers): return 1.0
def by_place(answers): return np.arange(len(answers.reward_N), dtype=float)
def divides(answers):
    with np.errstate(all="ignore"):
        return answers.reward_N / answers.reward_N.sum() * 0 / 0
def in_place(answers):
    answers.reward_N[:] = 0
    return answers.reward_N + 0
def summed(tokens): return (tokens.policy_S * tokens.advantage_S).sum()
def detached(tokens): return tokens.policy_S.detach()
def unlogged(tokens): return tokens.advantage_S / (tokens.policy_S - tokens.policy_S)
def by_batch(tokens): return tokens.policy_S * tokens.policy_S.new_tensor(range(len(tokens.policy_S)))
def as_text(tokens): return "none"
def negative(d, sequence, sequences): return -d.exp()
def unbounded(d, sequence, sequences): return (d * 100).exp()
def not_one(d, sequence, sequences): return d.exp() * 2
def a_list(step): return [1.0]
def many(step): return {str(i): 1.0 for i in range(9)}
def infinite(step): return {"x": float("inf")}
def bad_name(step): return {"two words": 1.0}
def raises(step): return step["no such key"]
def never_goes_on(session): return None
def asks_a_number(session): return 7
def asks_at_random(session): return str(random.random())
def asks_nobody(session): return [{"role": "nobody", "content": "x"}]
"""
TROUBLE: dict[str, tuple[Kind, str]] = {
    "constant_reward": ("reward", "the same reward 1"), "random_reward": ("reward", "two calls"),
    "nan_reward": ("reward", "it must be finite"), "no_verdict": ("group_filter", "the verdict is None"),
    "random_verdict": ("group_filter", "two calls"), "rejects_all": ("group_filter", "leaves out every group"),
    "half_order": ("sampler", "has 4 prompts and must have 7"), "twice": ("sampler", "is not every prompt once"),
    "drifting": ("sampler", "two calls give other orders"), "same_rows": ("environment", "held-out rows meet"),
    "no_answers": ("environment", "a row has no 'answer'"), "too_many": ("environment", "there must be 1 to 16"),
    "a_scalar": ("advantage", r"the shape (); it must be (6,)"), "by_place": ("advantage", "the order of the answers"),
    "divides": ("advantage", "it must be finite"), "in_place": ("advantage", "are changed"),
    "summed": ("loss", "the shape (); it must be (12,)"), "detached": ("loss", "no gradient by policy_S"),
    "unlogged": ("loss", "not finite"), "by_batch": ("loss", "the order of the answers"),
    "as_text": ("loss", "the result is str"), "negative": ("correction", "at least 0"),
    "unbounded": ("correction", "weights are finite"), "not_one": ("correction", "d = 0) are not 1, but [2.0"),
    "a_list": ("metrics", "must be a dict"), "many": ("metrics", "9 metrics; at most 5"),
    "infinite": ("metrics", "x is infinite"), "bad_name": ("metrics", "'two words' is no name"),
    "raises": ("metrics", "raised KeyError: 'no such key'"), "never_goes_on": ("session", "ends every session"),
    "asks_a_number": ("session", "the result is 7; return"), "asks_at_random": ("session", "go on otherwise"),
    "asks_nobody": ("session", "nobody")}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("broken")
    (directory / "broken.py").write_text(BROKEN)
    return directory


@pytest.mark.parametrize("name", TROUBLE)
def test_a_function_that_does_not_keep_its_contract_is_told_why(name: str, broken: Path) -> None:
    kind, words = TROUBLE[name]
    found = problems(kind, hook(kind, FIELDS[kind], f"./broken.py:{name}", broken))
    assert any(words in problem for problem in found), found


def test_a_function_that_hangs_or_ends_its_process_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef metrics(step): os._exit(7)\n")
    assert try_hook("metrics", "./mine.py:metrics", cwd=tmp_path) == [
        "its process ended with exit code 7: no word"]


@pytest.mark.slow
@pytest.mark.algorithms
def test_pytest_asks_the_contract_of_a_function_of_yours_alone() -> None:
    """The bare command of docs/hooks.md 10, from the root of the clone."""
    asked = ("./docs/examples/hooks.py:metrics", "loss=./docs/examples/hooks.py:reward")
    kept, broken = (subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--hook", hook], cwd=ROOT,
                                   text=True, capture_output=True, env=dict(os.environ), check=False).stdout
                    for hook in asked)
    assert kept.splitlines()[-1].strip("= ").startswith("1 passed in"), kept
    assert broken.splitlines()[-1].strip("= ").startswith("1 failed in") and "raised TypeError" in broken, broken
