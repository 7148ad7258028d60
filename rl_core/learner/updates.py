"""The policy's updates of one step: passes without gradient where the plan needs them, then loss, backward, optimizer.

`_S` loss tokens of one micro-batch, `_K` of the whole claim, `_N` its trajectories, `_M` those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_core.learner.aggregation import Denominators, aggregate
from rl_core.learner.asking import Asked
from rl_core.learner.batch import column, session_tokens, sessions_with
from rl_core.learner.correction import log_ratio, loglinear_proximal
from rl_core.learner.credit import Credit, Seen, credit_of
from rl_core.learner.invariants import check_drift, check_mismatch
from rl_core.learner.logprobs import TokenLogprobs
from rl_core.learner.losses.tokens import Tokens
from rl_core.learner.micro import Micro, Minibatch
from rl_core.learner.objective import chosen_loss, composed, corrected, correction_of, possible
from rl_core.learner.optimizer import OptimizerSteps, set_optimizer
from rl_core.learner.others import Others, other_terms, taught_advantage
from rl_core.learner.plan import StepPlan, recomputes_proximal
from rl_core.learner.policy import Policy
from rl_core.learner.ranks import Ranks, to_list
from rl_core.learner.sums import Sums, anchor_sums, correction_sums, other_sums, stack, update_sums
from rl_core.learner.whole import Draw, Whole, choose, drawn, gather, needs_whole, reads_policy, select, selects
from rl_core.seeds import derive


class Updates:
    """The updates of one step, in order. Lives as long as the step."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, plan: StepPlan,
                 batch: TensorDict, tokens_M: Tensor, asked: Asked) -> None:
        self.policy, self.ranks, self.plan, self.batch = policy, ranks, plan, batch
        self.learner, self.asked = plan.learner, asked
        self.tokens_M = tokens_M
        """Loss tokens of every sequence of this rank."""
        self.mine = column(batch, "mine").to(ranks.device)
        self.session_tokens_M = session_tokens(batch).to(ranks.device)[self.mine]
        """Those of its session: what a sequence is for the aggregation."""
        self.correction = correction_of(plan.learner)
        self.bypass = self.correction.mode == "bypass"
        self.proximal: dict[int, Tensor] = {}
        """By number of the micro-batch; only where a pass was made."""
        self.advantage: dict[int, Tensor] = {}
        """By number of the micro-batch, where it was made late (credit.py)."""
        self.returns: dict[int, Tensor] = {}
        """What a critic learns, by number of the micro-batch."""
        self.seen: dict[int, TokenLogprobs] = {}
        """What the last no-gradient pass found, by number of the micro-batch."""
        self.sums = Sums()
        self.steps = OptimizerSteps(optimizer, ranks, plan, plan.skipped_in_a_row)
        self.first = True
        set_optimizer(optimizer, plan.learner, plan.learning_rate)

    # -- passes without gradient

    @torch.no_grad()
    def proximal_pass(self, minibatches: Sequence[Minibatch], *, squares: bool = False) -> None:
        """The proximal log-probs of the whole claim; `squares`: and the sum of p^2 at every token."""
        for micro in (micro for minibatch in minibatches for micro in minibatch.micros):
            self.seen[micro.number] = self.policy(micro.inputs, squares=squares)
            self.proximal[micro.number] = self.seen[micro.number].logprob_S
            self._anchor(micro, self.proximal[micro.number])

    @torch.no_grad()
    def late_credit(self, minibatches: Sequence[Minibatch]) -> Credit:
        """Advantages that wait for passes: of the policy, the reference, a critic. Collective; all ranks get the same.
        """
        tokens_N = column(self.batch, "trajectory", "tokens")
        tokens = int(tokens_N.sum())
        whole = Minibatch(0, [micro for one in minibatches for micro in one.micros], Denominators(tokens, 0))

        def all_of(values: dict[int, Tensor]) -> Tensor:
            return gather(values, whole, self.ranks, tokens)

        squares = {number: found.squares_S for number, found in self.seen.items() if found.squares_S is not None}
        seen = Seen(
            behavior_K=all_of({micro.number: micro.behavior_S for micro in whole.micros}),
            position_K=all_of({micro.number: micro.position_S for micro in whole.micros}),
            proximal_K=all_of(self.proximal) if self.proximal or not whole.micros else None,
            squares_K=all_of(squares) if squares or not whole.micros else None,
            reference_K=all_of(self.asked.reference) if self.learner.kl.use == "reward" else None,
            value_K=all_of(self.asked.value) if self.learner.advantage.name == "gae" else None,
            behind_N=self._behind(whole) if self.learner.advantage.name == "gae" else None)
        credit = credit_of(self.batch, seen, self.learner, self.plan.kl_beta)
        row_K = torch.repeat_interleave(tokens_N)
        of_token_K = credit.advantage if credit.per_token else credit.advantage[row_K]
        for micro in whole.micros:
            self.advantage[micro.number] = of_token_K.to(self.ranks.device)[micro.place_S]
            if credit.values is not None:
                self.returns[micro.number] = credit.values.return_K.to(self.ranks.device)[micro.place_S]
        return credit

    def _behind(self, whole: Minibatch) -> Tensor:
        """The critic's values behind every trajectory of the claim, `[N]` float32; 0 without a loss token."""
        mine_N = torch.zeros(len(column(self.batch, "trajectory", "tokens")), dtype=torch.float64)
        mine = column(self.batch, "mine")
        for micro in whole.micros:
            mine_N[mine[micro.order_Q.cpu()]] = self.asked.behind[micro.number].double().cpu()
        return self.ranks.sum_tensor(mine_N).float()

    def draw(self, minibatch: Minibatch, passed: int) -> Draw | None:
        """The answers of the minibatch drawn again, where the settings ask for it: the policy and the critic learn from
        the same ones."""
        if self.learner.resampling == "none":
            return None
        reward_N, tokens_N, group_N = (column(self.batch, "trajectory", name) for name in ("reward", "tokens", "group"))
        copies_N = drawn(reward_N, tokens_N, group_N // self.plan.minibatch_groups == minibatch.number, self.learner,
                         seed=self._lots(passed, minibatch))
        return Draw(copies_N, copies_N.to(self.ranks.device)[self.mine], tokens_N)

    @torch.no_grad()
    def _choices(self, minibatch: Minibatch, passed: int) -> Whole:
        stale = not self.first and reads_policy(self.learner)
        if stale or any(micro.number not in self.seen for micro in minibatch.micros):
            for micro in minibatch.micros:
                self.seen[micro.number] = self.policy(micro.inputs)
                if self.first and self.bypass:
                    self._anchor(micro, self.seen[micro.number].logprob_S)
        tokens_N = column(self.batch, "trajectory", "tokens")
        count = int(tokens_N.sum())

        def all_of(values: dict[int, Tensor]) -> Tensor:
            return gather(values, minibatch, self.ranks, count)

        micros = minibatch.micros
        behavior_K = all_of({micro.number: micro.behavior_S for micro in micros})
        row_K = torch.repeat_interleave(tokens_N)
        seen = Tokens(
            policy_S=all_of({micro.number: self.seen[micro.number].logprob_S for micro in micros}),
            anchor_S=behavior_K if self.bypass else all_of(
                {micro.number: self._anchor_of(micro, self.seen[micro.number].logprob_S) for micro in micros}),
            behavior_S=behavior_K, advantage_S=all_of(
                {micro.number: taught_advantage(self._advantage(micro), self.seen[micro.number].logprob_S,
                                                self._others(micro), self.learner) for micro in micros}),
            reward_S=column(self.batch, "trajectory", "reward")[row_K], sequence_S=row_K, sequences=len(tokens_N),
            bypass=self.bypass)
        group_K = column(self.batch, "trajectory", "group")[row_K]
        found = choose(seen, all_of({micro.number: self.seen[micro.number].entropy_S for micro in micros}),
                       group_K // self.plan.minibatch_groups == minibatch.number, minibatch.denominators, self.learner,
                       seed=self._lots(passed, minibatch))
        if found.denominators is None or found.tokens_N is None:
            return found
        left = sessions_with(self.batch, found.tokens_N > 0)
        return replace(found, denominators=replace(found.denominators, sequences=left))

    def _lots(self, passed: int, minibatch: Minibatch, *micro: int) -> int:
        return derive(self.plan.seed, self.plan.step, passed, minibatch.number, *micro, "lots")

    # -- updates

    def update(self, minibatch: Minibatch, draw: Draw | None, passed: int) -> None:
        """One optimizer update, or a skipped one where loss or gradient is not finite, on all ranks alike.

        `draw`: the answers that it is of, as often as they were drawn; None = all of the minibatch, once each.
        `passed`: passes over the claim before this one.
        """
        whole = self._choices(minibatch, passed) if needs_whole(self.learner) else Whole()
        self.steps.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for i, micro in enumerate(minibatch.micros):
            loss = loss + self._backward(micro, minibatch, whole, draw, passed, drift=self.first and i == 0)
        if self.first:
            self.check_mismatch()
            self._check_drift()
        self.first = False
        self.steps.take(list(self.policy.parameters()), loss, self.learner.max_grad_norm)

    def _backward(self, micro: Micro, minibatch: Minibatch, whole: Whole, draw: Draw | None, passed: int, *,
                  drift: bool) -> Tensor:
        """Add this micro-batch's gradient; returns its share of the policy loss, detached float64."""
        settings = self.learner.loss
        _, likely_ids_SK = self.asked.likely.get(micro.number, (None, None))
        answer = self.policy(micro.inputs, entropy_gradient=settings.entropy_coef != 0.0, others_SK=likely_ids_SK)
        others = self._others(micro, answer.others_SK)
        policy_S, entropy_S = cast(Tensor, answer.logprob_S), cast(Tensor, answer.entropy_S)
        anchor_S = micro.behavior_S if self.bypass else self._proximal(micro, policy_S)
        if self.bypass and self.first and micro.number not in self.seen:
            self._anchor(micro, policy_S.detach())
        tokens, impossible_S = possible(Tokens(
            policy_S=policy_S, anchor_S=anchor_S, behavior_S=micro.behavior_S,
            advantage_S=taught_advantage(self._advantage(micro), policy_S, others, self.learner),
            reward_S=micro.reward_S, sequence_S=micro.sequence_S, sequences=len(self.tokens_M), bypass=self.bypass))
        tokens = self._with_choice(tokens, micro, minibatch, whole, passed)
        found = chosen_loss(tokens, self.learner)
        mean = None if whole.mean_weight is None else whole.mean_weight.to(policy_S.device)
        correction = corrected(tokens, self.correction, mean)
        loss_S = composed(found, tokens, correction, impossible_S, self.learner,
                          None if whole.uncertain_K is None else whole.uncertain_K.to(policy_S.device)[micro.place_S])
        policy_loss = self._aggregate(loss_S, micro, minibatch, draw, whole)
        loss = policy_loss
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * self._aggregate(entropy_S, micro, minibatch, draw)
        terms = other_terms(others, tokens.policy_S, tokens.behavior_S, impossible_S, self.learner)
        if terms.loss_S is not None:
            loss = loss + self._aggregate(terms.loss_S, micro, minibatch, draw)
        (loss * self.ranks.loss_scale).backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        update_sums(self.sums, found, tokens, entropy_S, impossible_S)
        correction_sums(self.sums, correction, tokens)
        other_sums(self.sums, terms, others.impossible_S)
        if drift and len(policy_S) and micro.number in self.proximal:  # else one pass is compared with itself
            ratio_S = log_ratio(tokens.policy_S.detach(), tokens.anchor_S).exp()
            self.sums.raise_to({"ratio_drift": (ratio_S - 1.0).abs().max()})
        return policy_loss.detach().double().cpu()

    def _with_choice(self, tokens: Tokens, micro: Micro, minibatch: Minibatch, whole: Whole, passed: int) -> Tokens:
        """The tokens with what the loss chooses from them, if it does."""
        if whole.chosen_K is not None:
            return replace(tokens, chosen_S=whole.chosen_K.to(tokens.policy_S.device)[micro.place_S])
        if selects(self.learner) or not hasattr(self.learner.loss, "scope"):
            return tokens
        here = replace(tokens, policy_S=tokens.policy_S.detach())
        lots = self._lots(passed, minibatch, self.ranks.rank, micro.number)
        return replace(tokens, chosen_S=select(here, self.learner, lots))

    def _aggregate(self, values_S: Tensor, micro: Micro, minibatch: Minibatch, draw: Draw | None,
                   whole: Whole | None = None) -> Tensor:
        """A term's share of the loss. `whole`: what was rejected, where the term loses it from its denominators."""
        whole, tokens_M = whole or Whole(), self.session_tokens_M
        if whole.tokens_N is not None:  # a sequence without a token left has loss 0 at all of them
            tokens_M = session_tokens(self.batch, whole.tokens_N).to(self.mine.device)[self.mine].clamp(min=1)
        denominators = whole.denominators or minibatch.denominators
        if draw is not None:
            values_S = values_S * draw.copies_M[micro.sequence_S]
            denominators = draw.denominators(whole.tokens_N)
        return aggregate(values_S, micro.sequence_S, tokens_M, denominators, self.learner.loss.aggregation,
                         max_new_tokens=self.plan.max_new_tokens)

    def _others(self, micro: Micro, policy_SK: Tensor | None = None) -> Others:
        """What the models beside the policy say of a micro-batch. `policy_SK`: what the policy says of the same."""
        likely_SK, _ = self.asked.likely.get(micro.number, (None, None))
        return Others(reference_S=self.asked.reference.get(micro.number), likely_SK=likely_SK, policy_SK=policy_SK,
                      teacher_S=self.asked.teacher.get(micro.number))

    def _advantage(self, micro: Micro) -> Tensor:
        return self.advantage.get(micro.number, micro.advantage_S)

    def _anchor_of(self, micro: Micro, now_S: Tensor) -> Tensor:
        """Proximal log-probs of a micro-batch, where the policy has `now_S`."""
        stored = self.proximal.get(micro.number)
        if stored is not None:
            return stored
        if self.learner.loss.proximal == "recompute":
            return now_S
        return loglinear_proximal(now_S, micro.behavior_S, micro.version_S, self.plan.idx)

    def _proximal(self, micro: Micro, policy_S: Tensor) -> Tensor:
        """The same, detached, in an update; see needs_proximal_pass for why none may be stored."""
        now_S = policy_S.detach()
        found_S = self._anchor_of(micro, now_S)
        if self.first and micro.number not in self.proximal:
            self._anchor(micro, now_S)
            if found_S is not now_S:  # before the first update the exact proximal is at hand: the error costs nothing
                self.sums.add({"loglinear_tokens": torch.tensor(float(len(now_S))),
                               "loglinear_error": (found_S - now_S).abs().sum()})
        return found_S

    def _anchor(self, micro: Micro, proximal_S: Tensor) -> None:
        anchor_sums(self.sums, proximal_S, micro.behavior_S, micro.lag_S, micro.swapped_S, micro.sequence_S,
                    len(self.tokens_M), self.correction)

    def check_mismatch(self) -> None:
        """Raises EngineMismatch where the tokens of these very weights were sampled by another distribution."""
        current, total = to_list(self.ranks.sum_tensor(stack(self.sums.total, ("current", "current_abs"), 0.0)))
        check_mismatch(self.plan.step, total, current)

    def _check_drift(self) -> None:
        """Raises ProximalDrift, on all ranks alike, where the first micro-batch has not the proximal log-probs again;
        never where no pass was made for them."""
        if recomputes_proximal(self.learner):
            [drift] = to_list(self.ranks.max_tensor(stack(self.sums.largest, ("ratio_drift",), -math.inf)))
            check_drift(self.plan.step, drift, self.learner.dtype)
