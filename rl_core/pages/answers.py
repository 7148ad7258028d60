"""The trajectory viewer: the answers of a training step, or of a validation, as one page to look through.

Every token is coloured by what is recorded of it, or follows from that: nothing else is shown, and what is not there is
named with the reason. The page itself is in answers_data.js (columns to numbers), answers_colours.js, answers_cards.js
(one answer), answers_tools.js (what is asked for) and answers.js.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.experience.ledger import read_claim, voided_steps
from rl_core.experience.staleness import OFFLINE
from rl_core.gaps import Gaps, found
from rl_core.learner.token_states import StepLogprobs, advantages_need
from rl_core.pages.columns import AnswerColumns, fitted
from rl_core.pages.page import asset, page, text
from rl_core.pages.step_answers import step_answers
from rl_core.pages.token_texts import NO_TEXTS, TokenTexts, token_texts
from rl_core.pages.validation_answers import validation_answers
from rl_core.revisions import config_of
from rl_core.run_dir import RunDir
from rl_core.types import Claim
from rl_core.validation import read_table, read_table_details, read_validation

SCRIPTS = ("answers_data.js", "answers_colours.js", "answers_cards.js", "answers_tools.js", "answers.js")
Fact = tuple[str, object]
"""A line of the page's head: what, and its value."""
Absent = dict[str, str]
"""Colouring that is not there -> why."""


def step_page(run: RunDir, step: int, learner: StepLogprobs | None = None) -> str:
    """The answers that training step k consumed, as one HTML file. `learner`: what its weights say of every token,
    where somebody has computed it.

    What cannot be read is named on the page. Raises FileNotFoundError for a step without a claim, BrokenFile for one
    whose claim or settings cannot be trusted.
    """
    claim, gaps = read_claim(run, step), Gaps()
    config = config_of(run, claim.revision)
    voided = found(partial(voided_steps, run), str(run.ledger()), gaps) or {}
    columns = step_answers(run, claim, config, gaps, learner)
    state = f"voided: {voided[step]}" if step in voided else "recorded" if run.record(step).exists() else \
        "claimed, without a record yet"
    facts: list[Fact] = [
        ("run", run.root.name), ("training step", step), ("state", state), ("groups", len(claim.groups)),
        ("publication", "of another run" if claim.policy == OFFLINE else claim.idx), ("staleness", claim.policy),
        ("advantage", config.learner.advantage.name), ("loss", config.learner.loss.name)]
    return _page(f"{run.root.name}: answers of step {step}", run, columns, facts,
                 _absent_of_step(claim, config, columns), gaps)


def validation_page(run: RunDir, step: int) -> str:
    """The answers that the validation after `step` training steps keeps, as one HTML file.

    Raises FileNotFoundError where there is no such validation, BrokenFile where its record cannot be trusted.
    """
    record, gaps = read_validation(run, step), Gaps()
    rows = found(partial(read_table, run, step), str(run.validation_table(step)), gaps) or []
    details = found(partial(read_table_details, run, step), str(run.validation_table(step)), []) or []
    columns = validation_answers(rows, details, int(record["v"]))
    accuracy = record.get("greedy_accuracy")
    facts: list[Fact] = [
        ("run", run.root.name), ("training steps behind the weights", step), ("weight version", record["v"]),
        ("prompts asked", record.get("n")), ("prompts shown", len(columns.groups)),
        ("greedy accuracy", "not known" if accuracy is None else f"{accuracy:.3f}")]
    why = "a validation trains on none of its answers"
    absent: Absent = dict.fromkeys(("advantage", "ratio", "gap", "mask"), why)
    if not columns.has_tokens:
        absent |= {"logprob": "the table of this validation holds texts, not tokens",
                   "version": f"one version gave all answers: {record['v']}"}
    return _page(f"{run.root.name}: answers of the validation after {step} steps", run, columns, facts, absent, gaps)


def _absent_of_step(claim: Claim, config: Config, columns: AnswerColumns) -> Absent:
    """The colourings that a step does not have, and why."""
    absent: Absent = {}
    if "advantage" not in columns.values:
        need, unread = advantages_need(config), len(claim.groups) - len(columns.groups)
        absent["advantage"] = f"not recorded: {need}" if need else \
            f"{unread} of {len(claim.groups)} groups of the step cannot be read; of the others alone it would be " \
            "another one"
    if "proximal" not in columns.values:
        why = "not recorded: log-probs of the learner take its weights; `headway inspect KEY --step N --logprobs " \
              "--html FILE` computes them where the step can be replayed"
        one = config.updates_per_step == 1 and config.learner.correction.mode == "decoupled"
        absent |= {"gap": why, "ratio": why + (". In the step itself, which made one update, it was 1 at every token"
                                               if one else "")}
    return absent


def _page(title: str, run: RunDir, columns: AnswerColumns, facts: Sequence[Fact], absent: Absent, gaps: Gaps) -> str:
    ids = [columns.token_ids_T, *(group.prompt_ids for group in columns.groups)]
    texts: TokenTexts = NO_TEXTS
    if columns.has_tokens:
        texts = found(partial(token_texts, run.model, ids), f"{run.model}: tokenizer.json", gaps) or _unread(ids)
    shown, data = fitted(columns, texts)
    if left_out := len(columns.groups) - len(shown.groups):
        gaps.append(f"{len(shown.groups)} of {len(columns.groups)} groups are in this page, evenly over all of them; "
                    f"the other {left_out} would make it larger than a browser opens at once. `headway inspect KEY "
                    "--group ID` shows any of them")
    return page(title, body=_body(title, facts, gaps), style=asset("answers.css"),
                script="\n".join(map(asset, SCRIPTS)), data=data | {"absent": absent})


def _unread(ids: Sequence[NDArray[np.int32]]) -> TokenTexts:
    """Numbers in place of texts, where no tokenizer can be read."""
    known: list[int] = np.unique(np.concatenate(ids)).tolist()
    return TokenTexts(ids=tuple(known), texts=tuple(f"[{token}]" for token in known), pieces={}, special=())


def _body(title: str, facts: Sequence[Fact], gaps: Gaps) -> str:
    """What is there before the script has run, and without it."""
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts)
    missing = "".join(f"<li>{text(gap)}</li>" for gap in gaps)
    return "\n".join([
        f'<header><h1>{text(title)}</h1><dl id="facts">{listed}</dl>',
        f'<ul id="gaps">{missing}</ul>' if gaps else "", "</header>",
        '<form id="tools" aria-label="What is shown"></form>', '<p id="legend"></p>',
        '<p id="count" role="status"></p>', '<main id="list" tabindex="0" aria-label="Answers"></main>',
        '<dialog id="one" aria-label="A group"></dialog>', '<div id="tip" role="tooltip" hidden></div>',
        "<noscript>The answers are shown by the script of this page, which your browser does not run.</noscript>"])
