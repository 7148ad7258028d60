"""Builders of small real models, and of runs whose claims a learner can train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_core.config import Config
from rl_core.experience.batch import session_numbers
from rl_core.experience.ledger import put_claim
from rl_core.experience.reader import ClaimRows
from rl_core.experience.shards import ShardWriter
from rl_core.learner.learner import fold_claims
from rl_core.learner.replay import replay
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import Claim, ShardRef, Trajectory, TrajectoryGroup, VersionRuns
from tests.builders import VOCAB, make_claim, make_group

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2, sliding window of 5": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 5,
                                                                   "max_window_layers": 1}),
}


def write_model(directory: Path, family: str = "qwen3", *, vocab: int = VOCAB, seed: int = 0) -> Path:
    """A random model of two layers in Hugging Face's format. Its logits are spread enough to tell tokens apart."""
    make_config, make_model, options = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(make_config(vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                                       eos_token_id=1, pad_token_id=1, bos_token_id=None, **options))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    return directory


def answer_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of an answer by the stock model, one sequence at a time: the reference of everything packed."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1].float() / temperature
    return logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(list(answer))]


def session_ordinals(groups: Sequence[TrajectoryGroup]) -> list[int]:
    """Of every trajectory, over all groups."""
    found: list[int] = []
    for group in groups:
        before = found[-1] + 1 if found else 0
        found += [before + number for number in session_numbers(group)]
    return found


def rows_of(groups: Sequence[TrajectoryGroup], mine: Sequence[bool] | None = None) -> ClaimRows:
    """What a reader with every version known (idx = v) makes of these groups, built without a file."""
    answers = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    mine_N = np.ones(len(answers), np.bool_) if mine is None else np.array(mine)
    own = [t for (_, t), m in zip(answers, mine_N, strict=True) if m]
    prompts = [group.lease.prompt.token_ids_P for group in groups]

    def flat(arrays: list[Any], dtype: Any) -> Any:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    def per_group(values: list[Any], dtype: Any) -> Any:
        return np.array(values, dtype)

    context_N: list[int] = []
    for g, t in answers:
        context_N.append(g if t.prompt_ids_P is None else len(prompts))
        prompts += [] if t.prompt_ids_P is None else [t.prompt_ids_P]
    correct = [np.nan if t.score.correct is None else t.score.correct for _, t in answers]
    return ClaimRows(
        prompt_ids=flat(prompts, np.int32), prompt_offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        n_expected_G=per_group([group.lease.n_expected for group in groups], np.int32),
        n_responses_G=per_group([len(group.trajectories) for group in groups], np.int32),
        idx_min_G=per_group([group.idx_min for group in groups], np.int32),
        idx_max_G=per_group([group.idx_max for group in groups], np.int32),
        temperature_G=per_group([group.lease.sampling.temperature for group in groups], np.float32),
        baseline_G=per_group([np.nan if group.baseline_reward is None else group.baseline_reward for group in groups],
                             np.float32),
        context_N=np.array(context_N, np.int32), session_N=np.array(session_ordinals(groups), np.int32),
        group_N=np.array([g for g, _ in answers], np.int32), correct_N=np.array(correct, np.float32),
        reward_N=np.array([t.score.reward for _, t in answers], np.float32),
        length_N=np.array([len(t.token_ids_L) for _, t in answers], np.int32),
        finish_N=np.array([t.finish_reason == "length" for _, t in answers], np.int8), mine_N=mine_N,
        parts={}, sources=("sort",), source_G=np.zeros(len(groups), np.int32),
        offsets=np.cumsum([0, *(len(t.token_ids_L) for t in own)]).astype(np.int32),
        response_ids=flat([t.token_ids_L for t in own], np.int32),
        loss_mask=flat([t.loss_mask_L for t in own], np.uint8),
        behavior_logprobs=flat([t.behavior_logprobs_L for t in own], np.float32),
        run_version_idx_R=flat([t.version_runs.version_R for t in own], np.int32),
        run_tokens_R=flat([np.diff(t.version_runs.end_R, prepend=0) for t in own], np.int32))


