"""Models by their name on the hub, against a small hub of our own on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows import command
from rl_core.config import Config, LocalModel, TinyModel
from rl_core.errors import ConfigError
from rl_core.hub import ASKED_OFFLINE, OFFLINE, HubId, hub_id
from rl_core.model_setup import model_digests, set_up_model
from rl_core.preflight import inspect_inputs

COMMIT = "c" * 40


class Hub:
    """Serves the files of one directory as `lab/tiny` at one commit, and remembers which were asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.asked.append(path)
                name = path.removeprefix(f"/lab/tiny/resolve/{COMMIT}/")
                if path in ("/api/models/lab/tiny/revision/main", "/api/models/lab/tiny"):
                    self.answer(json.dumps({"id": "lab/tiny", "sha": COMMIT, "siblings": [
                        {"rfilename": name} for name in hub.files]}).encode())
                elif path == f"/api/models/lab/tiny/tree/{COMMIT}":
                    self.answer(json.dumps([{"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                                            for name, data in hub.files.items()]).encode())
                elif name in hub.files:
                    self.answer(hub.files[name], {"ETag": f'"{_oid(hub.files[name])}"', "X-Repo-Commit": COMMIT})
                else:
                    self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

            def answer(self, data: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
                self.send_response(code)
                for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Not on stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return set_up_model(Config(model=TinyModel(warmup_steps=0)), tmp_path_factory.mktemp("models"))


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny model beside files that are not wanted; this process is offline, as the commands make it."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "headway-model.json"}
    served = Hub({**files, "modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x"})
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(OFFLINE, "1")
    monkeypatch.setenv(ASKED_OFFLINE, "")
    yield served
    served.server.shutdown()
    served.server.server_close()


def configured(path: str) -> Config:
    return Config(model=LocalModel(path=path))


def test_a_model_of_the_hub_is_downloaded_without_code_and_found_again_offline(
        hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = set_up_model(configured("hf:lab/tiny"), tmp_path)
    assert directory.is_relative_to(tmp_path / "hub")
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        path.name for path in model.iterdir() if path.name != "headway-model.json")
    assert model_digests(directory) == model_digests(model)
    monkeypatch.setenv(ASKED_OFFLINE, "1")  # the person's own word
    hub.asked.clear()
    assert set_up_model(configured("hf:lab/tiny"), tmp_path) == directory
    assert hub.asked == []


def test_a_name_that_the_hub_does_not_know_is_refused_by_the_field(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: 'hf:lab/none@v1' is not in the cache and could not be "
                                          r"downloaded \(RepositoryNotFoundError: .*\); check name.* its directory"):
        set_up_model(configured("hf:lab/none@v1"), tmp_path)


def test_offline_by_the_persons_word_nothing_is_asked_for(
        hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED_OFFLINE, "1")
    with pytest.raises(ConfigError, match=r"model.path: 'hf:lab/tiny' is not in the cache .*LocalEntryNotFoundError"):
        set_up_model(configured("hf:lab/tiny"), tmp_path)
    assert hub.asked == []


def test_a_run_that_has_begun_asks_the_hub_no_more(hub: Hub, model: Path) -> None:
    facts = inspect_inputs(configured("hf:lab/tiny"), placed=model).facts
    assert (facts.vocabulary, facts.model_bytes) == (58, 4 * 401408)
    assert hub.asked == []


NAMES = {
    "hf:lab/tiny": HubId("lab/tiny", None),
    "hf:lab/tiny-1.5B_x@main": HubId("lab/tiny-1.5B_x", "main"),
    "hf:lab/tiny@refs/pr/1": HubId("lab/tiny", "refs/pr/1"),
    "./lab/tiny": None,
    "lab/tiny": None,
}


@pytest.mark.parametrize(("text", "expected"), NAMES.items(), ids=NAMES)
def test_names_of_the_hub(text: str, expected: HubId | None) -> None:
    assert hub_id("model.path", text) == expected


@pytest.mark.parametrize("text", ["hf:", "hf:tiny", "hf:lab/", "hf:lab/tiny@", "hf:lab/../x", "hf:a/b/c", "hf:/a/b"])
def test_what_only_looks_like_one_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"model.path: write hf:owner/name or hf:owner/name@revision \(got 'hf:"):
        hub_id("model.path", text)


def test_the_command_remembers_the_persons_word() -> None:
    """flows/command.py may not import the module that has the name."""
    assert f'"{ASKED_OFFLINE}"' in Path(command.__file__).read_text()
