"""What Headway relies on, asked of a real server of SGLang: every route and field, by name, and the checks at a start.

A new version of SGLang is tested by its pin in deployments/sglang/requirements-cpu.txt and this file.
"""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_core.config import Config
from rl_core.errors import ConfigError, DeadPart, EngineMismatch, EngineStartFailed
from rl_core.export import export
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.agreement import check_agreement, logprob_gaps, sample
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.checks import CHANGES_LOGPROBS, check_server, served_vocabulary
from rl_core.rollout.sglang.server import SglangServer
from rl_core.run_dir import RunDir
from rl_core.run_identity import open_identity
from rl_core.tokenizer import VOCABULARY
from rl_core.types import Sampling
from rl_core.weights import publish, write_weights
from tests.learning import start_attempt
from tests.serving import ROOT, SCRIPT, StartServer, sglang_config, spread_model

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
PIN = re.search(r"^sglang==(\S+)$", (ROOT / "deployments/sglang/requirements-cpu.txt").read_text(), re.MULTILINE)
PROMPT = [5, 9, 60, 7, 12]


@pytest.fixture
def url(sglang_server: SglangServer) -> str:
    assert sglang_server.alive(), sglang_server.log_tail()
    return sglang_server.url


@pytest.fixture
def config() -> Config:
    return sglang_config()


def generate(url: str, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": PROMPT, "return_logprob": True, **fields,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True,
                                **fields.get("sampling_params", {})}}
    answer = ask(url, wire.GENERATE, body, timeout_s=60.0)
    assert answer.status == 200, answer
    return answer.fields


def stream(url: str, body: dict[str, Any]) -> list[bytes]:
    """Payloads of the events of a streamed answer."""
    request = urllib.request.Request(url + wire.GENERATE, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    events = wire.Events()
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return events.feed(answer.read())


# -- routes and fields


def test_it_is_the_pinned_version_of_sglang(url: str) -> None:
    """So that no stand-in passes for it."""
    assert PIN is not None
    assert ask(url, wire.SERVER_INFO).fields["version"] == PIN[1]
    assert "sglang" in ask(url, wire.SERVER_INFO).fields["launch_command"]


CONTROL: dict[str, tuple[dict[str, Any] | None, list[str]]] = {
    # route: (body of a POST, or None for a GET; paths of fields in the answer)
    wire.MODEL_INFO: (None, ["model_path", "weight_version", "is_generation", "model_type", "architectures",
                             "served_model_name"]),
    wire.SERVER_INFO: (None, ["version", "max_total_num_tokens", "incremental_streaming_output", "tp_size", "dtype",
                              "disable_overlap_schedule", "context_length", *CHANGES_LOGPROBS]),
    wire.LOADS + "?include=core": (None, ["loads.0.num_running_reqs", "loads.0.num_waiting_reqs"]),
    wire.CHECKSUMS: ({"action": "checksum"}, ["success", "ranks.0.checksums"]),
    "/v1/models": (None, ["data.0.id"]),
    "/tokenize": ({"prompt": "sort 31245", "add_special_tokens": False}, ["tokens", "count"]),
    wire.PAUSE: ({"mode": "in_place"}, ["message", "status"]),
    wire.RESUME: ({}, ["message", "status"]),
}


@pytest.mark.parametrize("route", CONTROL)
def test_a_control_route_answers_with_the_fields_that_are_read(route: str, url: str) -> None:
    body, fields = CONTROL[route]
    answer = ask(url, route, body)
    assert answer.status == 200, answer
    missing = []
    for field in fields:
        value: Any = answer.payload
        for part in field.split("."):
            try:
                value = value[int(part)] if part.isdigit() else value[part]
            except (KeyError, IndexError, TypeError):
                missing.append(field)
                break
    assert missing == []


def test_every_route_that_headway_knows_is_asked_here() -> None:
    asked = {route.split("?")[0] for route in CONTROL} | {wire.GENERATE, wire.ABORT, wire.UPDATE_FROM_DISK}
    assert set(wire.ROUTES) <= asked


def test_the_readers_read_what_the_server_says(url: str, sglang_model: Path) -> None:
    assert wire.read_model_info(ask(url, wire.MODEL_INFO).fields).model_path == str(sglang_model)
    info = wire.read_server_info(ask(url, wire.SERVER_INFO).fields)
    assert info.capacity == 16384 and info.incremental and info.tensor_parallel == 1
    assert wire.read_loads(ask(url, wire.LOADS).fields).running == 0
    checksums = wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields)
    assert "model.layers.0.self_attn.qkv_proj.weight" in checksums
    assert all(re.fullmatch("[0-9a-f]{16}", digits) for digits in checksums.values())


