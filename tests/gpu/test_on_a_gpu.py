"""What is promised of a CUDA device: `make test-gpu`, on a machine that has one. Two ranks need two devices.

HEADWAY_TEST_DEVICE=cpu runs the same code on a machine without: it says that the tests are right, and nothing of a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from rl_core.config import Config, LearnerConfig
from rl_core.experience.audit import audit
from rl_core.learner.attention import Call, Rows, packed_attention
from rl_core.learner.learner import Learner
from rl_core.learner.losses.m2po import m2po_tokens
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from rl_core.versions import read_versions
from rl_core.weights import load_weights
from tests.learning import (
    all_by,
    claim_groups,
    random_groups,
    sampled_by,
    start_attempt,
    train_as_rank,
    write_model,
)
from tests.runs import Home, ended

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("HEADWAY_TEST_DEVICE", "cuda")
ON = torch.device(DEVICE)
STEPS = 3


@pytest.fixture(autouse=True)
def device() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use")


def settings(**learner: object) -> Config:
    return Config(groups_per_step=4, group_size=4, total_steps=20, learner=LearnerConfig.model_validate(
        {"lr": 1e-3, "warmup_steps": 0, "token_budget": 100, "device": DEVICE, **learner}))


def new_run(place: Path, config: Config, steps: int = STEPS) -> RunDir:
    run = RunDir(place)
    write_model(run.model)
    start_attempt(run)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    for step in range(steps):
        claim_groups(run, config, step, [sampled_by(stock, all_by(0, group)) for group in random_groups(step)])
    return run


def trained(run: RunDir, config: Config) -> list[str]:
    learner = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    records = [learner.train(step) for step in range(STEPS)]
    learner.checkpoint()
    return [record.weights_digest for record in records if record is not None]


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["each its own", "grouped queries"])
def test_attention_behind_a_shared_prompt_is_that_of_the_host(kv_heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 16) for heads in (4, kv_heads, kv_heads))
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]])
    calls = (Call(torch.tensor([[0, 1, 2]])), Call(places[:, 3:], places, torch.tensor([3])),
             Call(torch.tensor([[7, 8]])))
    home = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])

    def attended(on: torch.device) -> torch.Tensor:
        rows = Rows(tuple(Call(*(None if x is None else x.to(on) for x in (one.query, one.key, one.before_R)))
                          for one in calls), home.to(on))
        found, _ = packed_attention(torch.nn.Module(), query.to(on), key.to(on), value.to(on), None,
                                    headway_rows=rows)
        return found.cpu()

    found = attended(ON)
    torch.testing.assert_close(found, attended(torch.device("cpu")), atol=1e-5, rtol=1e-5)
    alone = scaled_dot_product_attention(query[:, :, 7:], key[:, :, 7:], value[:, :, 7:], is_causal=True,
                                         enable_gqa=kv_heads != 4)
    torch.testing.assert_close(found[0, 7:], alone[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_have_the_same_bits_again_and_with_blocks_that_are_recomputed(tmp_path: Path, dtype: str) -> None:
    digests = [trained(new_run(tmp_path / str(number), config), config) for number, config in enumerate(
        (settings(dtype=dtype), settings(dtype=dtype), settings(dtype=dtype, recompute=True)))]
    assert len(digests[0]) == STEPS and digests[0] == digests[1] == digests[2]


def test_steps_are_those_of_the_host_but_for_rounding(tmp_path: Path) -> None:
    weights = []
    for place, name in (("here", DEVICE), ("host", "cpu")):
        config = settings(device=name, adam_eps=1e-4)  # or the sign of a gradient that is nearly 0 moves a whole lr
        run = new_run(tmp_path / place, config)
        trained(run, config)
        newest = max(read_versions(run).values(), key=lambda version: version.v)
        weights.append(load_weights(run.weights(newest.v), newest))
    for name, mine in weights[0].items():
        torch.testing.assert_close(mine, weights[1][name], atol=2e-5, rtol=0.0, msg=name)


def test_a_checkpoint_gives_the_state_back_bit_for_bit(tmp_path: Path) -> None:
    config = settings()
    run = new_run(tmp_path / "run", config, steps=STEPS + 1)
    trained(run, config)
    learners = [Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
                for _ in range(2)]
    assert [learner.restore() for learner in learners] == [STEPS, STEPS]
    one, two = (learner.train(STEPS) for learner in learners)
    assert one is not None and two is not None and one.weights_digest == two.weights_digest


def test_tokens_of_m2po_are_chosen_without_a_sum_that_cuda_cannot_repeat() -> None:
    torch.use_deterministic_algorithms(True)
    behavior = torch.tensor([0.0, 0.0, 0.0, 0.0], device=ON)
    proximal = torch.tensor([0.1, 1.0, 0.0, 0.2], device=ON)
    assert m2po_tokens(behavior, proximal, tau=0.04).tolist() == [False, True, False, False]


def two_ranks(run: RunDir, config: Config, place: Path, name: str) -> list[Path]:
    """Train STEPS in two processes, whose meeting place is new; what they leave."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train_as_rank, args=(
        rank, 2, str(run.root), config, str(place / f"meeting-{name}"), STEPS, str(place / name)))
        for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return [place / f"{name}-{rank}.pt" for rank in range(2)]


def test_two_ranks_train_as_one_does_and_go_on_behind_their_checkpoint(tmp_path: Path) -> None:
    """The second pair of processes meets at another place, takes up the checkpoint, and trains at once."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: two ranks need two")
    config = settings()
    alone = new_run(tmp_path / "alone", config, steps=2 * STEPS)
    trained(alone, config)
    two = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2, "recompute": True})})
    run = new_run(tmp_path / "together", two, steps=2 * STEPS)
    two_ranks(run, two, tmp_path, "first")
    two_ranks(run, two, tmp_path, "second")
    assert recorded_steps(run) == list(range(2 * STEPS))
    for step in range(STEPS):
        mine, theirs = read_record(alone, step).metrics, read_record(run, step).metrics
        for name in ("train/policy_loss", "train/grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4), (step, name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    yield Home(tmp_path_factory.mktemp("home"))


def test_a_run_learns_its_engine_agrees_and_its_steps_replay(home: Home) -> None:
    """Learner, rollout and validation share one device; engine and learner compute in bfloat16."""
    share = ["learner.gpus=0.4", "rollout.engine.gpus=0.2"] if DEVICE == "cuda" else []
    run = ended(home.train("gpu", "total_steps=30", f"learner.device={DEVICE}", f"rollout.engine.device={DEVICE}",
                           "learner.dtype=bfloat16", "rollout.engine.dtype=bfloat16", "learner.recompute=true",
                           *share))
    assert recorded_steps(run) == list(range(30)) and audit(run).violations == []
    mismatch = [read_record(run, step).metrics["train/mismatch_current_abs"] for step in range(30)]
    print(f"mismatch of engine and learner: at most {max(mismatch):.4f} nats")
    assert max(mismatch) < 0.05
    replayed = home.call("replay", "gpu", "--step", "7", "--json")
    assert replayed.process.returncode == 0, replayed.said