def sampled_by(model: Any, group: TrajectoryGroup, noise: float = 0.0, seed: int = 0) -> TrajectoryGroup:
    """The group with behavior log-probs of `model`, plus normal noise of that size, 0.0 where the mask is 0."""
    rng = np.random.default_rng(seed)

    def one(t: Trajectory) -> Trajectory:
        exact = answer_logprobs(model, group.lease.prompt.token_ids_P.tolist(), t.token_ids_L.tolist(),
                                group.lease.sampling.temperature).numpy()
        noisy = (exact + rng.normal(0, noise, len(exact))).astype(np.float32) * t.loss_mask_L
        return replace(t, behavior_logprobs_L=noisy)

    return replace(group, trajectories=tuple(one(t) for t in group.trajectories))


def all_by(version: int, group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with every token of one version (idx = version)."""
    trajectories = tuple(replace(t, version_runs=VersionRuns(
        end_R=np.array([len(t.token_ids_L)], np.int32), version_R=np.array([version], np.int32)))
        for t in group.trajectories)
    return replace(group, trajectories=trajectories, idx_min=version, idx_max=version)


def start_attempt(run: RunDir, attempt: int = 1) -> None:
    put_if_absent(run.attempt(attempt), to_json({"attempt": attempt}))


def claim_groups(run: RunDir, config: Config, step: int, groups: Sequence[TrajectoryGroup], **changes: Any) -> Claim:
    """Land the groups and make them the claim of `step`."""
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    landed = writer.land(list(groups))
    claim = make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)], step=step)
    return put_claim(run, replace(claim, idx=config.idx(step), **changes), fsync=False)


def random_groups(step: int, n_groups: int = 4, n: int = 4, **options: Any) -> list[TrajectoryGroup]:
    """Groups at the positions of one step, answers of 1 to 12 tokens."""
    first = step * n_groups
    return [make_group(i, n=n, **{"seed": step, **options}) for i in range(first, first + n_groups)]


def train_as_rank(rank: int, ranks: int, root: str, config: Config, rendezvous: str, steps: int, out: str) -> None:
    """One rank of a learner group in a process of its own: restore, train, checkpoint; leaves what it has in `out`."""
    from rl_core.learner.learner import Learner

    learner = Learner(root=root, config=config, attempt=1, rank=rank, ranks=ranks, rendezvous=rendezvous)
    first = learner.restore()
    learner.publish_current()
    for step in range(first, first + steps):
        learner.train(step)
    learner.checkpoint()
    weights, moments = learner.tensors()
    torch.save({"weights": weights, "moments": moments}, f"{out}-{rank}.pt")
    learner.close()


def meet_late(rank: int, rendezvous: str, late_s: float) -> None:
    """Two ranks at a barrier, of which rank 0 comes later than a collective may take; then a collective."""
    from rl_core.learner.ranks import Ranks

    ranks = Ranks(rank=rank, ranks=2, rendezvous=rendezvous, device=torch.device("cpu"), deadline_s=late_s / 2,
                  barrier_s=60)
    if rank == 0:
        time.sleep(late_s)
    ranks.barrier()
    assert ranks.sum([rank + 1.0]) == [3.0]
    ranks.close()


class LiveLogits(TorchDispatchMode):
    """Watches every tensor that is as wide as the vocabulary while it is entered: in the forward and the backward pass,
    in the head, in the loss, in what autograd keeps. Views count once, by their storage."""

    def __init__(self, head: Tensor) -> None:
        """`head`: the weight [vocabulary, hidden], whose transpose and its gradient are not counted."""
        super().__init__()
        self.widest = 0
        """Most rows of one such tensor."""
        self.peak = 0
        """Most rows of all of them that were alive at one moment."""
        self._vocabulary, self._hidden = head.shape
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (out if isinstance(out, tuple | list) else (out,)):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == self._vocabulary:
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        rows = tensor.numel() // self._vocabulary
        if tensor.shape == (self._hidden, self._vocabulary):
            return
        self.widest = max(self.widest, rows)
        self._alive = {key: (ref, n) for key, (ref, n) in self._alive.items() if not ref.expired()}
        ref = StorageWeakRef(tensor.untyped_storage())
        self._alive[ref.cdata] = (ref, max(rows, self._alive.get(ref.cdata, (ref, 0))[1]))
        self.peak = max(self.peak, sum(n for _, n in self._alive.values()))


def same_again(run: RunDir, steps: int) -> None:
    """Every step is replayed bit by bit, and so is the whole run from its initial model."""
    assert recorded_steps(run) == list(range(steps))
    assert [(one.step, one.verdict) for one in replay(run, range(steps))] == [(k, "identical") for k in range(steps)]
    assert fold_claims(str(run.root)) == read_record(run, steps - 1).weights_digest
