"""The trajectory viewer: how large a page is, how long it takes to make, and how soon a Chromium shows it.

A step of 500 groups of 8 answers, of some 420 tokens each, over a vocabulary of 32,768 byte-level words: tokens are
drawn as often as words of a language are (Zipf), each on its own, so that they deflate worse than sentences. Log-probs
are as those of a trained model: most near 0, some far. All of it is in the page.

`first paint` is the browser's own; `answers shown` is when the first answers stand on the screen with their colours,
measured from the navigation. Of a page that was opened once before: the browser itself is warm, the file is not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.config import Config
from rl_core.experience.ledger import put_claim
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import RunDir
from rl_core.run_identity import open_identity
from rl_core.types import Score, ShardRef, TrajectoryGroup, WeightVersion
from rl_core.versions import put_version

GROUPS, ANSWERS = 500, 8
VOCABULARY = 32_768
LANDED_AT_ONCE = 32
ROUNDS = 3
WORDS = 30_000
"""Different tokens that occur."""


def figures() -> Iterator[dict[str, Any]]:
    from rl_core.pages.answers import step_page
    from tests.benchmarks.measure import figure, timed

    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        directory = Path(name)
        many = viewed_run(directory / "many", GROUPS)
        few = viewed_run(directory / "few", 125)
        pages = {"500_groups": directory / "many.html", "1000_answers": directory / "few.html"}
        seconds = min(timed(lambda: pages["500_groups"].write_text(step_page(many, 0), encoding="utf-8"))
                      for _ in range(ROUNDS))
        pages["1000_answers"].write_text(step_page(few, 0), encoding="utf-8")
        size = pages["500_groups"].stat().st_size / 1e6
        yield figure("viewer/500_groups/file", size, "MB", "<= 15", groups=GROUPS, answers=GROUPS * ANSWERS,
                     tokens=int(lengths(GROUPS).sum()))
        yield figure("viewer/500_groups/build", seconds, "s", "<= 5")
        for name, shown in pages.items():
            bar = "<= 1.5" if name == "500_groups" else "<= 1"
            found = opened(shown)
            if found is None:
                yield figure(f"viewer/{name}/first_paint", None, "s", bar, reason="no Chromium that can be driven")
                continue
            paint, answers = found
            yield figure(f"viewer/{name}/first_paint", paint, "s", bar)
            yield figure(f"viewer/{name}/answers_shown", answers, "s", bar)


def opened(path: Path) -> tuple[float, float] | None:
    """Seconds to first paint, and until answers are on the screen, the median of a few openings; None without a
    browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    from tests.browser import PROGRAMS

    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        return None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, headless=True,
                                         args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            seen = [_opened_once(browser, path) for _ in range(ROUNDS + 1)][1:]
        finally:
            browser.close()
    return float(np.median([paint for paint, _ in seen])), float(np.median([answers for _, answers in seen]))


def _opened_once(browser: Any, path: Path) -> tuple[float, float]:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        answers = page.evaluate("performance.getEntriesByName('answers shown')[0].startTime")
        return paint / 1000, answers / 1000
    finally:
        page.close()


# -- what is shown


def viewed_run(path: Path, groups: int) -> RunDir:
    """A run directory whose step 0 has consumed so many groups of 8."""
    from tests.builders import make_claim

    run = RunDir(path)
    open_identity(run, path.name, "tiny-cpu", Config())
    for v in range(3):
        put_version(run, WeightVersion(v=v, step=v, idx=v, attempt=1, digest=f"w{v}"))
    write_tokenizer(run.model)
    writer, made = ShardWriter(run, "rollout-0", 1, {}, False), spoken_groups(groups)
    landed = [writer.land(made[lo:lo + LANDED_AT_ONCE]) for lo in range(0, groups, LANDED_AT_ONCE)]
    claim = make_claim(run, [ShardRef(stream=shard.stream, seq=shard.seq) for shard in landed])
    put_claim(run, claim, fsync=False)
    return run


def lengths(groups: int) -> Any:
    """Tokens of each answer, `[groups, 8]`: lognormal, 420 on the average, 16 to 2048."""
    draws = np.random.default_rng([groups, 1])
    return np.clip(draws.lognormal(5.8, 0.7, (groups, ANSWERS)), 16, 2048).astype(int)


def spoken_groups(groups: int) -> list[TrajectoryGroup]:
    """Groups of random words, with log-probs, two reward parts and one to three weight versions."""
    from tests.builders import make_group

    draws, sizes = np.random.default_rng([groups, 2]), lengths(groups)
    chances = 1.0 / np.arange(1, WORDS + 1)
    chances /= chances.sum()
    made: list[TrajectoryGroup] = []
    for i in range(groups):
        group = make_group(i, n=ANSWERS, versions=((2,), (1, 2), (0, 1, 2))[i % 3], lengths=sizes[i].tolist())
        answers = []
        for trajectory in group.trajectories:
            count, right = len(trajectory.token_ids_L), float(draws.random() < 0.4)
            ids = draws.choice(WORDS, count, p=chances).astype(np.int32)
            logprobs = -draws.exponential(0.05 + 2.0 * (draws.random(count) < 0.2), count).astype(np.float32)
            score = Score(reward=right + 0.1, parts={"correct": right, "format": 0.1}, correct=right,
                          extracted=str(int(draws.integers(1000))))
            answers.append(replace(trajectory, token_ids_L=ids, behavior_logprobs_L=logprobs, score=score))
        prompt = replace(group.lease.prompt, token_ids_P=draws.choice(WORDS, 80, p=chances).astype(np.int32))
        made.append(replace(group, trajectories=tuple(answers), lease=replace(group.lease, prompt=prompt)))
    return made


def write_tokenizer(directory: Path) -> None:
    """Byte-level words of two to nine letters, each with its space."""
    from tokenizers import Tokenizer, decoders, models

    draws, words = np.random.default_rng(3), {f"\u0120{chr(97 + i)}": i for i in range(26)}
    while len(words) < VOCABULARY:
        letters = draws.integers(97, 123, draws.integers(2, 10))
        words.setdefault("\u0120" + "".join(map(chr, letters)), len(words))
    directory.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u0120a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
