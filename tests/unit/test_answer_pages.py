"""The trajectory viewer's file: what it holds of a step and of a validation is what is recorded, and no more."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rl_core.experience.ledger import put_claim, read_claim
from rl_core.experience.shards import ShardWriter
from rl_core.learner.token_states import StepLogprobs
from rl_core.pages.answers import step_page, validation_page
from rl_core.pages.columns import AnswerColumns, Group, as_json, fitted, no_answers, thousandths, unpacked
from rl_core.pages.token_texts import TokenTexts, token_texts
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import ShardRef
from tests.builders import make_claim
from tests.looking import small_run, spoken_group


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return small_run(tmp_path / "small")


def data_of(page: str) -> dict[str, Any]:
    """The columns of a page, unpacked."""
    raw = json.loads(page.split('id="data">')[1].split("</script>")[0])
    return {part: {name: unpacked(value) if isinstance(value, dict) and "z" in value else value
                   for name, value in values.items()} if isinstance(values, dict) else values
            for part, values in raw.items()}


def texts_of(data: dict[str, Any]) -> list[str]:
    """The text of each answer, from its tokens."""
    ends = np.cumsum(data["answers"]["length"])
    return ["".join(data["texts"][place] for place in piece)
            for piece in np.split(data["tokens"]["place"], ends[:-1].astype(int))]


def test_a_step_has_its_answers_in_training_order_with_all_that_is_recorded(run: RunDir) -> None:
    data = data_of(step_page(run, 2))
    groups, answers, tokens = data["groups"], data["answers"], data["tokens"]
    assert (groups["id"], groups["source"], groups["truth"], groups["age"]) == (
        ["e0-p4-t0", "e0-p5-t0"], ["sort", "chat"], ["4", "5"], [1, 2])
    assert texts_of(data) == ["13", "31", "1", "311"] * 2
    assert answers["group"].tolist() == [0] * 4 + [1] * 4
    assert answers["reward"].tolist() == [1.0, 0.25, 0.0, -0.5] * 2
    assert answers["correct"].tolist() == [1.0, 0.0, 0.0, 0.0] * 2
    assert answers["finish"] == ["stop", "stop", "stop", "length"] * 2
    assert answers["extracted"] == ["13", "31", "1", "311"] * 2
    assert data["parts"]["digits"].tolist() == [1.0, 1.0, 0.5, 1.5] * 2
    assert answers["runs"].tolist() == [2, 2, 1, 2, 1, 1, 1, 1]
    assert data["runs"]["version"].tolist() == [1, 2, 1, 2, 2, 1, 2, 0, 0, 0, 0]
    assert data["runs"]["tokens"].tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 3]
    assert tokens["behavior"].tolist() == [-500] * 16 and tokens["state"].tolist() == [1] * 16
    rewards = np.array([1.0, 0.25, 0.0, -0.5])
    grpo = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(tokens["advantage"], np.tile(np.repeat(grpo, [2, 2, 1, 3]), 2), rtol=1e-6)
    prompt = "".join(data["texts"][place] for place in groups["prompt_ids"][:int(groups["prompt_tokens"][0])])
    assert prompt == "<|im_start|>user\nsort 31<|im_end|>\n<|im_start|>assistant\n"
    assert [data["texts"][place] for place in data["special"]] == ["<|im_start|>", "<|im_end|>"]


def test_what_takes_the_model_is_not_there_and_the_page_says_why(run: RunDir) -> None:
    data = data_of(step_page(run, 2))
    assert {"proximal", "policy"}.isdisjoint(data["tokens"]) and set(data["absent"]) == {"gap", "ratio"}
    assert "log-probs of the learner take its weights" in data["absent"]["gap"]
    assert "it was 1 at every token" in data["absent"]["ratio"], "the step made one update"


def test_log_probs_of_the_learner_are_shown_where_they_were_computed(run: RunDir) -> None:
    learner = StepLogprobs(proximal_T=np.full(16, -0.75, np.float32), policy_T=np.full(16, -0.5, np.float32))
    data = data_of(step_page(run, 2, learner))
    assert data["absent"] == {}
    assert (data["tokens"]["proximal"].tolist(), data["tokens"]["policy"].tolist()) == ([-750] * 16, [-500] * 16)


def test_without_a_part_of_the_claim_the_rest_is_shown_and_no_advantage(run: RunDir) -> None:
    """Of the answers that are left alone it would be another number."""
    landed = [ShardWriter(run, name, 1, {}, False).land([spoken_group(position)])
              for name, position in (("rollout-8", 20), ("rollout-9", 21))]
    claim = make_claim(run, [ShardRef(stream=one.stream, seq=one.seq) for one in landed], step=4)
    put_claim(run, claim, fsync=False)
    gone = run.shard(landed[1].stream, landed[1].seq)
    gone.unlink()
    page = step_page(run, 4)
    data = data_of(page)
    assert data["groups"]["id"] == ["e0-p20-t0"] and len(data["answers"]["reward"]) == 4
    assert "advantage" not in data["tokens"]
    assert data["absent"]["advantage"].startswith("1 of 2 groups of the step cannot be read")
    assert f"{gone}: absent" in page


def test_a_step_of_which_nothing_is_left_has_a_page_that_says_so(run: RunDir) -> None:
    group = read_claim(run, 2).groups[0]
    run.shard(group.stream, group.seq).unlink()
    page = step_page(run, 2)
    assert data_of(page)["groups"]["id"] == [] and "absent" in page.split('id="gaps"')[1][:200]
    with pytest.raises(FileNotFoundError):
        step_page(run, 9)


def validated(run: RunDir, details: bool) -> dict[str, Any]:
    """The page's data of a validation with two prompts of equal text, three answers."""
    rows = [{"data_source": "sort", "prompt": "sort 31", "answer": "13", "mode": mode, "text": text, "reward": reward,
             "correct": reward, "extracted": text, "length": len(text), "finish": "stop"}
            for mode, text, reward in (("greedy", "13", 1.0), ("sampled", "3", None), ("greedy", "31", 0.0))]
    by_token = [{"prompt": prompt, "parts": {"digits": 1.0} if prompt == 4 else {}, "ids": ids,
                 "logprobs": [-0.25] * len(ids)} for prompt, ids in ((4, [9, 11]), (4, [11]), (7, [11, 9]))]
    run.validation_table(2).unlink(missing_ok=True)
    put_if_absent(run.validation_table(2), to_json({"rows": rows} | ({"details": by_token} if details else {})))
    return data_of(validation_page(run, 2))