def test_an_answer_has_ids_log_probs_and_the_versions_of_its_tokens(url: str) -> None:
    meta = generate(url, 8)["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 8
    assert meta["finish_reason"]["type"] == "length"
    for logprob, token, _ in meta["output_token_logprobs"]:
        assert logprob < 0 and 0 <= token < len(VOCABULARY)
    [span] = meta["weight_versions"]
    assert (span["start"], span["end"], span["version"]) == (0, 8, meta["weight_version"])
    assert {"cached_tokens", "num_retractions", "prompt_tokens"} <= set(meta)


def test_a_stream_sends_each_token_once(url: str) -> None:
    body = wire.generate_body("contract-0", PROMPT, Sampling(max_new_tokens=100), max_new=100, seed=1,
                              end_token_ids=(), stream_interval=10, cache_key="0")
    *payloads, done = stream(url, body)
    assert done == wire.DONE and len(payloads) >= 10
    tokens, last = 0, None
    for payload in payloads:
        last = wire.read_event(payload, tokens, len(VOCABULARY))
        tokens += len(last.token_ids)
    assert last is not None and last.finish is not None and last.finish.kind == "length"
    assert tokens == 100 and last.spans[-1].end == 100
    assert sum(map(len, payloads)) < 400 * 100, "cumulative events would be quadratic"


def test_stop_tokens_and_stop_strings_end_an_answer_and_stay_in_its_ids(url: str) -> None:
    every = list(range(len(VOCABULARY)))
    meta = generate(url, 50, sampling_params={"stop_token_ids": every, "ignore_eos": False})["meta_info"]
    assert meta["finish_reason"]["type"] == "stop" and meta["completion_tokens"] == 1
    assert meta["finish_reason"]["matched"] == meta["output_token_logprobs"][0][1]
    text = generate(url, 400, sampling_params={"stop": ["1", "2", "3"], "no_stop_trim": True, "temperature": 3.0})
    assert text["meta_info"]["finish_reason"]["matched"] in ("1", "2", "3")


def test_answers_to_one_prompt_are_no_copies_of_each_other(url: str) -> None:
    """Whatever seeds are sent: a group of copies would teach nothing."""
    sampling = {"sampling_seed": 7, "temperature": 2.0}
    answers = {tuple(generate(url, 24, sampling_params=sampling)["output_ids"]) for _ in range(4)}
    assert len(answers) == 4


def test_a_request_is_aborted_with_its_tokens_so_far(url: str) -> None:
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(generate(url, 1500, rid="contract-abort")))
    asking.start()
    time.sleep(0.5)
    assert ask(url, wire.ABORT, {"rid": "contract-abort"}).status == 200
    asking.join(30)
    meta = found[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 1500
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"])


@pytest.mark.parametrize(("mode", "version"), [("in_place", 7), ("retract", 8)])
def test_an_answer_goes_on_over_a_swap_and_says_which_version_sampled_what(mode: str, version: int, url: str,
                                                                          sglang_model: Path) -> None:
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(generate(url, 1500)))
    asking.start()
    time.sleep(0.5)
    assert ask(url, wire.PAUSE, {"mode": mode}).status == 200
    body = wire.update_body(str(sglang_model), version, flush_cache=mode != "in_place")
    assert ask(url, wire.UPDATE_FROM_DISK, body).fields.get("success") is True
    assert ask(url, wire.MODEL_INFO).fields["weight_version"] == str(version)
    assert ask(url, wire.RESUME, {}).status == 200
    asking.join(60)
    meta = found[0]["meta_info"]
    assert meta["completion_tokens"] == 1500, "cut by nothing"
    before, after = meta["weight_versions"]
    assert before["start"] == 0 and 0 < before["end"] == after["start"] < after["end"] == 1500
    assert before["version"] != after["version"] == str(version)
    assert meta["num_retractions"] == (mode == "retract")


