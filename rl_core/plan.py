"""From a preset and overrides to a Config, and from a Config to a Plan: all that can be known before anything starts.

The plan refuses what cannot work, with the field's name, the value got, and what to do (`ConfigError`). Starts nothing,
imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as made_by
from typing import Any, cast

import yaml
from pydantic import ValidationError

from rl_core.advantage_settings import AdvantageConfig, GroupCommon
from rl_core.best import check_best
from rl_core.combinations import (
    check_baseline,
    check_combination,
    check_exact,
    check_lengths,
    check_rewards,
    check_sessions,
    check_updates,
    update_warnings,
)
from rl_core.config import (
    Config,
    EngineConfig,
    LearnerConfig,
    LocalModel,
    SglangEngineConfig,
    TinyModel,
    field_kinds,
)
from rl_core.engine_plan import check_engine, copies_of_weights
from rl_core.errors import ConfigError, refuse
from rl_core.foreign_keys import answer
from rl_core.idle_settings import check_idle
from rl_core.lora.plan import check_publication, lora_words
from rl_core.loss_settings import LossConfig
from rl_core.no_spread import check_no_spread, no_spread_warnings
from rl_core.reward_settings import check_scoring, with_task
from rl_core.roles.plan import asked_roles, held_role_bytes, policy_learns, role_words, saved_role_bytes
from rl_core.schedules import checkpoints_at_once
from rl_core.settings import unknown_setting
from rl_core.uris import has_password, without_password
from rl_core.validation_plan import check_validation, check_validation_inputs
from rl_core.variants import carried, variants

BYTES_PER_TOKEN = 13
"""Of a shard: int32 ids, float32 log-probs, uint8 mask, int32 version runs at worst (one run a token is 8 more, never
seen); measured: 8.95 (experience-store.md section 4)."""
GROUP_OVERHEAD_BYTES = 2048
BYTES_PER_STEP = 4096
"""Claim, record and observation of one training step."""
RESERVE_BYTES = 64 * 2**20
VARIANTS: dict[str, Any] = {"learner.advantage": AdvantageConfig, "learner.loss": LossConfig}
"""Parts that come in variants by `name`."""
TYPES = {"model": ("tiny", "local"), "engine": ("torch", "sglang"), "advantage": tuple(variants(AdvantageConfig)),
         "loss": tuple(variants(LossConfig))}
"""Parts of several types: pydantic puts the type into the place of an error, which is no name of a setting."""


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`["learner.lr=1e-4", "data.epochs=null"]` -> `{"learner": {"lr": 0.0001}, "data": {"epochs": None}}`."""
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {pair!r}: write a field and a value, as in --set learner.lr=1e-4")
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError as error:
            why = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error).splitlines()[0]
            raise ConfigError(f"--set {key}: {text!r} is not a YAML value ({why}); quote what is text") from error
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            part = node.setdefault(parent, {})
            if not isinstance(part, dict):
                raise ConfigError(f"--set {key}: `{parent}` is set to a value and to a part of it")
            node = cast(dict[str, Any], part)
        node[leaf] = _as_number(value)
    return tree


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads `1e-4` as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() else value
        except ValueError:
            return value
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`over` on `base`, part by part. A part whose `type` changes is replaced, not mixed; of one whose `name` changes
    stays what is not of the old name alone (variants.py)."""
    out = dict(base)
    for key, value in over.items():
        mine = out.get(key)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            part, own = cast(Mapping[str, Any], value), cast(Mapping[str, Any], mine)
            changed = "type" in part and part["type"] != own.get("type", part["type"])
            if prefix + key in VARIANTS and "name" in part:
                own = carried(VARIANTS[prefix + key], own, part["name"])
            out[key] = dict(part) if changed else merge(own, part, f"{prefix}{key}.")
        else:
            out[key] = value
    return out


def resolve(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """The Config of a preset with overrides on it. Raises ConfigError naming each bad field and the value got.

    A task that is data and reward in one is taken for both (reward_settings.py).
    """
    settings = merge(with_task({k: v for k, v in preset.items() if k != "description"}), with_task(overrides))
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(line for item in error.errors() for line in _explain(item))) from error
    leaves = flatten(config)
    for name, value in _leaves(settings).items():
        if isinstance(value, bool) and not isinstance(leaves[name], bool):  # pydantic takes `yes` for 1
            refuse(name, value, "a truth value is none of its values")
    return config


def _explain(item: Any) -> list[str]:
    """Lines for one error of pydantic, each with the name of a setting and the value got, or what it is called here."""
    path = [str(part) for part in item["loc"]]
    path = [part for i, part in enumerate(path) if not (i and part in TYPES.get(path[i - 1], ()))]
    name, value = ".".join(path), item["input"]
    below = _leaves(cast(Mapping[str, Any], value), f"{name}.") if isinstance(value, Mapping) else {}
    if item["type"] == "extra_forbidden":  # name each leaf that was set, not the unknown part that it stands in
        return [_unknown(leaf, got) for leaf, got in below.items()] or [_unknown(name, cast(Any, value))]
    if answers := {leaf: told for leaf in below if leaf not in field_kinds() and (told := answer(leaf))}:
        return [f"{leaf}: {told}" for leaf, told in answers.items()]
    if item["type"] == "union_tag_invalid":
        key = item["ctx"]["discriminator"].strip("'")
        return [f"{name}.{key}: {_words(item)} (got {below[f'{name}.{key}']!r})"]
    return [f"{name}: {_words(item)} (got {item['input']!r})"]


def _unknown(name: str, value: Any) -> str:
    known = list(field_kinds())
    if name in known:
        part = name.rpartition(".")[0]
        kind = f"{part}.{'name' if part in VARIANTS else 'type'}"
        return f"{name}: belongs to another `{kind}` than the one that is set (got {value!r}); set both"
    if told := answer(name):
        return f"{name}: {told}"
    return unknown_setting(name, known)


def _words(item: Any) -> str:
    """What pydantic says of one field, in words of a settings file."""
    match item["type"]:
        case "model_type" | "model_attributes_type":
            return "this is a group of settings; set the ones in it, as in `--set group.name=value`"
        case "tuple_type":
            return "this is a list, written as [a, b]"
        case "union_tag_invalid":
            return f"there are {item['ctx']['expected_tags']}"
        case "invalid_key":
            return "a setting has a name, and this is none"
        case _:
            return item["msg"].removeprefix("Value error, ")


def flatten(config: Config) -> dict[str, Any]:
    """`{"learner.lr": 0.0005, ...}`: every leaf, JSON values."""
    return _leaves(config.model_dump(mode="json"))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def differing(before: Config, after: Config, kind: str) -> dict[str, tuple[Any, Any]]:
    """Fields of one kind that differ: `{"group_size": (8, 4)}`."""
    kinds, one, two = field_kinds(), flatten(before), flatten(after)
    return {name: (one.get(name), two.get(name)) for name in sorted({*one, *two})
            if kinds.get(name) == kind and one.get(name) != two.get(name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFacts:
    """What the inputs turned out to be (rl_core/preflight.py)."""

    rows: int
    longest_prompt: int
    """Tokens; of a large data set no less than it has (data.md section 5)."""
    mean_prompt: float
    """Tokens; of a large data set from a part of it (data.md section 5)."""
    validation_rows: int
    model_bytes: int
    """Of the float32 parameters."""
    context: int
    """Longest sequence the model takes, tokens."""
    copied_bytes: int = 0
    """Of the model directory's files that a run keeps a copy of."""
    vocabulary: int | None = None
    """Rows of the model's embedding: token ids from 0."""
    longest_validation: int = 0
    """Longest held-out prompt, tokens."""
    dropped: int = 0
    """Training prompts over data.max_prompt_tokens that are left out (data.overlong=drop)."""
    dropped_validation: int = 0
    """Held-out prompts that are left out."""
    warnings: tuple[str, ...] = ()
    """What a person should know of the data and the reward, and what refuses nothing."""
    role_bytes: Mapping[str, int] = made_by(default_factory=dict[str, int])
    """Of the float32 parameters of every model beside the policy, by role."""
    adapter_bytes: int = 0
    """Of the float32 parameters of an adapter that is trained in place of the model's; 0 without one."""
    activation_bytes: int = 0
    """About; of a full micro-batch on one learner rank. 0: not known."""
    cache_bytes: int = 0
    """About; of one embedded engine's keys and values. 0: none, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Totals that follow from the settings; nothing here is set twice."""

    total_groups: int
    total_trajectories: int
    updates: int
    publications: int
    staleness_limit: int
    staleness_hard_max: int
    max_outstanding_groups: int
    max_groups_in_flight: int
    dataset_epochs: float | None
    """Passes that the run makes over the prompts; null when the rows are not known yet."""
    prompts: int | None
    """Positions of one pass, weights of sources included; null when the rows are not known yet."""
    prompts_left_out: int
    """Training prompts over data.max_prompt_tokens (data.overlong=drop)."""
    validation_prompts: int | None
    validation_prompts_left_out: int
    sources: int
    """Of data.train."""
    warnings: tuple[str, ...]
    """Of settings, data and reward: what refuses nothing, and a person should know."""
    group_bytes: int
    """Half the worst case."""
    reserve_bytes: int
    """Checkpoints, versions, and 64 MiB."""
    disk_bytes: int
    """Estimate for the whole run, the copy of the initial model included."""
    memory_bytes: int
    """Estimate of parameters, gradients and optimizer, sharded over the ranks, and of one copy per engine or server,
    and for validation."""
    activation_bytes: int
    """Estimate for a full micro-batch on one learner rank, with the logits that are held at once; 0: not known."""
    cache_bytes: int
    """Estimate of one embedded engine's keys and values at their longest; 0: none, or not known."""
    gpus: dict[str, float]
    """That each role asks for: `{"learner": 4.0, "rollout": 3.0, "validation": 1.0}`; empty without a GPU."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(config: Config) -> None:
    """Refuse what cannot work whatever the data. Raises ConfigError."""
    s, loss, c = config.sampling, config.learner.loss, config
    check_scoring(c)
    estimator = c.learner.advantage
    if c.group_size == 1 and isinstance(estimator, GroupCommon) and estimator.group_of_one == "zero":
        refuse("group_size", 1,
               f"a group of one has advantage 0 under `{estimator.name}`: nothing "
               "would be learned; use 2 or more, or learner.advantage.group_of_one=raw")
    if c.group_size == 1 and estimator.name == "grpo_passk":
        refuse("group_size", 1, "grpo_passk is how far the best answer is ahead of the second best; use 2 or more")
    if c.min_group > c.group_size:
        refuse("rollout.min_group", c.min_group, f"no group of {c.group_size} can reach it; use at most group_size")
    if c.minibatch_groups > c.groups_per_step:
        refuse("learner.minibatch_groups", c.minibatch_groups, f"at most groups_per_step = {c.groups_per_step}")
    check_publication(c)
    check_exact(c)
    if c.staleness.effective_hard_max < c.staleness.limit:
        refuse("staleness.hard_max", c.staleness.hard_max,
               f"below ceil(staleness.bound) = {c.staleness.limit}: groups that admission allows would be dropped, "
               "and the run could starve; raise hard_max or lower the bound")
    if s.temperature == 0:
        refuse("sampling.temperature", 0, "greedy answers have no distribution to learn from; use > 0")
    for field, value, off in (("top_p", s.top_p, 1.0), ("top_k", s.top_k, 0), ("min_p", s.min_p, 0.0)):
        if value != off:
            refuse(f"sampling.{field}", value, "training rollouts must sample the whole distribution, since the "
                   f"learner's log-probs are of it; use {off}")
    check_combination(c.learner)
    check_lengths(c)
    check_baseline(c)
    check_sessions(c)
    if c.offline and loss.proximal == "loglinear":
        refuse("learner.loss.proximal", "loglinear", "is reckoned by the ages of tokens, and those of another run's "
               "shards have none; use recompute")
    if c.offline and c.rollout.group_filter is not None:
        refuse("rollout.group_filter", c.rollout.group_filter, "is asked before a group lands, and those of another "
               "run have landed; use rollout.no_spread, or leave it out")
    if c.offline and c.data.sampler is not None:
        refuse("data.sampler", c.data.sampler, "orders prompts that are sampled, and this run samples none; leave it "
               "out")
    if c.data.rescore and not c.offline:
        refuse("data.rescore", True, "is for a run on another run's shards; set data.shards_from, too")
    smallest = c.groups_per_step % c.minibatch_groups or c.minibatch_groups
    if smallest * c.min_group < c.learner.ranks:
        refuse("learner.ranks", c.learner.ranks, f"a minibatch may hold only {smallest * c.min_group} answers; use "
               "fewer ranks or larger minibatches")
    if c.learner.ranks > 1 and c.learner.device == "cuda" and c.learner.gpus < 1:
        refuse("learner.gpus", c.learner.gpus, f"{c.learner.ranks} ranks cannot share a GPU with each other; use 1")
    if c.learner.token_budget < s.max_new_tokens + 1:
        refuse("learner.token_budget", c.learner.token_budget,
               f"one answer of sampling.max_new_tokens = {s.max_new_tokens} with its prompt does not fit")
    check_engine(c)
    check_best(c)
    check_validation(c)


def make_plan(config: Config, facts: InputFacts | None = None) -> Plan:
    """Totals of the run, and the refusals that need the inputs. Raises ConfigError."""
    check(config)
    check_no_spread(config)  # of what a claim will leave out: a replay has its claim
    for check_new in (check_rewards, check_updates, check_idle):  # not in `check`: earlier versions stored such runs
        check_new(config)
    check_tracking(config.tracking.uri)
    prompt = facts.longest_prompt if facts else config.data.max_prompt_tokens
    worst = GROUP_OVERHEAD_BYTES + BYTES_PER_TOKEN * (prompt + config.group_size * config.sampling.max_new_tokens)
    if config.rollout.session is not None:  # each answer with a prompt of its own
        worst += BYTES_PER_TOKEN * config.group_size * config.rollout.session_answers * (
            config.data.max_prompt_tokens + config.sampling.max_new_tokens)
    group_bytes = worst // 2
    model_bytes = facts.model_bytes if facts else 0
    trained_bytes = (facts.adapter_bytes if facts else 0) or model_bytes
    published_bytes = trained_bytes if config.learner.lora.publish == "adapter" else model_bytes
    reserve = RESERVE_BYTES + 4 * checkpoints_at_once(config) * trained_bytes \
        + (config.weights.keep + 1) * published_bytes
    of_roles: Mapping[str, int] = facts.role_bytes if facts else {}
    reserve += checkpoints_at_once(config) * saved_role_bytes(config.learner, of_roles)
    total = config.groups_per_step * config.total_steps
    kept = reserve + (facts.copied_bytes if facts else 0)
    disk = kept + group_bytes * min(total, groups_at_once(config)) + BYTES_PER_STEP * config.total_steps
    if config.storage.bytes_quota < disk:
        beside = f"bytes beside {kept} of model, checkpoints and versions"
        refuse("storage.bytes_quota", config.storage.bytes_quota,
               f"{config.total_steps} training steps land about {disk - kept} {beside}, and no shard is retired "
               f"before the end of the run (retention.replay=all): use at least {disk}, or fewer total_steps, or "
               "retention.replay=window" if config.retention.replay == "all" else
               f"about {disk - kept} {beside} lie there at one time (retention.replay=window, checkpoint.every="
               f"{config.checkpoint.every}, checkpoint.keep={config.checkpoint.keep}): use at least {disk}, or fewer "
               "or more frequent checkpoints")
    if facts is not None:
        _check_inputs(config, facts)
        check_validation_inputs(config, rows=facts.validation_rows, longest=facts.longest_validation,
                                context=facts.context)
    return Plan(
        total_groups=total,
        total_trajectories=total * config.group_size,
        updates=sum(policy_learns(config.learner, step) for step in range(config.total_steps))
        * config.updates_per_step,
        publications=config.total_steps // config.publish_every + 1,
        staleness_limit=config.staleness.limit,
        staleness_hard_max=config.staleness.effective_hard_max,
        max_outstanding_groups=config.max_outstanding,
        max_groups_in_flight=config.max_groups,
        dataset_epochs=total / facts.rows if facts else None,
        prompts=facts.rows if facts else None,
        prompts_left_out=facts.dropped if facts else 0,
        validation_prompts=facts.validation_rows if facts else None,
        validation_prompts_left_out=facts.dropped_validation if facts else 0,
        sources=len(config.data.train),
        warnings=(*no_spread_warnings(config), *update_warnings(config), *(facts.warnings if facts else ())),
        group_bytes=group_bytes,
        reserve_bytes=reserve,
        disk_bytes=disk,
        memory_bytes=model_bytes * (1 + copies_of_weights(config) + 1) + 3 * trained_bytes + held_role_bytes(of_roles),
        activation_bytes=facts.activation_bytes if facts else 0,
        cache_bytes=facts.cache_bytes if facts else 0,
        gpus=gpus_by_role(config),
    )


def check_tracking(uri: Any) -> None:
    """Raises ConfigError for a `tracking.uri` with a password, which it does not show. Earlier versions stored them."""
    if isinstance(uri, str) and has_password(uri):
        refuse("tracking.uri", without_password(uri),
               "settings are kept and shown in many places, and a password is for none of them; put the whole URI into "
               "a variable, and write tracking.uri=env:NAME")


def groups_at_once(config: Config) -> int:
    """Most groups in shards that are not retired: under `window` those of the steps since the oldest of the newest
    `checkpoint.keep` checkpoints, until one more is there, and those that are ahead (experience-store.md 3.11)."""
    steps = config.checkpoint.every * config.checkpoint.keep + 2  # one is trained, one is claimed, meanwhile
    whole_run = config.retention.replay == "all" or steps >= config.total_steps
    return config.groups_per_step * (config.total_steps if whole_run else steps) \
        + (0 if whole_run else config.max_outstanding)


def gpus_by_role(config: Config) -> dict[str, float]:
    """GPUs that the actors of each role ask Ray for; a role without a GPU is left out."""
    def of_one(role: LearnerConfig | EngineConfig) -> float:
        return role.gpus if role.device == "cuda" else 0.0

    asked = {"learner": config.learner.ranks * of_one(config.learner),
             "rollout": 0.0 if config.offline else config.rollout.workers * of_one(config.rollout.engine),
             "validation": 0.0 if config.data.validation is None or config.validates_lent
                           else of_one(config.validation_engine)}
    return {role: gpus for role, gpus in asked.items() if gpus}


def _check_inputs(config: Config, facts: InputFacts) -> None:
    if facts.rows == 0:
        refuse("data.train", config.data.train, "holds no prompts")
    if config.data.epochs is not None and facts.rows * config.data.epochs < config.groups_per_step:
        refuse("groups_per_step", config.groups_per_step,
               f"data.train has {facts.rows} rows and data.epochs is {config.data.epochs}: not one training step "
               "would be full; use fewer groups per step, more epochs, or data.epochs=null")
    for token in config.sampling.stop_token_ids:
        if facts.vocabulary is not None and not 0 <= token < facts.vocabulary:
            refuse("sampling.stop_token_ids", token,
                   f"outside the model's vocabulary of {facts.vocabulary}; use ids of its tokenizer")
    if config.rollout.session is not None and config.served_tokens > facts.context:
        refuse("data.max_prompt_tokens", config.data.max_prompt_tokens, "what a session goes on with may have so many, "
               f"and with the longest answer {config.served_tokens}, and the model takes {facts.context} in all; lower "
               "it")
    longest = facts.longest_prompt + config.sampling.max_new_tokens
    if longest > facts.context:
        refuse("sampling.max_new_tokens", config.sampling.max_new_tokens,
               f"the longest prompt has {facts.longest_prompt} tokens and the model takes {facts.context} in all; use "
               f"at most {facts.context - facts.longest_prompt}")
    if longest > config.learner.token_budget:
        refuse("learner.token_budget", config.learner.token_budget,
               f"the longest prompt with its answer has {longest} tokens; use at least that")


def toy_words(config: Config, why: str) -> list[str]:
    """People try their rows before they have chosen a model: what to say where it is the tiny one that refuses them."""
    if not isinstance(config.model, TinyModel) or "token" not in why:
        return []
    return ["this was checked for the tiny model of preset tiny-cpu, which knows digits, small letters and "
            f"{config.data.max_prompt_tokens} tokens a prompt; for a model of yours add --preset local-model-cpu --set "
            "model.path=DIR"]


def describe(config: Config, plan: Plan) -> list[tuple[str, str]]:
    """The plan as rows for people: (what, value)."""
    model = config.model.path or "to be set" if isinstance(config.model, LocalModel) else _tiny_words(config.model)
    known = plan.memory_bytes > 0
    bound = f"{config.staleness.bound} ({config.staleness.policy} up to {plan.staleness_hard_max})"
    if config.staleness.exact is not None:
        bound = f"exactly {config.staleness.exact}, of every group (staleness.exact)"
    passes = "" if plan.dataset_epochs is None else f", {plan.dataset_epochs:.2g} passes over the prompts"
    return [
        ("model", model),
        *([] if plan.prompts is None else [("prompts", _prompt_words(plan))]),
        ("training steps", f"{config.total_steps} x {config.groups_per_step} groups x {config.group_size} answers "
                           f"= {plan.total_trajectories} answers{passes}"),
        ("optimizer updates", f"{plan.updates} ({config.updates_per_step} a step)"),
        ("publications", f"{plan.publications} (every {config.publish_every} steps)"),
        ("staleness bound", "none: groups of another run have no age" if config.offline else
                            f"{bound}; at most {plan.max_outstanding_groups} groups ahead"),
        ("rollout", "none" if config.offline else
                    f"{config.rollout.workers} worker(s), {_engine_words(config.rollout.engine)}"),
        ("learner", f"{config.learner.ranks} rank(s), {config.learner.loss.name}, {config.learner.advantage.name}, "
                    f"lr {config.learner.lr:g}"),
        *([("trained", lora_words(config.learner.lora))] if config.learner.lora.used else []),
        *([("beside the policy", role_words(config.learner))] if asked_roles(config.learner) else []),
        ("validation", _validation_words(config)),
        ("disk", f"about {_size(plan.disk_bytes)}{'' if known else ' beside the model'} of "
                 f"{_size(config.storage.bytes_quota)}"),
        ("memory of weights", f"about {_size(plan.memory_bytes)}" if known else "known with the model"),
        *([("activations", f"about {_size(plan.activation_bytes)} on a learner rank, of {config.learner.token_budget} "
                           "tokens (learner.token_budget, learner.recompute)")] if plan.activation_bytes else []),
        *([("key/value cache", f"at most {_size(plan.cache_bytes)} an engine (rollout.engine.slots)")]
          if plan.cache_bytes else []),
        *([("GPUs", _gpu_words(plan.gpus))] if plan.gpus else []),
    ]


def _validation_words(config: Config) -> str:
    """`every 20 steps, 1 greedy and 8 sampled answers a prompt`"""
    if config.data.validation is None:
        return "none"
    when = "of the newest weights, nothing else" if config.validation.only else f"every {config.validation.every} steps"
    by = ", by one of rollout's servers" if config.validates_lent else ""
    return f"{when}, 1 greedy and {config.validation.answers - 1} sampled answers a prompt{by}"


def _tiny_words(model: TinyModel) -> str:
    return f"tiny: {model.layers} layers, hidden {model.hidden}, {model.warmup_steps} warm-up steps"


def _prompt_words(plan: Plan) -> str:
    """`4096 of 2 sources, 12 over data.max_prompt_tokens left out; 256 held out`"""
    def left_out(count: int) -> str:
        return f", {count} over data.max_prompt_tokens left out" if count else ""

    sources = f" of {plan.sources} sources" if plan.sources > 1 else ""
    return (f"{plan.prompts}{sources}{left_out(plan.prompts_left_out)}; {plan.validation_prompts} held out"
            f"{left_out(plan.validation_prompts_left_out)}")


def _engine_words(engine: EngineConfig) -> str:
    """`engine torch, 64 slots each`, `engine sglang, 2 server(s) of 4 GPU(s) each, 128 requests at once in each`"""
    if not isinstance(engine, SglangEngineConfig):
        return f"engine {engine.type}, {engine.slots} slots each"
    if engine.urls:
        which = f"{len(engine.urls)} server(s) that are there: {', '.join(engine.urls)}"
    elif engine.device == "cuda":
        which = f"{engine.replicas} server(s) of {engine.tensor_parallel} GPU(s) each"
    else:
        which = f"{engine.replicas} server(s) on the CPU"
    return f"engine {engine.type}, {which}, {engine.max_running} requests at once in each"


def _gpu_words(gpus: Mapping[str, float]) -> str:
    return f"{sum(gpus.values()):g}: " + ", ".join(f"{role} {count:g}" for role, count in gpus.items())


def _size(n: float) -> str:
    power = min(4, int(math.log(max(n, 1), 1024)))
    return f"{n / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