def test_a_validation_has_the_answers_of_its_table_by_prompt(run: RunDir) -> None:
    data = validated(run, details=True)
    assert data["groups"]["id"] == ["prompt 4", "prompt 7"] and data["groups"]["prompt"] == ["sort 31"] * 2
    assert data["answers"]["group"].tolist() == [0, 0, 1] and texts_of(data) == ["13", "3", "31"]
    assert data["answers"]["mode"] == ["greedy", "sampled", "greedy"]
    assert [None if np.isnan(x) else x for x in data["answers"]["reward"].tolist()] == [1.0, None, 0.0]
    assert [None if np.isnan(x) else x for x in data["parts"]["digits"].tolist()] == [1.0, 1.0, None]
    assert data["tokens"]["behavior"].tolist() == [-250] * 5 and data["runs"]["version"].tolist() == [2, 2, 2]
    assert set(data["absent"]) == {"advantage", "ratio", "gap", "mask"}


def test_a_table_without_tokens_is_shown_as_texts(run: RunDir) -> None:
    data = validated(run, details=False)
    assert data["answers"]["text"] == ["13", "3", "31"] and len(data["tokens"]["place"]) == 0
    assert data["answers"]["group"].tolist() == [0, 0, 0], "the texts of the two prompts are alike"
    assert data["absent"]["logprob"] == "the table of this validation holds texts, not tokens"


def test_a_page_without_a_table_says_so(run: RunDir) -> None:
    page = validation_page(run, 0)
    assert f"{run.validation_table(0)}: absent" in page and data_of(page)["groups"]["id"] == []
    with pytest.raises(FileNotFoundError):
        validation_page(run, 1)


# -- the file


def test_markup_of_a_model_is_text_in_the_file(run: RunDir) -> None:
    hostile = "</script><script>document.title='ran'</script><img src=x onerror=alert(1)>"
    rows = [{"data_source": hostile, "prompt": hostile, "answer": hostile, "mode": "greedy", "text": hostile,
             "reward": 1.0, "correct": None, "extracted": hostile, "length": 3, "finish": "stop"}]
    put_if_absent(run.validation_table(0), to_json({"rows": rows}))
    page = validation_page(run, 0)
    assert data_of(page)["answers"]["text"] == [hostile]
    assert re.findall(r"<script[^>]*>", page) == ['<script type="application/json" id="data">', "<script>"]
    assert "<img" not in page and not re.search(r"\son\w+=", page.split("<body>")[1].split("<script")[0])