def test_weights_alone_are_a_directory_that_a_server_takes(url: str, sglang_model: Path, tmp_path: Path) -> None:
    """As a run publishes them: model.safetensors, without config.json and tokenizer. The values are those sent."""
    before = wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields)
    tensors = {name: tensor + (0.01 if name == "model.norm.weight" else 0.0)
               for name, tensor in load_file(sglang_model / "model.safetensors").items()}
    write_weights(tmp_path / "v", tensors)
    assert ask(url, wire.UPDATE_FROM_DISK, wire.update_body(str(tmp_path / "v"), 8, flush_cache=True)).status == 200
    after = wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields)
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
    put_back(url, sglang_model)
    assert wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields) == before


def put_back(url: str, model: Path) -> None:
    answer = ask(url, wire.UPDATE_FROM_DISK, wire.update_body(str(model), 9, flush_cache=True))
    assert answer.fields.get("success") is True, answer


def test_a_refused_update_leaves_weights_and_version(url: str, sglang_model: Path, tmp_path: Path) -> None:
    put_back(url, sglang_model)
    before = wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields)
    answer = ask(url, wire.UPDATE_FROM_DISK, wire.update_body(str(tmp_path / "nowhere"), 10, flush_cache=True))
    assert answer.status == 400 and answer.fields["success"] is False and answer.message
    assert ask(url, wire.MODEL_INFO).fields["weight_version"] == "9"
    assert wire.read_checksums(ask(url, wire.CHECKSUMS, {"action": "checksum"}).fields) == before
    generate(url, 4)


