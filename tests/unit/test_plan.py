"""Config, overrides and plan: what is derived, and what is refused with which words."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from flows.presets import load_preset, preset_names
from rl_core.config import Config, field_kinds
from rl_core.engine_plan import check_engine
from rl_core.errors import ConfigError
from rl_core.plan import InputFacts, describe, differing, make_plan, merge, parse_overrides, resolve
from rl_core.revisions import config_of
from rl_core.run_dir import RunDir
from rl_core.run_identity import open_identity, read_identity

FACTS = InputFacts(rows=100, longest_prompt=20, mean_prompt=15.0, validation_rows=10, model_bytes=1_600_000,
                   context=2048)

SERVERS = ["rollout.engine={type: sglang, urls: [http://a:30000, http://b:30000]}"]
REFUSED = {
    "unknown key": (["learner.lrr=1"], "learner.lrr: no such setting; did you mean `learner.lr`?"),
    "another system's key": (["actor.ppo_mini_batch_size=4"], "Headway calls it `learner.minibatch_groups`"),
    "no equals sign": (["learner.lr"], "--set 'learner.lr': write a field and a value"),
    "not a number": (["group_size=many"], "group_size: .*(got 'many')"),
    "a part set to a value": (["learner=1", "learner.lr=1"], "`learner` is set to a value and to a part of it"),
    "bad choice": (["staleness.policy=maybe"], "staleness.policy: .*'keep', 'mask', 'drop' or 'wait'.*(got 'maybe')"),
    "negative": (["seed=-1"], r"seed: .*greater than or equal to 0 \(got -1\)"),
    "infinite": (["learner.lr=.inf"], "learner.lr: .*finite"),
    "reward without a name": (["reward=good"], "reward: write one of exact, .*(got 'good')"),
    "model without its path": (["model.type=local"], "model.path: Field required"),
    "group of one": (["group_size=1"], r"group_size: a group of one has advantage 0.*\(got 1\)"),
    "group that can never be whole": (["rollout.min_group=9"], r"rollout.min_group: no group of 8.*\(got 9\)"),
    "minibatch over the claim": (["learner.minibatch_groups=17"], "learner.minibatch_groups: at most groups_per_step"),
    "a bound that can deadlock": (["staleness.bound=4", "staleness.hard_max=2"], r"staleness.hard_max: .*\(got 2\)"),
    "greedy training": (["sampling.temperature=0"], "sampling.temperature: greedy answers"),
    "nucleus": (["sampling.top_p=0.9"], r"sampling.top_p: .*use 1.0 \(got 0.9\)"),
    "log-linear without decoupled": (["learner.loss.proximal=loglinear"], "learner.loss.proximal: belongs to"),
    "a second weight": (["learner.loss.name=decoupled_ppo", "learner.correction.weights=token_truncate"],
                        "learner.correction.weights: decoupled_ppo has its own"),
    "more ranks than answers": (["learner.ranks=500"], "learner.ranks: a minibatch may hold only"),
    "ranks that share a GPU": (["learner.ranks=2", "learner.device=cuda", "learner.gpus=0.5"],
                               r"learner.gpus: 2 ranks cannot share a GPU with each other; use 1 \(got 0.5\)"),
    "an answer over the budget": (["learner.token_budget=8"], "learner.token_budget: one answer"),
    "a quota below one retirement": (["storage.bytes_quota=1000"], r"storage.bytes_quota: .*use at least \d+"),
    "more groups than rows": (["data.epochs=1", "groups_per_step=101"], "groups_per_step: data.train has 100 rows"),
    "servers that are there, and some to start": (
        [*SERVERS, "rollout.engine.replicas=2"], r"rollout.engine.replicas: .*leave one of the two out \(got 2\)"),
    "two workers over the same servers": ([*SERVERS, "rollout.workers=2"], r"rollout.workers: one worker .*\(got 2\)"),
    "an address without a port": (["rollout.engine={type: sglang, urls: [http://a]}"], "rollout.engine.urls: .*http://"),
    "a flag that Headway sets": (["rollout.engine={type: sglang, server_args: [--port, '1']}"],
                                 "rollout.engine.server_args: --port is not free"),
    "a torn server on the CPU": (["rollout.engine={type: sglang, device: cpu, tensor_parallel: 2}"],
                                 "rollout.engine.tensor_parallel: a server on the CPU is whole"),
    "fewer outstanding tokens than one answer": (["rollout.engine={type: sglang, max_outstanding_tokens: 71}"],
                                                 "rollout.engine.max_outstanding_tokens: .* are 72 tokens"),
    "a setting of the other engine": (["rollout.engine={type: sglang, slots: 3}"],
                                      "rollout.engine.slots: belongs to another `rollout.engine.type`"),
    "answer over the context": (["sampling.max_new_tokens=4000"], "sampling.max_new_tokens: .*at most 2028"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_field_and_value(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(overrides)), FACTS)


PASSWORDS = {
    # tracking.uri -> what of it is shown
    "of a database": ("postgresql://me:s3cr3t@host/db", "postgresql://me:***@host/db"),
    "of a server": ("http://me:s3cr3t@host:5000", "http://me:***@host:5000"),
    "of nobody": ("https://:s3cr3t@host", "https://:***@host"),
    "of a user with an @": ("postgresql://me@corp:s3cr3t@host/db", "postgresql://me@corp:***@host/db"),
    "in the query": ("postgresql://host/db?user=me&password=s3cr3t", "postgresql://host/db?user=me&password=***"),
    "with what should be escaped": ("postgresql://me:s/3#c@r3t@host/db", "postgresql://me:***@host/db"),
}


@pytest.mark.parametrize(("uri", "shown"), PASSWORDS.values(), ids=PASSWORDS)
def test_a_password_is_refused_and_not_repeated_and_a_run_that_has_one_can_be_read(tmp_path: Path, uri: str,
                                                                                   shown: str) -> None:
    config = resolve(load_preset("tiny-cpu"), {"tracking": {"uri": uri}})
    with pytest.raises(ConfigError) as refused:
        make_plan(config)
    said = str(refused.value)
    assert said.startswith("tracking.uri: ") and "env:NAME" in said and said.endswith(f"(got {shown!r})")
    run = RunDir(tmp_path / "k")
    open_identity(run, "k", "tiny-cpu", config)
    assert read_identity(run).config == config_of(run, 0) == config


@pytest.mark.parametrize("uri", ["env:HEADWAY_TRACKING", "http://host:5000/a@b", "sqlite:////me@x/a:b@c.db",
                                 "postgresql://me@host/db"])
def test_a_uri_without_a_password_is_taken(uri: str) -> None:
    make_plan(resolve(load_preset("tiny-cpu"), parse_overrides([f"tracking.uri={uri}"])), FACTS)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_a_plan(preset: str) -> None:
    config = resolve(load_preset(preset), {})
    assert dict(describe(config, make_plan(config)))["training steps"]


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--preset tinny: no such preset; there are .*tiny-cpu"):
        load_preset("tinny")


def test_derived_totals_follow_from_the_settings() -> None:
    config = resolve(load_preset("tiny-cpu"), parse_overrides(
        ["staleness.bound=0.5", "publish_every=4", "learner.passes=2", "learner.minibatch_groups=6"]))
    plan = make_plan(config, FACTS)
    assert config.admission_extra == 32  # floor(16 * 4 * 0.5)
    assert plan.max_outstanding_groups == 96
    assert plan.updates == 180 * 2 * 3
    assert plan.publications == 46
    assert (plan.staleness_limit, plan.staleness_hard_max) == (1, 2)
    assert plan.total_trajectories == 180 * 16 * 8


def test_the_disk_figure_holds_the_copy_of_the_model() -> None:
    config = resolve(load_preset("tiny-cpu"), {})
    without, plan = make_plan(config, FACTS), make_plan(config, replace(FACTS, copied_bytes=2**20))
    assert plan.disk_bytes == without.disk_bytes + 2**20
    assert plan.reserve_bytes == without.reserve_bytes
    tight = config.model_copy(update={"storage": config.storage.model_copy(update={
        "bytes_quota": without.disk_bytes})})
    assert make_plan(tight, FACTS).disk_bytes == without.disk_bytes
    with pytest.raises(ConfigError, match=f"storage.bytes_quota: .*use at least {plan.disk_bytes}"):
        make_plan(tight, replace(FACTS, copied_bytes=2**20))


def test_a_window_needs_room_for_what_lies_between_two_retirements() -> None:
    """20 x 2 steps since the older checkpoint, one that trains, one that is claimed, and what is ahead of them."""
    over = ["total_steps=2000", "groups_per_step=4", "checkpoint.every=20", "checkpoint.keep=2", "staleness.bound=2",
            "storage.bytes_quota=1099511627776"]
    whole = make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(over)), FACTS)
    window = make_plan(resolve(load_preset("tiny-cpu"), parse_overrides([*over, "retention.replay=window"])), FACTS)
    assert whole.disk_bytes - window.disk_bytes == whole.group_bytes * (4 * 2000 - (4 * 42 + 12))
    tight = [*over, "retention.replay=window", f"storage.bytes_quota={window.disk_bytes}"]
    assert make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(tight)), FACTS)
    with pytest.raises(ConfigError, match=rf"storage\.bytes_quota: .*at one time .*use at least {window.disk_bytes}, "
                                          "or fewer or more frequent checkpoints"):
        make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(
            [*tight, f"storage.bytes_quota={window.disk_bytes - 1}"])), FACTS)
    with pytest.raises(ConfigError, match=r"retention\.replay=all.*or retention\.replay=window"):
        make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(
            [*over, f"storage.bytes_quota={window.disk_bytes}"])), FACTS)


def test_the_bound_is_exact_decimal_text() -> None:
    """floor(B K eta) in floating point was off by one in 6 % of a grid (experience-store.md 3.7)."""
    config = Config(groups_per_step=100, staleness={"bound": "0.29"})
    assert config.staleness.bound == Decimal("0.29")
    assert config.admission_extra == 29  # int(100 * 0.29) in floats is 28


def test_overrides_read_numbers_as_people_write_them() -> None:
    assert parse_overrides(["learner.lr=1e-4", "data.epochs=null", "reward=./e.py:f", "validation.sampled=false"]) == {
        "learner": {"lr": 1e-4}, "data": {"epochs": None}, "reward": "./e.py:f", "validation": {"sampled": False}}


def test_a_part_whose_type_changes_is_replaced() -> None:
    base = {"model": {"type": "tiny", "layers": 2}, "seed": 1}
    assert merge(base, {"model": {"type": "local", "path": "m"}}) == {
        "model": {"type": "local", "path": "m"}, "seed": 1}
    assert merge(base, {"model": {"layers": 3}}) == {"model": {"type": "tiny", "layers": 3}, "seed": 1}


def test_every_field_has_a_kind_and_a_description() -> None:
    kinds = field_kinds()
    assert kinds["groups_per_step"] == kinds["publish_every"] == kinds["data.train"] == "identity"
    assert kinds["learner.lr"] == kinds["staleness.bound"] == "training"
    assert kinds["deadlines.claim_s"] == "operational"
    assert kinds["learner.ranks"] == "environment"

    def undescribed(node: dict, name: str) -> list[str]:
        return [f"{name}.{key}" for key, field in node.get("properties", {}).items()
                if not field.get("description") and "$ref" not in str(field) and key != "type"]

    schema = Config.model_json_schema()
    parts = [("Config", schema), *schema["$defs"].items()]
    assert [miss for name, part in parts for miss in undescribed(part, name)] == []


def test_differing_names_the_fields_of_one_kind() -> None:
    one = resolve(load_preset("tiny-cpu"), {})
    two = resolve(load_preset("tiny-cpu"), parse_overrides(["group_size=4", "learner.lr=1e-3", "deadlines.claim_s=9"]))
    assert differing(one, two, "identity") == {"group_size": (8, 4)}
    assert differing(one, two, "training") == {"learner.lr": (5e-4, 1e-3)}
    assert differing(one, two, "operational") == {"deadlines.claim_s": (1800.0, 9.0)}


def test_servers_are_counted_with_their_gpus_and_their_copies_of_the_weights() -> None:
    over = ["rollout.engine={type: sglang, replicas: 3, tensor_parallel: 2}", "rollout.workers=2"]
    config = resolve(load_preset("tiny-cpu"), parse_overrides(over))
    plan = make_plan(config, FACTS)
    assert plan.gpus == {"rollout": 12.0, "validation": 1.0}
    assert plan.memory_bytes == FACTS.model_bytes * (4 + 6 + 1)
    assert dict(describe(config, plan))["rollout"] == \
        "2 worker(s), engine sglang, 3 server(s) of 2 GPU(s) each, 128 requests at once in each"
    there = resolve(load_preset("tiny-cpu"), parse_overrides([*SERVERS, "data.validation=null"]))
    assert make_plan(there, FACTS).gpus == {}
    assert make_plan(there, FACTS).memory_bytes == FACTS.model_bytes * (4 + 0 + 1)


def test_log_probs_of_another_distribution_are_refused_where_the_environment_asks_for_them() -> None:
    config = resolve(load_preset("tiny-cpu"), parse_overrides(SERVERS))
    check_engine(config, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"})
    with pytest.raises(ConfigError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB: .*unset it \(got 'true'\)"):
        check_engine(config, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "true"})
    check_engine(Config(), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "true"})
