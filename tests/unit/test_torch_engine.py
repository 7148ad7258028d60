"""The embedded engine on a real tiny checkpoint: what is sampled, how answers end, cancel, swap, close."""

from __future__ import annotations

import json
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

from rl_core.config import TinyModel
from rl_core.errors import DeadPart, WeightsDamaged
from rl_core.rollout.decoder import FunctionalModel
from rl_core.rollout.engine import Engine
from rl_core.rollout.models import RecomputeModel
from rl_core.rollout.rows import StopStrings, version_runs
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.tiny_model import make_tiny_model
from rl_core.tokenizer import IM_END, VOCABULARY, character_tokenizer
from rl_core.types import Completion, GenerateRequest, Sampling, WeightVersion
from rl_core.weights import digest_tensors, write_weights
from tests.learning import FAMILIES, write_model

EOS = VOCABULARY.index(IM_END)
DEADLINE_S = 60


def make_model(directory: Path, spread: float = 1.0) -> Path:
    """Random weights; `spread` times the usual makes answers that differ much from token to token."""
    make_tiny_model(directory, TinyModel(warmup_steps=0), 1, (), DEADLINE_S, lambda done, total: None)
    named = load_file(directory / "model.safetensors")
    write_weights(directory / "scaled", {name: tensor * (spread if tensor.dim() > 1 else 1)
                                         for name, tensor in named.items()})
    shutil.move(directory / "scaled" / "model.safetensors", directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), spread=5.0)