def test_an_answer_fills_the_context_to_its_last_token(url: str) -> None:
    """A server keeps some of its context to itself: it is given as much more."""
    body = {"input_ids": [3] * 2000, "sampling_params": {"max_new_tokens": 48, "ignore_eos": True}}
    assert len(ask(url, wire.GENERATE, body, timeout_s=60.0).fields["output_ids"]) == 48
    body = {"input_ids": [3] * 2047, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
    assert len(ask(url, wire.GENERATE, body, timeout_s=60.0).fields["output_ids"]) == 1


def test_a_prompt_over_the_context_is_refused_and_not_cut(url: str) -> None:
    answer = ask(url, wire.GENERATE, {"input_ids": [3] * 2100, "sampling_params": {"max_new_tokens": 4}})
    assert answer.status == 400 and "context length" in answer.message


# -- the checks at a start


def test_a_server_that_fits_passes_without_a_warning(url: str, sglang_model: Path, config: Config) -> None:
    assert check_server(url, config, sglang_model).warnings == ()
    assert served_vocabulary(url) == len(VOCABULARY)


def edited(model: Path, target: Path, **settings: Any) -> Path:
    shutil.copytree(model, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return target


def other_vocabulary(model: Path, target: Path) -> Path:
    return edited(model, target, vocab_size=len(VOCABULARY) + 64)


def other_architecture(model: Path, target: Path) -> Path:
    return edited(model, target, model_type="llama", architectures=["LlamaForCausalLM"])


def other_tokenizer(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    path = target / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokens))
    return target


UNFIT: dict[str, tuple[Callable[[Path, Path], Path] | None, dict[str, Any], str]] = {
    "another vocabulary": (other_vocabulary, {}, r"serves another model: a vocabulary of \d+, and that of the run has"),
    "another architecture": (other_architecture, {}, r"serves another model: model_type 'qwen3'.* has 'llama'"),
    "another tokenizer": (other_tokenizer, {}, r"has another tokenizer: a text that is \d+ tokens here"),
    "another dtype": (None, {"dtype": "bfloat16"}, r"computes in float32, and rollout.engine.dtype is bfloat16"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_server_that_does_not_fit_is_refused_by_name(case: str, url: str, sglang_model: Path,
                                                       tmp_path: Path) -> None:
    make, settings, said = UNFIT[case]
    model = sglang_model if make is None else make(sglang_model, tmp_path / "model")
    with pytest.raises(ConfigError, match=f"^server {re.escape(url)} {said}"):
        check_server(url, sglang_config(**settings), model)


def test_a_context_that_is_too_short_is_refused(url: str, sglang_model: Path, config: Config) -> None:
    sampling = config.sampling.model_copy(update={"max_new_tokens": 1501})
    with pytest.raises(ConfigError, match=r"takes 2056 tokens, .*are 2049; start it with --context-length 2057"):
        check_server(url, config.model_copy(update={"sampling": sampling}), sglang_model)


def test_another_version_is_refused_or_warned_of(url: str, sglang_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.rollout.sglang.checks.TESTED", ((0, 6, 0), (0, 7, 0)))
    with pytest.raises(ConfigError, match=r"^rollout.engine.untested_version: server .* is SGLang 0\.5\.\d+; tested "
                                          r"are 0.6.0 or newer, below 0.7.0"):
        check_server(url, sglang_config(), sglang_model)
    [warning] = check_server(url, sglang_config(untested_version="warn"), sglang_model).warnings
    assert "routes and fields may differ" in warning


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def no_sglang() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_no_server_of_sglang_is_told_apart_from_none_at_all(no_sglang: str, sglang_model: Path,
                                                                    config: Config) -> None:
    with pytest.raises(ConfigError, match=r"is no server of SGLang: /server_info answers with status 404"):
        check_server(no_sglang, config, sglang_model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(DeadPart, match=f"^server {nobody}: nothing answers at /server_info"):
        check_server(nobody, config, sglang_model)


def test_log_probs_are_those_of_the_learner_at_every_temperature(url: str, sglang_model: Path, config: Config) -> None:
    put_back(url, sglang_model)
    assert set(check_agreement(url, config, sglang_model)) == {0.7, 1.0}
    samples = {temperature: sample(url, temperature, len(VOCABULARY), 100) for temperature in (0.5, 0.7, 1.0, 1.5)}
    for temperature, gap in logprob_gaps(sglang_model, samples).items():
        assert gap < 1e-4, f"temperature {temperature}: {gap}"
    assert min(min(one.logprobs) for one in samples[1.0]) < -3.0, "spread enough to tell tokens apart"


def test_other_weights_than_the_model_s_are_seen_in_the_log_probs(url: str, sglang_model: Path, config: Config,
                                                                 tmp_path: Path) -> None:
    other = spread_model(tmp_path / "other", seed=2)
    put_back(url, other)
    try:
        with pytest.raises(EngineMismatch, match=f"log-probs at temperature 0.7 are .* nats off .*{sglang_model}"):
            check_agreement(url, config, sglang_model)
    finally:
        put_back(url, sglang_model)


# -- servers that these tests end


ORIGINAL = """import os, runpy
os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


def test_log_probs_of_another_distribution_are_seen_and_a_bad_id_ends_the_server(
        start_sglang: StartServer, sglang_model: Path, tmp_path: Path) -> None:
    """At temperature 1 the two are the same: it is seen at 0.7."""
    script = tmp_path / "serve.py"
    script.write_text(ORIGINAL.format(script=str(SCRIPT)))
    server = start_sglang(sglang_model, script=str(script))
    with pytest.raises(EngineMismatch, match=r"log-probs at temperature 0.7 .*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        check_agreement(server.url, sglang_config(), sglang_model)
    begun = time.monotonic()
    answer = ask(server.url, wire.GENERATE, {"input_ids": [10**6], "sampling_params": {"max_new_tokens": 4}})
    assert answer.status != 200, "why ids are checked before they are sent"
    while server.alive():
        assert time.monotonic() - begun < 10
        time.sleep(0.05)
    assert "IndexError" in server.log_tail(200) or "index" in server.log_tail(200)
    first = server.url
    assert server.start() != first, "and it serves again, elsewhere"
    generate(server.url, 4)


def test_an_export_is_served_with_the_learner_s_log_probs(start_sglang: StartServer, sglang_model: Path,
                                                          tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "k")
    shutil.copytree(sglang_model, run.model)
    config = sglang_config()
    open_identity(run, "k", "tiny-sglang-cpu", config)
    start_attempt(run)
    generator = torch.Generator().manual_seed(3)
    trained = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
               for name, tensor in load_file(run.model / "model.safetensors").items()}
    publish(run, trained, 1, 1, 1, config)
    export(run, tmp_path / "out")
    server = start_sglang(tmp_path / "out")
    assert check_server(server.url, config, tmp_path / "out").warnings == ()
    for temperature, gap in check_agreement(server.url, config, tmp_path / "out").items():
        assert gap < 1e-4, f"temperature {temperature}: {gap}"
    with pytest.raises(EngineMismatch):
        check_agreement(server.url, config, sglang_model)
    begun = time.monotonic()
    server.stop()
    assert time.monotonic() - begun < 12 and not server.alive()


def test_a_directory_that_holds_no_model_is_named_with_the_tail_of_the_log(start_sglang: StartServer,
                                                                           tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"ended before it served[\s\S]*config.json"):
        start_sglang(tmp_path)
