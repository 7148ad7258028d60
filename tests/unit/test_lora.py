"""Adapters: what they change, what is trained and kept of them, what engines are given, and the canary."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.checkpoint import newest_whole
from rl_core.config import Config
from rl_core.errors import AdapterNotServed, ConfigError, EngineMismatch, WeightsDamaged
from rl_core.export import export
from rl_core.kept_weights import read_kept
from rl_core.learner.adapter import linear_layers, without_adapter
from rl_core.learner.learner import Learner, fold_claims
from rl_core.learner.policy import PackInputs, Policy, load_policy
from rl_core.learner.probing import PROMPTS, adapter_probe, fixed_prompts
from rl_core.learner.replay import replay
from rl_core.lora import canary
from rl_core.lora.canary import PROBE_FILE, Place, Probe, check_seen, read_probe, seen
from rl_core.lora.plan import Linear, adapter_parameters, check_layers
from rl_core.lora.settings import LoraConfig
from rl_core.lora.tensors import is_adapter, merged
from rl_core.model_setup import check_model
from rl_core.offered_weights import offered_version
from rl_core.plan import InputFacts, check, make_plan, resolve
from rl_core.preflight import tiny_facts
from rl_core.records import read_record
from rl_core.rollout.canary import check_adapter_served
from rl_core.rollout.prompts import load_tokenizer
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.scoring import InlineScorer
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.rollout.worker import RolloutWorker
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import identity_payload
from rl_core.tokenizer import write_tokenizer
from rl_core.types import WeightVersion
from rl_core.versions import read_versions
from rl_core.weights import WEIGHTS_FILE, digest_tensors, read_tensors
from tests.learning import all_by, claim_groups, random_groups, sampled_by, start_attempt, train_as_rank, write_model

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)
LAYERS = (Linear("model.layers.0.self_attn.q_proj", 64, 64), Linear("model.layers.0.self_attn.k_proj", 32, 64),
          Linear("model.layers.0.mlp.down_proj", 64, 96))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def load(directory: Path, lora: LoraConfig | None = LORA, seed: int = 3) -> Policy:
    return load_policy(directory, logits_chunk=64, dtype=torch.float32, device=CPU, lora=lora, seed=seed)


def filled(policy: Policy, size: float = 0.05) -> Policy:
    """With values in B, as if it had learned."""
    lots = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.weights().items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=lots) * size)
    return policy


def answers_of(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy(probe_inputs(policy)).logprob_S


def probe_inputs(policy: Policy) -> PackInputs:
    from rl_core.learner.probing import _inputs

    return _inputs(fixed_prompts(policy.vocabulary, 8), CPU)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_merging_adds_the_scaled_product_where_there_is_an_adapter_and_nothing_elsewhere() -> None:
    base = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b.weight": torch.tensor([[-0.0]]),
            "c.weight": torch.tensor([5.0])}
    adapter = {"a.lora_A.weight": torch.tensor([[1.0, 10.0]]), "a.lora_B.weight": torch.tensor([[2.0], [0.5]]),
               "b.lora_A.weight": torch.tensor([[7.0]]), "b.lora_B.weight": torch.tensor([[0.0]])}
    whole = merged(base, adapter, 2.0)
    assert whole["a.weight"].tolist() == [[5.0, 42.0], [4.0, 14.0]]
    assert whole["b.weight"] is base["b.weight"] and whole["c.weight"] is base["c.weight"]
    assert list(whole) == list(base) and is_adapter(adapter) and not is_adapter(base)


FOREIGN: dict[str, dict[str, Tensor]] = {
    "of another shape": {"a.lora_A.weight": torch.ones(1, 3), "a.lora_B.weight": torch.ones(2, 1)},
    "of another layer": {"z.lora_A.weight": torch.ones(1, 2), "z.lora_B.weight": torch.ones(2, 1)},
    "without its other half": {"a.lora_B.weight": torch.ones(2, 1)},
    "no adapter": {"a.weight": torch.ones(2, 2)},
}


@pytest.mark.parametrize("adapter", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_adapter_of_another_model_is_refused(adapter: dict[str, Tensor]) -> None:
    with pytest.raises(WeightsDamaged, match="an adapter of another model"):
        merged({"a.weight": torch.ones(2, 2)}, adapter, 1.0)


# -- the plan ----------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank of nothing": ({"learner": {"lora": {"rank": 0}}}, r"learner\.lora\.rank: .*\(got 0\)"),
    "alpha without an adapter": ({"learner": {"lora": {"alpha": 4.0}}}, r"learner\.lora\.alpha: there is no adapter"),
    "layers without an adapter": ({"learner": {"lora": {"target_modules": ["q_proj"]}}},
                                  r"learner\.lora\.target_modules: there is no adapter"),
    "dropout": ({"learner": {"lora": {"rank": 4, "dropout": 0.1}}}, r"learner\.lora\.dropout: .*another distribution"),
    "a refreshed reference": ({"learner": {"lora": {"rank": 4}, "kl": {"use": "loss"},
                                           "reference": {"refresh_every": 2}}},
                              r"learner\.reference\.refresh_every: .*the base under the adapter"),
    "an adapter for servers": ({"learner": {"lora": {"rank": 4, "publish": "adapter"}},
                                "rollout": {"engine": {"type": "sglang"}}},
                               r"learner\.lora\.publish: servers are given whole weights: .*; use merged"),
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(resolve({}, settings))


NO_LAYERS: dict[str, tuple[LoraConfig, tuple[Linear, ...], str]] = {
    "a name that the model does not have": (LoraConfig(rank=4, target_modules=("query",)), LAYERS,
                                            "has this name; there are down_proj, k_proj, q_proj .*'query'"),
    "a rank above the smaller side": (LoraConfig(rank=33), LAYERS, r"k_proj is 32 x 64, .* use at most that"),
    "a model without linear layers": (LoraConfig(rank=4), (), "has no linear layers in numbered blocks"),
}


@pytest.mark.parametrize(("lora", "layers", "said"), NO_LAYERS.values(), ids=NO_LAYERS.keys())
def test_layers_that_cannot_have_the_adapter_are_refused_by_name(lora: LoraConfig, layers: tuple[Linear, ...],
                                                                 said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layers(lora, layers)


def test_a_rank_is_counted_against_the_chosen_layers_alone() -> None:
    lora = LoraConfig(rank=48, target_modules=("q_proj", "down_proj"))
    check_layers(lora, LAYERS)
    assert adapter_parameters(lora, LAYERS) == 48 * (64 + 64) + 48 * (64 + 96)
    assert adapter_parameters(LoraConfig(), LAYERS) == 0


def test_the_plan_counts_an_adapter_once_per_moment_and_not_the_model() -> None:
    def planned(**lora: Any) -> Any:
        facts = InputFacts(rows=512, longest_prompt=8, mean_prompt=8, validation_rows=0, model_bytes=10**6, context=512,
                           adapter_bytes=10**4 if lora else 0)
        return make_plan(resolve({}, {"data": {"validation": None}, "learner": {"lora": lora}}), facts)

    full, merged_, alone = planned(), planned(rank=4), planned(rank=4, publish="adapter")
    assert full.memory_bytes - merged_.memory_bytes == 3 * (10**6 - 10**4)
    assert merged_.reserve_bytes - alone.reserve_bytes == 5 * (10**6 - 10**4)
    assert full.reserve_bytes > merged_.reserve_bytes


def test_files_and_loaded_model_have_the_same_layers(directory: Path, tmp_path: Path) -> None:
    write_tokenizer(directory, 256)
    stock = AutoModelForCausalLM.from_pretrained(directory)
    assert set(check_model(directory).layers) == set(linear_layers(stock)) and len(linear_layers(stock)) == 14
    config = Config()
    names = {layer.name for layer in tiny_facts(config.model).layers}  # pyright: ignore[reportArgumentType]
    assert names == {layer.name for layer in linear_layers(stock)}


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing_is_a_function_of_the_seed_and_alone_is_trained(directory: Path) -> None:
    policy, plain = load(directory), load(directory, None)
    assert torch.equal(answers_of(policy), answers_of(plain))
    assert is_adapter(policy.weights()) and len(policy.weights()) == 28
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert {name.replace(".default", "") for name in trained} == set(policy.weights())
    assert digest_tensors(policy.base_weights().items()) == digest_tensors(plain.weights().items())
    assert plain.base_weights() == {}
    again, other = load(directory).weights(), load(directory, seed=4).weights()
    for name, tensor in policy.weights().items():
        assert torch.equal(tensor, again[name]) and torch.equal(tensor, other[name]) == ("lora_B" in name), name


def test_the_target_modules_alone_get_one(directory: Path) -> None:
    policy = load(directory, LoraConfig(rank=2, target_modules=("q_proj", "v_proj")))
    assert {name.split(".")[4] for name in policy.weights()} == {"q_proj", "v_proj"} and len(policy.weights()) == 8


def test_merged_weights_are_the_model_with_the_adapter(directory: Path) -> None:
    policy, plain = filled(load(directory)), load(directory, None)
    before = answers_of(plain)
    whole = merged(policy.base_weights(), policy.weights(), LORA.scale)
    with torch.no_grad():
        for name, parameter in plain.weights().items():
            parameter.copy_(whole[name])
    assert (answers_of(policy) - before).abs().mean() > 0.05
    torch.testing.assert_close(answers_of(plain), answers_of(policy), atol=2e-5, rtol=0)


def test_without_its_adapter_the_policy_is_its_base_bit_by_bit_and_with_it_again_itself(directory: Path) -> None:
    policy, plain = filled(load(directory)), load(directory, None)
    mine = answers_of(policy)
    with without_adapter(policy):
        assert torch.equal(answers_of(policy), answers_of(plain))
    assert torch.equal(answers_of(policy), mine) and not torch.equal(mine, answers_of(plain))
    assert all(parameter.requires_grad for parameter in policy.weights().values())


# -- runs --------------------------------------------------------------------------------------------------------------


def settings(*, publish_every: int = 1, **learner: Any) -> Config:
    """Steps of four groups, an adapter of rank 4."""
    lora = {"rank": 4, "alpha": 8.0} | learner.pop("lora", {})
    return Config.model_validate({
        "groups_per_step": 4, "group_size": 4, "total_steps": 20, "storage": {"fsync": False},
        "publish_every": publish_every,
        "learner": {"lr": 1e-2, "warmup_steps": 0, "token_budget": 100, "lora": lora} | learner})


def new_run(place: Path, config: Config, steps: int = 3) -> RunDir:
    """A run whose claims were all sampled by its initial model."""
    run = RunDir(place / "run")
    write_model(run.model)
    write_tokenizer(run.model, 256)
    start_attempt(run)
    put_if_absent(run.run_json, to_json(identity_payload("run", "none", config)))
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    for step in range(steps):
        claim_groups(run, config, step, [sampled_by(stock, all_by(0, group)) for group in random_groups(step)])
    return run


def learner_of(run: RunDir, config: Config) -> Learner:
    learner = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    return learner


def trained(place: Path, config: Config, steps: int = 2) -> tuple[RunDir, Learner]:
    run = new_run(place, config)
    learner = learner_of(run, config)
    for step in range(steps):
        learner.train(step)
    return run, learner


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_a_run_trains_and_keeps_its_adapter_alone_and_publishes_what_was_asked_for(tmp_path: Path,
                                                                                   publish: str) -> None:
    config = settings(lora={"publish": publish}, kl={"use": "loss", "coef": 0.1})
    run, learner = trained(tmp_path, config)
    weights, moments = learner.tensors()
    base = dict(AutoModelForCausalLM.from_pretrained(run.model).named_parameters())
    assert len(weights) == 28 and is_adapter(weights)
    assert {name.partition("/")[2] for name in moments} == set(weights)
    assert learner.checkpoint() == 2
    saved = newest_whole(run)
    assert saved is not None and set(saved.parameters) == set(weights) and saved.roles == {}
    whole = merged(base, weights, config.learner.lora.scale)
    versions, records = read_versions(run), [read_record(run, step) for step in range(2)]
    files = [read_tensors(run.weights(v) / WEIGHTS_FILE) for v in range(3)]
    if publish == "merged":
        assert set(files[2]) == set(base) and versions[2].digest == digest_tensors(whole.items())
        assert versions[0].digest == digest_tensors(base.items())
    else:
        assert set(files[2]) == set(weights) and versions[2].digest == records[1].weights_digest
    assert records[1].weights_digest == digest_tensors(weights.items())
    assert records[0].metrics["train/kl_reference"] == 0.0 < records[1].metrics["train/kl_reference"]
    targets = sum(base[f"{layer.name}.weight"].numel() for layer in check_model(run.model).layers)
    share = targets / sum(tensor.numel() for tensor in base.values())
    assert records[1].metrics["weights/changed"] == pytest.approx(share, rel=0.01)
    kept = read_kept(run)
    assert kept.digest == digest_tensors(whole.items()) and kept.known_as == versions[2].digest


def test_an_adapter_is_restored_replayed_and_folded_bit_by_bit_and_exported_whole(tmp_path: Path) -> None:
    config = settings(kl={"use": "reward", "coef": 0.05, "estimator": "k1"})
    run, learner = trained(tmp_path, config, steps=2)
    learner.checkpoint()
    learner.train(2)
    weights, moments = learner.tensors()
    again = learner_of(run, config)
    assert again.next_step() == 2
    again.train(2)
    for mine, theirs in zip((weights, moments), again.tensors(), strict=True):
        assert digest_tensors(mine.items()) == digest_tensors(theirs.items())
    assert [(one.step, one.verdict) for one in replay(run, range(3))] == [(k, "identical") for k in range(3)]
    assert fold_claims(str(run.root)) == read_record(run, 2).weights_digest == digest_tensors(weights.items())
    about = export(run, tmp_path / "out")
    stock = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(run.model).named_parameters())
    whole = merged(base, weights, config.learner.lora.scale)
    assert (about.step, about.version) == (3, 3) and about.weights_digest == digest_tensors(whole.items())
    assert digest_tensors(stock.items()) == about.weights_digest
    assert not json.loads((tmp_path / "out" / "config.json").read_text()).get("peft_type")


def test_a_restart_between_publications_makes_the_bytes_and_the_probe_of_the_last_one_again(tmp_path: Path) -> None:
    config = settings(publish_every=2)
    run, learner = trained(tmp_path, config, steps=3)
    assert {v: version.step for v, version in read_versions(run).items()} == {0: 0, 1: 2}
    probe, tensors = read_probe(run.weights(1)), read_tensors(run.weights(1) / WEIGHTS_FILE)
    learner.checkpoint()
    shutil.rmtree(run.weights(1))
    again = learner_of(run, config)
    assert again.next_step() == 3 and len(read_versions(run)) == 2
    assert read_probe(run.weights(1)) == probe
    assert digest_tensors(read_tensors(run.weights(1) / WEIGHTS_FILE).items()) == digest_tensors(tensors.items())
    for mine, theirs in zip(learner.tensors(), again.tensors(), strict=True):
        assert digest_tensors(mine.items()) == digest_tensors(theirs.items())


@pytest.mark.slow
@pytest.mark.algorithms
def test_two_gloo_ranks_train_an_adapter_as_one_does(tmp_path: Path) -> None:
    config = settings(kl={"use": "loss", "coef": 0.1})
    run = new_run(tmp_path, config, steps=2)
    one = learner_of(run, config)
    for step in range(2):
        one.train(step)
    alone, moments = one.tensors()
    pair = new_run(tmp_path / "pair", config, steps=2)
    two = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2})})
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_as_rank, args=(
        rank, 2, str(pair.root), two, str(tmp_path / "rendezvous"), 2, str(tmp_path / f"rank-{rank}.pt")))
        for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    weights = newest_whole(pair)
    assert weights is not None and set(weights.parameters) == set(alone) and set(weights.optimizer) == set(moments)
    for name, tensor in alone.items():
        np.testing.assert_allclose(weights.parameters[name], tensor, atol=2e-5, err_msg=name)
    mine, theirs = (read_probe(each.weights(2)) for each in (run, pair))
    assert mine is not None and theirs is not None
    np.testing.assert_allclose([place.adapter for place in mine.places], [place.adapter for place in theirs.places],
                               atol=1e-4)


def test_a_start_without_a_learner_publishes_what_the_learner_would(tmp_path: Path) -> None:
    for publish in ("merged", "adapter"):
        config = settings(lora={"publish": publish})
        run = new_run(tmp_path / publish, config, steps=0)
        version = offered_version(run, config, 1)
        learner_of(run, config)
        assert read_versions(run) == {0: version}


# -- the canary --------------------------------------------------------------------------------------------------------


class DropsAdapters(TorchEngine):
    """Acknowledges every version, and goes on with the base model."""

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from rl_core.rollout.models import read_model_tensors

        return read_model_tensors(self._model_dir)


@pytest.fixture
def engines() -> Iterator[list[TorchEngine]]:
    opened: list[TorchEngine] = []
    yield opened
    for engine in opened:
        engine.close()


def served_by(engine: TorchEngine, run: RunDir, config: Config, v: int) -> canary.Seen | None:
    version = read_versions(run)[v]
    assert engine.swap(version, run.weights(v)) == version.digest
    return check_adapter_served(engine, version, run.weights(v), config)


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_an_engine_that_serves_the_adapter_passes_and_one_that_drops_it_fails_by_name(
        tmp_path: Path, engines: list[TorchEngine], publish: str) -> None:
    config = settings(lora={"publish": publish})
    run, _ = trained(tmp_path, config)
    scale = config.learner.lora.scale
    good, bad = (kind(run.model, slots=4, adapter_scale=scale) for kind in (TorchEngine, DropsAdapters))
    engines += [good, bad]
    first, last = (served_by(good, run, config, v) for v in (0, 2))
    assert first is not None and last is not None
    assert first.deciding == 0 and first.gap == pytest.approx(first.base_gap) and first.gap < 1e-5
    assert last.deciding > PROMPTS / 2 and last.of_base == 0 and last.gap < 1e-5 < 1e-2 < last.base_gap
    assert served_by(bad, run, config, 0) is not None  # an adapter that has not learned cannot be missed
    with pytest.raises(AdapterNotServed, match=r"version 2 \(step 2\) answers as the base model, without the adapter"):
        served_by(bad, run, config, 2)


def test_in_bfloat16_fewer_places_decide_and_the_verdict_is_the_same(tmp_path: Path,
                                                                     engines: list[TorchEngine]) -> None:
    config = settings(lora={"publish": "adapter"})
    run, _ = trained(tmp_path, config)
    in_bfloat16 = {"rollout": {"engine": {"type": "torch", "dtype": "bfloat16"}}}
    config = Config.model_validate(config.model_dump() | in_bfloat16)
    scale = config.learner.lora.scale
    good, bad = (kind(run.model, slots=4, dtype="bfloat16", adapter_scale=scale)
                 for kind in (TorchEngine, DropsAdapters))
    engines += [good, bad]
    found = served_by(good, run, config, 2)
    assert found is not None and 0 < found.deciding < PROMPTS and found.of_base == 0 and found.gap < 0.05
    with pytest.raises(AdapterNotServed):
        served_by(bad, run, config, 2)


def test_a_worker_refuses_the_swap_of_an_engine_that_drops_the_adapter(tmp_path: Path) -> None:
    config = settings()
    run, _ = trained(tmp_path, config, steps=1)
    worker = RolloutWorker(run, config, name="rollout-0", attempt=1, engine=DropsAdapters(run.model, slots=4),
                           tokenizer=load_tokenizer(run.model), scorer=InlineScorer(exact), digests={})
    try:
        first, second = read_versions(run).values()
        assert worker.swap(first) == first.digest
        with pytest.raises(AdapterNotServed, match="as the base model"):
            worker.swap(second)
    finally:
        worker.close()


def test_an_engine_with_another_scale_is_no_match(tmp_path: Path, engines: list[TorchEngine]) -> None:
    config = settings(lora={"publish": "adapter"})
    run, _ = trained(tmp_path, config)
    engines.append(engine := TorchEngine(run.model, slots=4, adapter_scale=3 * config.learner.lora.scale))
    with pytest.raises(EngineMismatch, match="nats off the learner's log-probs"):
        served_by(engine, run, config, 2)
    engines.append(unscaled := TorchEngine(run.model, slots=4))
    with pytest.raises(WeightsDamaged, match="opened without the scale"):
        unscaled.swap(read_versions(run)[2], run.weights(2))


def test_a_later_version_without_a_probe_is_refused(tmp_path: Path, engines: list[TorchEngine]) -> None:
    config = settings()
    run, _ = trained(tmp_path, config, steps=1)
    engines.append(engine := TorchEngine(run.model, slots=4))
    (run.weights(1) / PROBE_FILE).unlink()
    with pytest.raises(WeightsDamaged, match="has an adapter and no probe"):
        served_by(engine, run, config, 1)


def test_a_run_that_trains_all_parameters_has_no_canary(tmp_path: Path, engines: list[TorchEngine]) -> None:
    config = settings(lora={"rank": None, "alpha": 32.0})
    run, _ = trained(tmp_path, config, steps=1)
    engines.append(engine := TorchEngine(run.model, slots=4))
    assert served_by(engine, run, config, 1) is None and not (run.weights(1) / PROBE_FILE).exists()


def test_the_probe_is_of_the_published_weights_and_leaves_the_policy_alone(directory: Path) -> None:
    policy = filled(load(directory))
    before = digest_tensors(policy.weights().items())
    probe = adapter_probe(policy, room=6)
    assert digest_tensors(policy.weights().items()) == before and len(probe.places) == PROMPTS
    assert {len(place.prompt) for place in probe.places} == {5}
    assert len({place.prompt for place in probe.places}) == PROMPTS
    for place in probe.places:
        assert len(place.token_ids) == len(place.adapter) == len(place.base) == 16
        assert max(place.adapter) == place.adapter[0] and max(place.base) == place.base[8]


PLACE = Place(prompt=(1, 2), token_ids=(5, 6), adapter=(-1.0, -2.0), base=(-1.5, -1.2))
SEEN: dict[str, tuple[list[tuple[int, float]], str, canary.Seen]] = {
    "the adapter": ([(5, -1.0), (5, -1.0)], "float32", canary.Seen(0.0, 0.5, 2, 0)),
    "the base": ([(6, -1.2), (5, -1.5)], "float32", canary.Seen(0.65, 0.0, 2, 2)),
    "one place of each": ([(5, -1.0), (6, -1.2)], "float32", canary.Seen(0.4, 0.25, 2, 1)),
}


@pytest.mark.parametrize(("answers", "precision", "found"), SEEN.values(), ids=SEEN.keys())
def test_what_an_engine_says_is_counted(answers: list[tuple[int, float]], precision: str, found: canary.Seen) -> None:
    now = seen(Probe((PLACE, PLACE)), answers, precision)
    assert (now.gap, now.base_gap) == pytest.approx((found.gap, found.base_gap))
    assert (now.deciding, now.of_base) == (found.deciding, found.of_base)


VERDICTS: dict[str, tuple[canary.Seen, type[Exception] | None]] = {
    "the adapter": (canary.Seen(1e-5, 0.5, 16, 0), None),
    "nothing decides": (canary.Seen(1e-5, 1e-5, 0, 0), None),
    "half of the places": (canary.Seen(1e-4, 0.5, 16, 8), None),
    "the base": (canary.Seen(0.5, 1e-5, 16, 16), AdapterNotServed),
    "the base, nearly the same": (canary.Seen(1e-4, 1e-5, 1, 1), AdapterNotServed),
    "neither": (canary.Seen(0.5, 0.9, 16, 0), EngineMismatch),
    "no number": (canary.Seen(float("nan"), 0.9, 16, 0), EngineMismatch),
}


@pytest.mark.parametrize(("found", "error"), VERDICTS.values(), ids=VERDICTS.keys())
def test_the_verdict_names_what_is_served(found: canary.Seen, error: type[Exception] | None) -> None:
    if error is None:
        check_seen(found, 1e-3, "engine")
        return
    with pytest.raises(error) as raised:
        check_seen(found, 1e-3, "engine")
    assert type(raised.value) is error


def test_a_token_that_nobody_would_say_is_a_mismatch() -> None:
    with pytest.raises(EngineMismatch, match=r"most likely token behind \[1, 2\] is 9"):
        seen(Probe((PLACE,)), [(9, -0.1)], "float32")


@pytest.mark.parametrize("text", ['{"format": 1, "places": [{"prompt": [1]}]}', ""], ids=["other fields", "no byte"])
def test_a_damaged_probe_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / PROBE_FILE).write_text(text)
    with pytest.raises(WeightsDamaged, match=r"probe\.json"):
        read_probe(tmp_path)
    assert read_probe(tmp_path / "nowhere") is None


def test_versions_of_a_run_stay_small_with_the_adapter_alone(tmp_path: Path) -> None:
    sizes: dict[str, int] = {}
    for publish in ("merged", "adapter"):
        run, _ = trained(tmp_path / publish, settings(lora={"publish": publish}), steps=1)
        version: WeightVersion = read_versions(run)[1]
        sizes[publish] = (run.weights(version.v) / WEIGHTS_FILE).stat().st_size
    assert sizes["adapter"] < sizes["merged"] / 3