@pytest.fixture(scope="module")
def endless(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without an end token: answers are as long as asked for."""
    directory = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model_dir, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": []}')
    return directory


@pytest.fixture
def engines() -> Iterator[list[TorchEngine]]:
    """Engines to close at the end of the test."""
    opened: list[TorchEngine] = []
    yield opened
    for engine in opened:
        engine.close()


def request(i: int, prompt: list[int] | None = None, seed: int | None = None, **sampling: Any) -> GenerateRequest:
    ids = np.random.default_rng(i).integers(6, 58, size=5 + i % 20) if prompt is None else np.array(prompt)
    return GenerateRequest(request_id=f"r{i}", token_ids_P=ids.astype(np.int32), seed=i if seed is None else seed,
                           sampling=Sampling(**{"max_new_tokens": 24, **sampling}))


def answers(engine: TorchEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return [future.result(DEADLINE_S) for future in [engine.submit(one) for one in requests]]


def reference_logprobs(directory: Path, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Full log-softmax at each answer position [L, V], by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1:-1]
    return logits.float().log_softmax(-1).numpy()


# -- what is sampled


def test_logprobs_are_those_of_transformers_over_the_same_tokens(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=8))
    requests = [request(i) for i in range(20)]
    for one, answer in zip(requests, answers(engine, requests), strict=True):
        table = reference_logprobs(model_dir, one.token_ids_P, answer.token_ids_L)
        expected = table[np.arange(len(table)), answer.token_ids_L]
        np.testing.assert_allclose(answer.logprobs_L, expected, atol=3e-5)
        assert (answer.token_ids_L.dtype, answer.logprobs_L.dtype) == (np.int32, np.float32)


ANY_ARCHITECTURE: dict[str, Any] = {
    **dict.fromkeys(FAMILIES),
    "gpt2": GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": GPTNeoXConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                              num_attention_heads=4, max_position_embeddings=256),
}
"""The last ones, and sliding windows, go the slow way: a plain forward over the whole context for every token."""


@pytest.mark.parametrize("family", ANY_ARCHITECTURE)
def test_logprobs_of_any_architecture_are_those_of_its_plain_forward(family: str, tmp_path: Path,
                                                                     engines: list[TorchEngine]) -> None:
    if ANY_ARCHITECTURE[family] is None:
        write_model(tmp_path, family)
    else:
        AutoModelForCausalLM.from_config(ANY_ARCHITECTURE[family]).save_pretrained(tmp_path)
    engines.append(engine := TorchEngine(tmp_path, slots=4))
    requests = [request(i, max_new_tokens=4 + 5 * i) for i in range(6)]
    for one, answer in zip(requests, answers(engine, requests), strict=True):
        table = reference_logprobs(tmp_path, one.token_ids_P, answer.token_ids_L)
        np.testing.assert_allclose(answer.logprobs_L, table[np.arange(len(table)), answer.token_ids_L], atol=1e-5)
    fast = family in ("qwen3", "llama", "qwen2")
    assert isinstance(engine._model, FunctionalModel if fast else RecomputeModel)


def test_the_slow_way_reads_the_whole_context_for_every_token(tmp_path: Path, engines: list[TorchEngine]) -> None:
    AutoModelForCausalLM.from_config(ANY_ARCHITECTURE["gpt2"]).save_pretrained(tmp_path)
    engines.append(engine := TorchEngine(tmp_path, slots=4))
    model, read = engine._model, []
    assert isinstance(model, RecomputeModel)
    model._model.register_forward_pre_hook(lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]),
                                           with_kwargs=True)
    answer = answers(engine, [request(0, [9] * 10, stop_token_ids=(), max_new_tokens=20)])[0]
    assert read == list(range(10, 10 + len(answer.token_ids_L)))


def test_greedy_answers_are_those_of_generate(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=3))
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    requests = [request(i, temperature=0.0, max_new_tokens=12) for i in range(8)]
    for one, answer in zip(requests, answers(engine, requests), strict=True):
        ids = torch.from_numpy(one.token_ids_P.astype(np.int64))[None]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert answer.token_ids_L.tolist() == expected[0, ids.shape[1]:].tolist()


def test_an_answer_depends_on_its_own_request_alone(endless: Path, engines: list[TorchEngine]) -> None:
    """Same bits alone in one slot, and among others of other lengths and settings, submitted in another order."""
    mixed = [request(i, max_new_tokens=1 + (i * 37) % 90, temperature=(0.7, 1.0, 0.0)[i % 3],
                     top_k=(0, 10)[i % 2], top_p=(1.0, 0.8)[i % 2]) for i in range(40)]
    engines.append(crowd := TorchEngine(endless, slots=16))
    engines.append(single := TorchEngine(endless, slots=1))
    together = dict(zip(range(39, -1, -1), answers(crowd, mixed[::-1]), strict=True))
    for i in (0, 1, 2, 3, 17, 38):
        alone = answers(single, [mixed[i]])[0]
        assert np.array_equal(alone.token_ids_L, together[i].token_ids_L), i
        assert np.array_equal(alone.logprobs_L, together[i].logprobs_L), i


def test_a_resumed_answer_goes_on_as_if_it_had_not_stopped(endless: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=4))
    whole = answers(engine, [request(3)])[0]
    prompt = [*request(3).token_ids_P.tolist(), *whole.token_ids_L[:10].tolist()]
    rest = answers(engine, [request(100, prompt, seed=3, max_new_tokens=14)])[0]
    assert rest.token_ids_L.tolist() == whole.token_ids_L[10:].tolist()


def test_answers_to_one_prompt_differ_by_seed(endless: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=8))
    group = answers(engine, [request(i, [7, 8, 9], seed=i) for i in range(8)])
    assert len({answer.token_ids_L.tobytes() for answer in group}) == 8


# -- how answers end


def test_the_sampled_end_token_is_part_of_the_answer(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=32))
    ended = answers(engine, [request(i, max_new_tokens=300) for i in range(40)])
    assert {answer.finish_reason for answer in ended} == {"stop"}
    for answer in ended:
        assert answer.token_ids_L[-1] == EOS and EOS not in answer.token_ids_L[:-1]
        assert len(answer.logprobs_L) == len(answer.token_ids_L) == answer.version_runs.end_R[-1]


def test_every_end_token_of_the_generation_config_ends(endless: Path, tmp_path: Path,
                                                       engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=1))
    whole = answers(engine, [request(5)])[0].token_ids_L.tolist()
    directory = tmp_path / "two-ends"
    shutil.copytree(endless, directory)
    two = list(dict.fromkeys(whole))[4:6]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": two}))
    engines.append(ending := TorchEngine(directory, slots=1))
    answer = answers(ending, [request(5)])[0]
    first = min(whole.index(token) for token in two)
    assert (answer.token_ids_L.tolist(), answer.finish_reason) == (whole[:first + 1], "stop")


LIMITS = {"max_new_tokens": (20, 7, 7), "context": (20, 500, 12), "one token of room": (31, 500, 1)}


@pytest.mark.parametrize("case", LIMITS)
def test_an_answer_at_the_limit_is_cut_and_says_so(case: str, endless: Path, engines: list[TorchEngine]) -> None:
    prompt, asked, expected = LIMITS[case]
    engines.append(engine := TorchEngine(endless, slots=1, max_context=32))
    answer = answers(engine, [request(0, [9] * prompt, max_new_tokens=asked)])[0]
    assert (len(answer.token_ids_L), answer.finish_reason) == (expected, "length")


def test_stop_tokens_and_strings_belong_to_one_request(endless: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=8))
    whole = answers(engine, [request(5)])[0].token_ids_L.tolist()
    words = character_tokenizer()
    text = words.decode(whole[8:11], skip_special_tokens=False)
    by_token, by_string, free = answers(engine, [
        request(5, stop_token_ids=(whole[6],)),
        replace(request(5, stop=("never said", text)), request_id="strings"),
        replace(request(5), request_id="free")])
    assert (by_token.token_ids_L.tolist(), by_token.finish_reason) == (whole[:whole.index(whole[6]) + 1], "stop")
    assert words.decode(by_string.token_ids_L.tolist(), skip_special_tokens=False).endswith(text)
    assert (by_string.finish_reason, by_string.stop_text, len(by_string.token_ids_L)) == ("stop", text, 11)
    assert (free.token_ids_L.tolist(), free.finish_reason, free.stop_text) == (whole, "length", None)


def test_stop_strings_are_found_across_tokens_and_half_characters() -> None:
    pieces = [b"an", b"s", b"wer \xe2", b"\x82", b"\xac</", b"done", b">"]
    found = StopStrings(["</done>", "\u20ac<"], lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    assert [found.push(i) for i in range(5)] == [None, None, None, None, "\u20ac<"]
    late = StopStrings(["</done>"], lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    assert [late.push(i) for i in range(7)] == [None] * 6 + ["</done>"]


# -- cancel, bad requests, close


def wait_until_running(engine: TorchEngine, futures: list[Future[Completion]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while engine._rows.n < len(futures) and time.monotonic() < deadline:
        time.sleep(0.001)


def test_cancel_returns_the_tokens_so_far_and_touches_nothing_else(endless: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=3))
    whole = answers(engine, [request(i, max_new_tokens=900) for i in range(3)])
    futures = [engine.submit(request(i, max_new_tokens=900)) for i in range(3)]
    waiting = engine.submit(request(50))
    wait_until_running(engine, futures)
    engine.cancel("r0")
    engine.cancel("r50")
    engine.cancel("unknown")
    part = futures[0].result(DEADLINE_S)
    assert part.finish_reason == "cancelled" and 0 < len(part.token_ids_L) < 900
    assert part.token_ids_L.tolist() == whole[0].token_ids_L[:len(part.token_ids_L)].tolist()
    empty = waiting.result(DEADLINE_S)
    assert (empty.finish_reason, len(empty.token_ids_L), len(empty.version_runs.end_R)) == ("cancelled", 0, 0)
    for i in (1, 2):
        assert np.array_equal(futures[i].result(DEADLINE_S).token_ids_L, whole[i].token_ids_L)
    assert engine.running == 0


BAD = {
    "no token": (request(0, []), "the prompt has no token"),
    "fills the context": (request(0, [9] * 64), "64 tokens leaves no room in a context of 64"),
    "id above": (request(0, [9, 58]), "token id 58 is outside the vocabulary of 58"),
    "id below": (request(0, [-1, 9]), "token id -1 is outside"),
    "temperature": (request(0, temperature=-0.5), r"sampling.temperature cannot be -0.5"),
    "not a number": (request(0, temperature=float("nan")), "sampling.temperature cannot be nan"),
    "top_p": (request(0, top_p=0.0), "sampling.top_p cannot be 0.0"),
    "top_k": (request(0, top_k=-1), "sampling.top_k cannot be -1"),
    "min_p": (request(0, min_p=1.5), "sampling.min_p cannot be 1.5"),
    "max_new_tokens": (request(0, max_new_tokens=0), "sampling.max_new_tokens cannot be 0"),
    "empty stop string": (request(0, stop=("",)), "sampling.stop cannot be"),
}


def test_bad_requests_fail_alone(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=2, max_context=64))
    good = engine.submit(request(1))
    for bad, message in BAD.values():
        with pytest.raises(ValueError, match=f"request 'r0': .*{message}"):
            engine.submit(bad).result(DEADLINE_S)
    assert len(good.result(DEADLINE_S).token_ids_L) > 0


def test_one_name_runs_once(endless: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=2))
    first = engine.submit(request(1, max_new_tokens=500))
    with pytest.raises(ValueError, match="'r1' is running already"):
        engine.submit(request(1)).result(DEADLINE_S)
    first.result(DEADLINE_S)
    assert len(answers(engine, [request(1)])[0].token_ids_L) == 24


def test_close_returns_what_there_is_and_later_requests_are_refused(endless: Path) -> None:
    engine = TorchEngine(endless, slots=2)
    futures = [engine.submit(request(i, max_new_tokens=1900)) for i in range(3)]
    wait_until_running(engine, futures[:2])
    engine.close()
    engine.close()
    assert [future.result(0).finish_reason for future in futures] == ["cancelled"] * 3
    assert len(futures[0].result(0).token_ids_L) > 0 == len(futures[2].result(0).token_ids_L)
    with pytest.raises(DeadPart, match="torch engine: closed"):
        engine.submit(request(9)).result(0)


# -- weights


def publish(directory: Path, v: int, tensors: dict[str, torch.Tensor]) -> WeightVersion:
    write_weights(directory, tensors)
    return WeightVersion(v=v, step=v, idx=v, attempt=1, digest=digest_tensors(tensors.items()))


def test_a_swap_keeps_running_answers_and_marks_every_token(endless: Path, tmp_path: Path,
                                                            engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(endless, slots=4))
    named = load_file(endless / "model.safetensors")
    # Only the last norm changes: the kept key/value cache then equals a fresh one, so the sums can be checked.
    other = {**named, "model.norm.weight": named["model.norm.weight"] * torch.linspace(0.2, 2, 128)}
    assert engine.served is None
    first, second = publish(tmp_path / "w0", 0, named), publish(tmp_path / "w1", 1, other)
    assert engine.swap(first, tmp_path / "w0") == first.digest == engine.swap(first, tmp_path / "w0")
    futures = [engine.submit(request(i, max_new_tokens=1500)) for i in range(2)]
    wait_until_running(engine, futures)
    assert engine.swap(second, tmp_path / "w1") == second.digest
    assert engine.served == second
    for i, future in enumerate(futures):
        answer = future.result(DEADLINE_S)
        runs = answer.version_runs
        assert runs.version_R.tolist() == [0, 1] and runs.end_R[-1] == 1500 == len(answer.token_ids_L)
        cut = int(runs.end_R[0])
        assert 0 < cut < 1500
        stop = min(cut + 40, 1500)
        shutil.copytree(endless, tmp_path / f"new-{i}")
        shutil.copy(tmp_path / "w1" / "model.safetensors", tmp_path / f"new-{i}" / "model.safetensors")
        ids, prompt = answer.token_ids_L[:stop], request(i).token_ids_P
        before, after = (reference_logprobs(path, prompt, ids)[np.arange(stop), ids] for path in (endless,
                                                                                                 tmp_path / f"new-{i}"))
        np.testing.assert_allclose(answer.logprobs_L[:cut], before[:cut], atol=2e-4)
        np.testing.assert_allclose(answer.logprobs_L[cut:stop], after[cut:], atol=2e-4)
        assert np.abs(before - after)[cut:].max() > 0.05


def test_tokens_before_the_first_swap_have_no_version(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=1))
    assert answers(engine, [request(0)])[0].version_runs.version_R.tolist() == [-1]


@pytest.mark.parametrize("damage", ["other bytes", "absent", "other shape"])
def test_damaged_weights_are_refused_and_the_old_ones_stay(damage: str, model_dir: Path, tmp_path: Path,
                                                           engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=1))
    named = load_file(model_dir / "model.safetensors")
    good = publish(tmp_path / "good", 0, named)
    engine.swap(good, tmp_path / "good")
    before = answers(engine, [request(0)])[0]
    norm = torch.full((64 if "shape" in damage else 128,), 1.5)
    bad = publish(tmp_path / "bad", 1, {**named, "model.norm.weight": norm})
    if damage == "other bytes":
        bad = replace(bad, digest=good.digest)
    elif damage == "absent":
        shutil.rmtree(tmp_path / "bad")
    with pytest.raises(WeightsDamaged):
        engine.swap(bad, tmp_path / "bad")
    assert engine.served == good
    assert np.array_equal(answers(engine, [request(0)])[0].logprobs_L, before.logprobs_L)


def test_an_engine_that_dies_tells_everybody_who_waits(endless: Path, tmp_path: Path) -> None:
    engine = TorchEngine(endless, slots=1)
    running, waiting = engine.submit(request(0, max_new_tokens=1900)), engine.submit(request(1))
    named = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(
        endless / "model.safetensors").items()}
    wait_until_running(engine, [running])
    engine.swap(publish(tmp_path / "nan", 1, named), tmp_path / "nan")
    for future in (running, waiting, engine.submit(request(2))):
        with pytest.raises(DeadPart, match=r"died of FloatingPointError.*not finite"):
            future.result(DEADLINE_S)
    with pytest.raises(DeadPart):
        engine.swap(WeightVersion(v=2, step=2, idx=2, attempt=1, digest=digest_tensors(load_file(
            tmp_path / "nan" / "model.safetensors").items())), tmp_path / "nan")
    engine.close()


def test_a_swap_that_cannot_be_installed_is_told_at_once(endless: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing else in flight that would tell."""
    engine = TorchEngine(endless, slots=1)

    def lost(prepared: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine._model, "install", lost)
    version = publish(tmp_path / "next", 1, load_file(endless / "model.safetensors"))
    told = queue.SimpleQueue[Exception]()

    def swap() -> None:
        try:
            engine.swap(version, tmp_path / "next")
        except DeadPart as error:
            told.put(error)

    threading.Thread(target=swap, daemon=True).start()
    assert re.search(r"died of RuntimeError.*the device is lost", str(told.get(timeout=DEADLINE_S)))
    engine.close()


def test_version_runs_are_run_lengths() -> None:
    runs = version_runs(np.array([3, 3, 4, 4, 4, 3], np.int32))
    assert (runs.end_R.tolist(), runs.version_R.tolist()) == ([2, 5, 6], [3, 4, 3])
    assert (runs.end_R.dtype, runs.version_R.dtype) == (np.int32, np.int32)


def test_the_engine_keeps_the_protocol(model_dir: Path, engines: list[TorchEngine]) -> None:
    engines.append(engine := TorchEngine(model_dir, slots=1))
    as_protocol: Engine = engine
    assert all(hasattr(as_protocol, name) for name in ("served", "running", "submit", "cancel", "swap", "close"))


def test_short_answers_are_cheap(model_dir: Path, engines: list[TorchEngine]) -> None:
    """128 answers of at most 8 tokens took 0.024 CPU-s on one core; a hundred single passes would take far longer."""
    engines.append(engine := TorchEngine(model_dir, slots=128, max_context=64))
    requests = [GenerateRequest(request_id=f"{i}-{j}", token_ids_P=request(i).token_ids_P, seed=100 * i + j,
                                sampling=Sampling(max_new_tokens=8)) for i in range(16) for j in range(8)]
    spent: list[float] = []
    for _ in range(5):
        begin = time.process_time()
        answers(engine, requests)
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.2
