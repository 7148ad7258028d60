"""The commands that look: status, audit, inspect. They read run directories and change nothing."""

from __future__ import annotations

from typing import Any

from flows.auditing_text import audit_lines
from flows.command import answer, failed, hush
from flows.looking_text import extreme_lines, group_lines, page_lines, status_lines, step_lines, validation_lines


def show_status(run_key: str, *, as_json: bool) -> int:
    """What the run is doing, or how it ended."""
    from tasks.inspection import run_status

    return answer(lambda: run_status(run_key), status_lines, as_json=as_json)


def show_audit(run_key: str, *, prompts: bool = False, shards: bool = False, as_json: bool) -> int:
    """The partition of prompts and rows; 1 if it does not hold. `prompts`, `shards`: with each of them."""
    from tasks.inspection import run_audit

    return answer(lambda: run_audit(run_key, each_prompt=prompts, each_shard=shards), audit_lines, as_json=as_json,
                  holds=lambda report: report["holds"])


def show_answers(run_key: str, *, step: int | None = None, group: str | None = None, best: int | None = None,
                 worst: int | None = None, validation: int | None = None, html: str | None = None,
                 mlflow: bool = False, logprobs: bool = False, as_json: bool) -> int:
    """Prompts, answers, rewards and versions: of one training step (by default the newest), of one group, of a
    validation, or the best or worst answers of a step or of the run. `html`: the file of a page instead; `mlflow`: the
    page as an artifact of the run; `logprobs`: with those of the learner."""
    if (why := _not_together(group=group, best=best, worst=worst, validation=validation, step=step, html=html,
                             mlflow=mlflow or None)):
        return failed(why)
    paged = html is not None or mlflow
    if logprobs and (not paged or validation is not None):
        return failed("--logprobs computes what the learner says of a step's tokens, for its page; give it with "
                      "--html or --mlflow, not with --validation")
    from tasks import answers

    if paged:
        hush()
        return answer(lambda: answers.step_as_page(run_key, step, html, logprobs=logprobs, tracked=mlflow)
                      if validation is None else answers.validation_as_page(run_key, validation, html, tracked=mlflow),
                      page_lines, as_json=as_json)
    if group is not None:
        return answer(lambda: answers.run_group(run_key, group), group_lines, as_json=as_json)
    if validation is not None:
        return answer(lambda: answers.run_validation(run_key, validation), validation_lines, as_json=as_json)
    if best is not None or worst is not None:
        count = best if best is not None else worst
        return answer(lambda: answers.run_extremes(run_key, "best" if worst is None else "worst", count or 0, step),
                      extreme_lines, as_json=as_json)
    return answer(lambda: answers.run_step(run_key, step), step_lines, as_json=as_json)


def _not_together(**given: Any) -> str | None:
    """What keeps these options from being asked at once; None where nothing does."""
    said = [f"--{name}" for name, value in given.items() if value is not None]
    pages = [name for name in said if name in ("--html", "--mlflow")]
    chosen = [name for name in said if name not in ("--step", *pages)]
    alone = {"--group", "--validation"}.intersection(chosen)
    if len(chosen) > 1 or (alone and "--step" in said):
        return f"{' and '.join(name for name in said if name not in pages)} ask for different things; give --group " \
               "or --validation alone, or one of --best and --worst, with --step or without"
    if pages and chosen not in ([], ["--validation"]):
        return f"{pages[0]} writes the page of a step or a validation; give it with --step or --validation, not with " \
               f"{chosen[0]}"
    return None
