"""What each kind of hook promises, tried on small inputs: `problems("loss", function)` -> [] for one that keeps it.

`headway hook test`, every start of a run, and `pytest --hook` ask the same. Nothing is started; torch is imported for
the kinds that read tensors.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_core.errors import HookFailed
from rl_core.hooks.kinds import Kind
from rl_core.rollout.data_rows import read_prompt
from rl_core.rollout.order_calls import OrderCalls, is_order
from rl_core.rollout.session_calls import SessionCalls
from rl_core.rollout.verdicts import Verdicts

Function = Callable[..., Any]
Contract = Callable[[Function], Iterator[str]]


def problems(kind: Kind, function: Function) -> list[str]:
    """What the function does not keep of its contract, each once; empty where it keeps it."""
    with contextlib.redirect_stdout(io.StringIO()):
        found: list[str] = []
        try:
            found += CONTRACTS[kind](function)
        except HookFailed as error:
            found.append(str(error))
        except Exception as error:  # a user's function may raise anything
            found.append(f"raised {type(error).__name__}: {error}")
    return list(dict.fromkeys(found))


# -- reward


def _reward(function: Function) -> Iterator[str]:
    from rl_core.rollout.rewards.signatures import bind

    bound = bind(function)
    columns = dict.fromkeys(bound.needs, "1")
    requests = [{"text": text, "truth": "42", "prompt": "6 * 7", "data_source": "s", "columns": columns}
                for text in ("42", "41", "", "x" * 4096)]
    first = [bound.score(bound.call(request)) for request in requests]
    if first != [bound.score(bound.call(request)) for request in requests]:
        yield "two calls with the same answers give other rewards: a reward is a function of the answer and its row"
    if len({each["reward"] for each in first}) == 1:
        yield f"gives a right, a wrong, an empty and a long answer the same reward {first[0]['reward']:g}"


# -- group filter


def groups() -> list[dict[str, Any]]:
    """What a filter may be given: mixed, all right, all wrong, partial, alone, cut, and with parts."""
    def group(rewards: list[float], lengths: list[int], **more: Any) -> dict[str, Any]:
        return {"group_id": "e0-p1-t0", "data_source": "s", "truth": "42", "columns": {}, "n_expected": len(rewards),
                "rewards": rewards, "correct": [float(r > 0) for r in rewards], "extracted": [None] * len(rewards),
                "parts": {}, "lengths": lengths, "finish_reasons": ["stop"] * len(rewards), **more}

    return [group([0.0, 1.0, 1.0, 0.0], [3, 9, 4, 1]), group([1.0] * 4, [2, 2, 2, 2]), group([0.0] * 4, [5, 6, 7, 8]),
            group([0.5, -1.0], [3, 4], n_expected=4), group([1.0], [1]),
            group([0.0, 0.25], [64, 64], finish_reasons=["length", "length"], correct=[None, None]),
            group([0.0, 1.0], [3, 4], parts={"format": [0.0, None]})]


def _group_filter(function: Function) -> Iterator[str]:
    calls = Verdicts(function)
    first = [calls.score(calls.call({"group": group})) for group in groups()]
    if first != [calls.score(calls.call({"group": group})) for group in groups()]:
        yield "two calls with the same groups give other verdicts: a verdict is a function of the group"
    if all(each["reason"] is not None for each in first):
        yield f"leaves out every group that was tried, as {first[0]['reason']}: nothing would be trained"


# -- sampler


def _sampler(function: Function) -> Iterator[str]:
    calls = OrderCalls(function)
    for prompts in ([0], list(range(7)), [3, 1, 8, 5], list(range(200))):
        for epoch in (0, 3):
            for seen in (0, 5):
                history = [{"epoch": e, "prompt": p, "reward": 0.25 * (p % 5), "spread": float(p % 2)}
                           for e in range(epoch) for p in prompts[:seen]]
                request = {"epoch": epoch, "prompts": prompts, "rows": [10 + p for p in prompts], "seed": 1,
                           "history": history}
                order = calls.score(calls.call({**request, "prompts": list(prompts)}))["order"]
                if (problem := is_order(order, prompts)) is not None:
                    yield f"the order of {len(prompts)} prompts {problem}"
                if order != calls.score(calls.call({**request, "prompts": list(prompts)}))["order"]:
                    yield "two calls give other orders: an order is a function of seed, epoch and history"


# -- environment


def _environment(function: Function) -> Iterator[str]:
    from rl_core.rollout.environments.function import checked

    def rows(held_out: bool) -> list[dict[str, Any]]:
        return checked(function(size=16, seed=1, held_out=held_out), 16, "rows")

    training, held_out = rows(False), rows(True)
    if (training, held_out) != (rows(False), rows(True)):
        yield "two calls make other rows: rows are a function of size, seed and held_out"
    for each in (*training, *held_out):
        for name in ("prompt", "answer"):
            if name not in each:
                yield f"a row has no {name!r}; it has {sorted(each)}"
    asked = [repr(row.get("prompt")) for row in training]
    if set(asked) & {repr(row.get("prompt")) for row in held_out}:
        yield "training and held-out rows meet: the validation would ask what was trained"


# -- session


def _session(function: Function) -> Iterator[str]:
    calls = SessionCalls(function)

    def session(answers: list[str], prompts: list[Any], **more: Any) -> dict[str, Any]:
        return {"group_id": "e0-p1-t0", "session": 2, "data_source": "s", "truth": "42", "columns": {},
                "prompts": prompts, "answers": answers, "finish_reasons": ["stop"] * len(answers), **more}

    cases = [session(["42"], ["6 * 7"]), session([""], ["6 * 7"], finish_reasons=["length"]),
             session(["41"], [[{"role": "user", "content": "6 * 7"}]]), session(["41", "42"], ["6 * 7", "again"])]

    def asked() -> list[Any]:
        return [calls.score(calls.call({"session": copy.deepcopy(case)}))["prompt"] for case in cases]

    first = asked()
    if first != asked():
        yield "two calls with the same answers go on otherwise: how a session goes on is a function of it"
    if all(prompt is None for prompt in first):
        yield "ends every session that was tried behind its answers: leave rollout.session out for that"
    for prompt in first:
        if prompt is not None:
            read_prompt(prompt, "what it asks next")


# -- advantage


def _advantage(function: Function) -> Iterator[str]:
    from rl_core.learner.advantages.answers import Answers
    from rl_core.learner.advantages.function import checked

    def answers(rewards: list[float], group: list[int]) -> Answers:
        length = np.arange(2, 2 + len(rewards), dtype=np.int64)
        return Answers(reward_N=np.array(rewards), group_N=np.array(group, np.int64), length_N=length,
                       tokens_N=length - 1, parts={"format": np.array(rewards) / 2})

    def advantage(given: Answers) -> Any:
        return checked(function(given), len(given.reward_N), "advantage")

    cases = {"a mixed claim": answers([1.0, 0.0, 0.0, 1.0, 0.5, -2.0], [0, 0, 0, 1, 1, 1]),
             "groups without spread": answers([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]),
             "a group of one": answers([1.0, 0.0, 1.0], [0, 1, 1]), "no answer": answers([], [])}
    for name, case in cases.items():
        before = case.reward_N.copy()
        found = advantage(case)
        if not np.array_equal(found, advantage(case)):
            yield f"{name}: two calls give other advantages; every rank computes them, and all must agree"
        if not np.array_equal(before, case.reward_N):
            yield f"{name}: the rewards that it was given are changed; work on a copy"
    mixed = cases["a mixed claim"]
    order = np.array([4, 1, 0, 5, 3, 2])
    turned = Answers(reward_N=mixed.reward_N[order], group_N=mixed.group_N[order], length_N=mixed.length_N[order],
                     tokens_N=mixed.tokens_N[order], parts={name: part[order] for name, part in mixed.parts.items()})
    if not np.allclose(advantage(turned), advantage(mixed)[order], rtol=1e-5, atol=1e-6):
        yield "depends on the order of the answers: the same answers in another order get other advantages"


# -- loss and correction


def _loss(function: Function) -> Iterator[str]:
    import torch

    from rl_core.learner.losses.function import checked
    from rl_core.learner.losses.tokens import Tokens

    def tokens(order: list[int] | None = None, advantage: float = 1.0) -> Tokens:
        draw = torch.Generator().manual_seed(1)
        count = 12
        policy, anchor, behavior = (-torch.rand(count, generator=draw) * 3 for _ in range(3))
        sign = torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(4)
        at = torch.tensor(list(range(count)) if order is None else order)
        return Tokens(policy_S=policy[at].clone().requires_grad_(), anchor_S=anchor[at], behavior_S=behavior[at],
                      advantage_S=advantage * sign[at], reward_S=sign[at],
                      sequence_S=torch.arange(3).repeat_interleave(4)[at], sequences=3)

    def loss_and_gradient(given: Tokens) -> tuple[Any, Any]:
        loss_S = checked(function(given), given, "loss").loss_S
        (gradient_S,) = torch.autograd.grad(loss_S.sum(), given.policy_S)
        return loss_S.detach(), gradient_S

    first, gradient = loss_and_gradient(tokens())
    if not bool(torch.isfinite(first).all() and torch.isfinite(gradient).all()):
        yield "a loss or its gradient by policy_S is not finite"
    if not bool(gradient.any()):
        yield "the gradient by policy_S is 0 everywhere: nothing would be learned"
    if not torch.equal(first, loss_and_gradient(tokens())[0]):
        yield "two calls give other losses: a loss is a function of its tokens"
    order = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    if not torch.allclose(loss_and_gradient(tokens(order))[0], first[order], rtol=1e-4, atol=1e-5):
        yield "depends on the order of the answers, and so on the micro-batches"
    if not bool(torch.isfinite(loss_and_gradient(tokens(advantage=0.0))[0]).all()):
        yield "is not finite where every advantage is 0"
    empty = Tokens(policy_S=torch.zeros(0, requires_grad=True), anchor_S=torch.zeros(0), behavior_S=torch.zeros(0),
                   advantage_S=torch.zeros(0), reward_S=torch.zeros(0), sequence_S=torch.zeros(0, dtype=torch.int64),
                   sequences=1)
    checked(function(empty), empty, "loss, of a micro-batch without loss tokens")


def _correction(function: Function) -> Iterator[str]:
    import torch

    from rl_core.learner.own_weights import checked

    draw = torch.Generator().manual_seed(2)
    d_S, sequence_S = torch.randn(12, generator=draw), torch.arange(3).repeat_interleave(4)
    weights_S = checked(function(d_S.clone(), sequence_S, 3), d_S, "correction")
    if not torch.equal(weights_S, checked(function(d_S.clone(), sequence_S, 3), d_S, "correction")):
        yield "two calls give other weights"
    if not bool(weights_S.any()):
        yield "every weight is 0: nothing would be learned"
    same_S = checked(function(torch.zeros(12), sequence_S, 3), torch.zeros(12), "correction")
    if not torch.allclose(same_S, torch.ones(12)):
        yield f"weights where the two policies agree (d = 0) are not 1, but {[float(w) for w in same_S[:4]]}"
    extreme_S = torch.tensor([-20.0, 20.0, -20.0, 20.0])
    checked(function(extreme_S, torch.zeros(4, dtype=torch.int64), 1), extreme_S, "correction, at d = -20 and 20")
    checked(function(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1), torch.zeros(0), "correction, of no token")


# -- metrics


def _metrics(function: Function) -> Iterator[str]:
    from rl_core.learner.own_metrics import checked

    def facts() -> dict[str, Any]:
        return {"step": 3, "metrics": {"reward/mean": 0.5}, "rewards_N": np.array([0.0, 1.0, 1.0, 0.0]),
                "correct_N": np.array([0.0, 1.0, np.nan, 0.0]), "lengths_N": np.array([3, 9, 4, 1]),
                "finish_N": np.array([0, 1, 0, 0]), "group_N": np.array([0, 0, 1, 1]), "age_G": np.array([0.0, 2.0]),
                "sources": ["s"], "source_G": np.array([0, 0]), "parts": {"format": np.array([0.0, 1.0, 1.0, np.nan])}}

    first = checked(function(facts()), "metrics")
    again = checked(function(facts()), "metrics")
    if first.keys() != again.keys() or not np.array_equal(list(first.values()), list(again.values()), equal_nan=True):
        yield "two calls give other numbers: a replay of the step would not agree with its record"


CONTRACTS: dict[Kind, Contract] = {
    "reward": _reward, "group_filter": _group_filter, "sampler": _sampler, "environment": _environment,
    "session": _session, "advantage": _advantage, "loss": _loss, "correction": _correction, "metrics": _metrics}
