"""A night that is stopped behind its training, while its weights are exported: Cancelled, told, and finished later."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.nightly.nights import Night, NightRun, put_night, run_keys
from rl_core.run_dir import read_json, replace_file, to_json
from tasks.night_files import has_ended, has_verdict, night_dir
from tasks.paths import run_dir
from tests.looking import small_run
from tests.runs import Home, prefect_server
from tests.unit.test_notifying import webhook

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
KEY, HOOK = "stopped-2026-11-30", "STOPPED_TEST_HOOK"
RERUN = """
import sys, time
from pathlib import Path

import tasks.exporting


def slow(run_key, out, **asked):
    Path(sys.argv[2]).touch()
    time.sleep(120)


tasks.exporting.export_run = slow
from flows.rerun import rerun

state = rerun(run_key=sys.argv[1], return_state=True)
print(state.type.value, state.message)
"""


def test_a_night_that_is_stopped_while_it_is_exported_is_cancelled_told_and_finished_later(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    keys = run_keys(KEY, 2)
    for key in ("monday", *keys):
        run = small_run(run_dir(key).root, key)
        replace_file(run.result, to_json({"status": "completed", "tracked": False, "summary": {"mlflow_run_id": None},
                                          "ended": {"step": 3, "reason": "steps", "left_over": 0}}))
    night = Night(key=KEY, name="stopped", flow_run_id="f", scheduled_us=1, preset="tiny-cpu", baseline="monday",
                  notify=f"env:{HOOK}", runs=tuple(NightRun(run_key=key, overrides={}) for key in keys))
    assert put_night(night_dir(KEY), night)
    home, exporting = Home(tmp_path), tmp_path / "exporting"
    with webhook() as (url, told), prefect_server(home) as env:
        first = rerun(env | {HOOK: url}, exporting)
        until = time.monotonic() + 180
        while not exporting.exists() and first.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert first.poll() is None, first.communicate()
        first.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        out, err = first.communicate(timeout=60)
        print(f"ended {time.monotonic() - begun:.1f} s after the signal")
        why = f"night {KEY}: stopped by SIGTERM at its registration; "
        assert first.returncode == 0 and f"CANCELLED {why}" in out, (out, err)
        assert [(note["night"], note["verdict"]) for note in told] == [(KEY, "stopped")] and why in told[0]["text"]
        assert has_verdict(night) and not has_ended(night)
        parent = read_json(night_dir(KEY).parent)["run_id"]
        assert home.tracked(parent)[0] == "KILLED"

        replace_file(night_dir(KEY).model / "headway.json", to_json({
            "run_key": keys[0], "run_uuid": "u", "step": 3, "weights_digest": "w3", "revision": 0,
            "config_digest": "c", "dtype": "float32", "best": None, "headway": "0"}))  # exported, at last
        again = rerun(env | {HOOK: url}, exporting)
        out, err = again.communicate(timeout=180)
        assert again.returncode == 0 and "COMPLETED" in out, (out, err)
        assert [note["verdict"] for note in told] == ["stopped", "keep"] and has_ended(night)
        assert home.tracked(parent)[0] == "FINISHED"


def rerun(env: dict[str, str], exporting: Path) -> subprocess.Popen[str]:
    """`headway rerun` of the night as a flow run of Prefect's server, whose export makes a file and takes its time."""
    return subprocess.Popen([sys.executable, "-c", RERUN, KEY, str(exporting)], env=env, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
