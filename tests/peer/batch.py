"""The batches that both sides are given, and the job file that TRL's side reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from rl_core.types import TrajectoryGroup
from tests.builders import VOCAB, make_group, make_lease
from tests.learning import all_by, sampled_by, write_model
from tests.peer.cases import GROUPS, Case

LENGTHS = ((3, 12, 7, 5), (9, 2, 11, 6), (4, 8, 1, 10), (5, 7, 6, 4))
"""100 tokens, so that shares of them are whole numbers."""
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 0.0, 1.0, 1.0), (0.25, 1.0, 0.0, 0.75), (1.0, 0.0, 0.0, 0.0))
STYLE = ((0.1, 0.3, 0.2, 0.9), (0.5, 0.4, 0.0, 0.2), (0.7, 0.7, 0.1, 0.0), (0.0, 0.6, 0.3, 0.3))
"""A second reward, for estimators that read parts."""
CUT = frozenset({(0, 1), (1, 2), (3, 0)})
"""(group, answer) cut at the limit, in the batch `cut`."""
END = 1
"""The end token of the model; all answers but the cut ones end with it."""
FAR = 23.0
"""Nats: how far the behavior policy of the batch `far` is away at one token of every answer."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Groups as a claim holds them, and what is given beside them."""

    groups: list[TrajectoryGroup]
    advantages: list[float]
    """Given in place of an estimator's: by answer, of any size."""
    parts: dict[str, list[float]]


def write_models(place: Path) -> tuple[Path, dict[str, Path]]:
    """(policy, references by name): `near` is the policy with noise on its weights, `other` another random model, which
    is far surer of its tokens."""
    policy = write_model(place / "policy")
    write_words(policy)
    near = AutoModelForCausalLM.from_pretrained(policy)
    rng = np.random.default_rng(7)
    for parameter in near.parameters():
        parameter.data += 0.02 * parameter.data.new_tensor(rng.normal(size=tuple(parameter.shape)))
    near.save_pretrained(place / "near")
    other = AutoModelForCausalLM.from_pretrained(write_model(place / "other", seed=5))
    other.get_input_embeddings().weight.data *= 3
    other.save_pretrained(place / "other")
    return policy, {"near": place / "near", "other": place / "other"}


def write_words(directory: Path) -> None:
    """A tokenizer of one word a token, which TRL asks for; nothing of what is compared reads a text."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"t{END}", "pad_token": "t0", "unk_token": "t0"}))


def make_batches(policy: Path) -> dict[str, Batch]:
    """By name: `plain`; `cut` has cut answers; `turns` has tokens that the policy did not sample; `cool` was sampled at
    temperature 0.7; `far` by a policy that is far away at some tokens; `even` has answers of one length."""
    stock = AutoModelForCausalLM.from_pretrained(policy)

    def made(*, lengths: tuple[tuple[int, ...], ...] = LENGTHS, cut: bool = False, turns: bool = False,
             temperature: float = 1.0, far: bool = False) -> Batch:
        groups = [one_group(g, lengths[g], cut=cut, turns=turns, temperature=temperature) for g in range(GROUPS)]
        sampled = [sampled_by(stock, all_by(0, group), noise=0.5, seed=g) for g, group in enumerate(groups)]
        draws = np.random.default_rng(3).normal(size=GROUPS * len(lengths[0]))
        return Batch([far_away(group) for group in sampled] if far else sampled, draws.astype(np.float32).tolist(),
                     {"reward": flat(REWARDS), "style": flat(STYLE)})

    return {"plain": made(), "cut": made(cut=True), "turns": made(turns=True), "cool": made(temperature=0.7),
            "far": made(far=True), "even": made(lengths=((6, 6, 6, 6),) * GROUPS)}


def one_group(g: int, lengths: tuple[int, ...], *, cut: bool, turns: bool, temperature: float) -> TrajectoryGroup:
    group = make_group(g, n=len(lengths), lengths=lengths, rewards=REWARDS[g],
                       lease=make_lease(g, n=len(lengths), temperature=temperature, prompt_length=4 + g))

    def ended(j: int, t: Any) -> Any:
        ids, mask = t.token_ids_L.copy(), t.loss_mask_L.copy()
        is_cut = cut and (g, j) in CUT
        ids[-1] = 2 if is_cut else END
        if turns and len(ids) > 4:
            mask[1:3] = 0
        return replace(t, token_ids_L=ids, loss_mask_L=mask, finish_reason="length" if is_cut else "stop")

    return replace(group, trajectories=tuple(ended(j, t) for j, t in enumerate(group.trajectories)))


def far_away(group: TrajectoryGroup) -> TrajectoryGroup:
    """The first token of every answer as if behavior had found it far less likely than the policy does."""
    def one(t: Any) -> Any:
        logprobs = t.behavior_logprobs_L.copy()
        logprobs[0] -= FAR
        return replace(t, behavior_logprobs_L=logprobs)
    return replace(group, trajectories=tuple(one(t) for t in group.trajectories))


def flat(rows: tuple[tuple[float, ...], ...]) -> list[float]:
    return [value for row in rows for value in row]


def as_json(batch: Batch) -> dict[str, Any]:
    """What TRL's side is given."""
    answers = [t for group in batch.groups for t in group.trajectories]
    behavior = [t.behavior_logprobs_L.tolist() for t in answers]
    return {"prompts": [group.lease.prompt.token_ids_P.tolist() for group in batch.groups],
            "answers": [t.token_ids_L.tolist() for t in answers], "mask": [t.loss_mask_L.tolist() for t in answers],
            "behavior": behavior, "old": behavior, "advantages": batch.advantages, "rewards": batch.parts}


def job_of(policy: Path, references: Mapping[str, Path], batches: Mapping[str, Batch],
           cases: Mapping[str, Case], ways: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The job file: every case in every way, `<case> / <way>`; a way names what is given beside the batch."""
    return {"model": str(policy), "references": {name: str(path) for name, path in references.items()},
            "batches": {name: as_json(batch) for name, batch in batches.items()},
            "cases": {f"{name} / {way}": {
                "trainer": case.trainer, "settings": case.settings, "batch": case.batch, "reference": case.reference,
                "rewards": case.rewards, "given": [*given, *(["old"] if case.old else [])]}
                for name, case in cases.items() for way, given in ways.items()}}