def columns_of(groups: int, tokens: int) -> AnswerColumns:
    """So many groups of two answers of so many tokens that do not deflate."""
    draws = np.random.default_rng(1)
    count = 2 * groups
    return replace(
        no_answers(), groups=tuple(Group(group_id=f"g{i}", source="s", truth=None, age=0) for i in range(groups)),
        group_N=np.repeat(np.arange(groups), 2), reward_N=np.arange(count, dtype=np.float32),
        correct_N=np.zeros(count, np.float32), length_N=np.full(count, tokens), finish_N=("stop",) * count,
        extracted_N=(None,) * count, runs_N=np.ones(count, np.int64),
        run_tokens_R=np.full(count, tokens, np.int32), run_version_R=np.arange(count, dtype=np.int32),
        token_ids_T=draws.integers(0, 1000, count * tokens).astype(np.int32),
        state_T=np.ones(count * tokens, np.uint8),
        values={"behavior": -draws.random(count * tokens).astype(np.float32)})


THOUSAND = TokenTexts(ids=tuple(range(1000)), texts=("",) * 1000, pieces={}, special=())


def test_what_does_not_fit_is_left_out_by_whole_groups_evenly() -> None:
    whole = columns_of(40, 500)
    shown, packed = fitted(whole, THOUSAND, max_bytes=75_000)
    assert 10 < len(shown.groups) < 40 and len(json.dumps(packed)) < 90_000
    kept = [int(group.group_id[1:]) for group in shown.groups]
    assert kept == [i * 40 // len(kept) for i in range(len(kept))]
    assert unpacked(packed["answers"]["reward"]).tolist() == [r for g in kept for r in (2 * g, 2 * g + 1)]
    assert unpacked(packed["runs"]["version"]).tolist() == [r for g in kept for r in (2 * g, 2 * g + 1)]
    first = whole.token_ids_T.reshape(40, 1000)[kept].reshape(-1)
    np.testing.assert_array_equal(unpacked(packed["tokens"]["place"]), first)
    assert fitted(whole, THOUSAND)[0] is whole


def test_numbers_are_kept_in_thousandths_and_absent_ones_stay_absent() -> None:
    assert thousandths(np.array([-0.5, np.nan, 0.0, -1e9, -np.inf], np.float32)).tolist() == [
        -500, -32768, 0, -32767, -32767]
    assert as_json(no_answers(), THOUSAND)["tokens"]["state"]["kind"] == "uint8"


def byte_level() -> Tokenizer:
    """Words of byte-level BPE: " a", the two halves of U+20AC, the end of a turn."""
    words = {"\u0120a": 0, "\u00e2\u0124": 1, "\u00ac": 2, "<|end|>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u0120a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Words with SentencePiece's space, and single bytes."""
    words = {"\u2581a": 0, "<0xE2>": 1, "<0x82>": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="b"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.parametrize(("tokenizer", "texts", "pieces", "special"), {
    "byte-level": (byte_level(), (" a", "", "", "<|end|>", "[9]"), {1: "e282", 2: "ac"}, (3,)),
    "SentencePiece": (sentence_piece(), (" a", "", "", "b", "[9]"), {1: "e2", 2: "82"}, ()),
}.values(), ids=lambda value: None)
def test_texts_of_tokens_make_up_the_text_of_the_answer(tmp_path: Path, tokenizer: Tokenizer, texts: tuple[str, ...],
                                                        pieces: dict[int, str], special: tuple[int, ...]) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = token_texts(tmp_path, [np.array([3, 0, 2, 1], np.int32), np.array([9], np.int32)])
    assert (found.ids, found.texts, found.pieces, found.special) == ((0, 1, 2, 3, 9), texts, pieces, special)


def test_without_a_tokenizer_tokens_are_numbers(run: RunDir) -> None:
    (run.model / "tokenizer.json").unlink()
    page = step_page(run, 2)
    assert texts_of(data_of(page))[:2] == ["[9][11]", "[11][9]"]
    assert "tokenizer.json: absent" in page


def test_the_policy_admits_no_host_and_no_other_script(run: RunDir) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', step_page(run, 2))
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'sha")
    assert "unsafe" not in policy and "http" not in policy
    assert len(base64.b64decode(policy.split("'sha256-")[1].split("'")[0])) == 32

