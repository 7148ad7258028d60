"""The settings that `headway validate` measures with: those of a run or a preset, and what --set asks on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import parse_overrides
from rl_core.run_dir import RunDir
from rl_core.run_identity import open_identity
from rl_core.validation_plan import check_validation
from tasks.measurement import of_model, of_run

GREEDY_ALONE = Config.model_validate({"validation": {"sampled": False}})

ASKED: dict[str, tuple[list[str], bool, int]] = {
    # --set -> sampled, n
    "nothing": ([], False, 1),
    "n": (["validation.n=8"], True, 8),
    "k": (["validation.k=[1]"], True, 1),
    "a temperature": (["validation.temperature=0.7"], True, 1),
    "what greedy answers have, too": (["validation.max_new_tokens=9", "validation.table=0"], False, 1),
    "the n that is there": (["validation.n=1"], False, 1),
    "samples": (["validation.sampled=true"], True, 1),
}


@pytest.mark.parametrize(("sets", "sampled", "n"), ASKED.values(), ids=ASKED)
def test_asking_for_n_answers_asks_for_sampled_ones(sets: list[str], sampled: bool, n: int, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    run = RunDir(tmp_path / "runs" / "k")
    open_identity(run, "k", "local-model-cpu", GREEDY_ALONE)
    run.model.mkdir()
    of_a_run = of_run("k", None, parse_overrides(sets)).config
    of_a_model = of_model(str(run.model), load_preset("local-model-cpu"), parse_overrides(sets)).config
    for config in (of_a_run, of_a_model):
        assert (config.validation.sampled, config.validation.n) == (sampled, n)
        check_validation(config)


def test_greedy_alone_and_n_answers_are_refused_together(tmp_path: Path) -> None:
    changes = parse_overrides(["validation.sampled=false", "validation.n=8"])
    subject = of_model(str(tmp_path), load_preset("tiny-cpu"), changes)
    with pytest.raises(ConfigError, match=r"validation.n: belongs to sampled answers.*\(got 8\)"):
        check_validation(subject.config)
