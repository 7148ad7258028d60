"""A run as pandas DataFrames with Arrow types, from its directory alone (docs/frames.md).

    from rl_core import frames

    steps = frames.steps("~/.headway/runs/sort-2")
    steps[["reward/mean", "staleness/mean"]].plot()
    frames.trajectories("~/.headway/runs/sort-2", step=42, text=True).nsmallest(5, "reward")
    frames.compare(["runs/a", "runs/b"])

A run may go on meanwhile, and may be broken: a file that is absent or cannot be trusted is a gap, named in
`frame.attrs["gaps"]`, and what depends on it is null. Null is also what does not exist, such as the length of right
answers where none was right. Columns are `pd.ArrowDtype`; no Python object is made for a token or an answer, except by
`text=True`.

`headway status`, `headway inspect` and the summary are made of these frames. pandas is imported by the first frame, not
with this module. The layer below: steps and validations from history.py, groups from landed_groups.py, answers from
landed_answers.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from rl_core.estimates import Estimate
from rl_core.experience.ledger import voided_steps
from rl_core.gaps import Gaps, found, merged
from rl_core.group_facts import read_group_facts
from rl_core.history import read_history, read_steps, read_validations
from rl_core.landed_answers import answer_table, answers_of
from rl_core.landed_groups import GROUP_SCHEMA, TIME, group_table
from rl_core.looking.comparison import caveats, check_comparable
from rl_core.looking.comparison import compare as compared_to
from rl_core.looking.curves import read_curve
from rl_core.run_dir import RunDir, file_numbers, read_json
from rl_core.run_numbers import LAST_STEPS, RunNumbers, difference, run_numbers

if TYPE_CHECKING:
    import pandas as pd

Run = RunDir | Path | str
"""A run directory."""


def steps(run: Run, *, last: int | None = None) -> pd.DataFrame:
    """One row per training step, index `step`; of the `last` recorded steps only, where given.

    `state` (string): trained; void; claimed, which has no record yet; unreadable. `time` (timestamp, UTC) of the
    record. `attempt`, `idx` (publication), `revision` (config revision; int32). `published` (int32): the version v that
    was made. Then every metric of the table in rl_core/metrics.py by its name, `reward/part_<name>_mean`, and
    `seconds/<stage>` of the record (double).
    """
    run, gaps = _run(run), Gaps()
    history = read_history(run, last=last, gaps=gaps)
    records = history.records
    stages = sorted({stage for record in records for stage in record.seconds})
    columns: dict[str, Any] = {
        "step": pa.array(history.step_K, pa.int64()), "state": pa.array(["trained"] * len(records), pa.string()),
        "time": pa.array([record.ts_us for record in records], TIME),
        **{name: pa.array([getattr(record, name) for record in records], pa.int32())
           for name in ("attempt", "idx", "revision")},
        "published": pa.array([None if r.published is None else r.published.v for r in records], pa.int32()),
        **{name: _doubles(values) for name, values in history.metrics.items()},
        **{f"seconds/{stage}": _doubles([r.seconds.get(stage, math.nan) for r in records]) for stage in stages}}
    since = records[0].step if last and records else 0
    others = _other_steps(run, {record.step for record in records}, gaps, since=since)
    rows = {"step": pa.array(list(others), pa.int64()), "state": pa.array(list(others.values()), pa.string())}
    table = pa.concat_tables([pa.table(columns), pa.table(rows)], promote_options="default").sort_by("step")
    return _frame(table, gaps, index="step")


def _other_steps(run: RunDir, trained: set[int], gaps: Gaps, *, since: int) -> dict[int, str]:
    """State of the steps without a readable record, from `since` on."""
    recorded = set(file_numbers(run.records, r"step-(\d{9})\.json"))
    claimed = set(file_numbers(run.ledger(), r"step-(\d{9})\.json"))
    void = found(partial(voided_steps, run), str(run.ledger()), gaps) or {}
    return {step: "unreadable" if step in recorded else "void" if step in void else "claimed"
            for step in sorted((recorded | claimed | set(void)) - trained) if step >= since}


def sources(run: Run, *, last: int | None = None) -> pd.DataFrame:
    """What each step trained on by data source, one row each: `step` (int64), `data_source` (string), `n` answers
    (int64), `reward_mean`, `correct` (share), `length_mean` (tokens; double). Of the `last` recorded steps only, where
    given."""
    run, gaps = _run(run), Gaps()
    rows = [{"step": record.step, "data_source": source, **{name: _known(x) for name, x in values.items()}}
            for record in read_steps(run, last=last, gaps=gaps) for source, values in record.by_source.items()]
    schema = pa.schema([("step", pa.int64()), ("data_source", pa.string()), ("n", pa.int64()),
                        ("reward_mean", pa.float64()), ("correct", pa.float64()), ("length_mean", pa.float64())])
    return _frame(pa.Table.from_pylist(rows, schema=schema), gaps)


def groups(run: Run) -> pd.DataFrame:
    """One row per group that landed or ended, in order of (dataset_epoch, position, try); docs/frames.md section 2.

    `state`: waiting; claimed (its step has no record yet); trained; void; dropped, duplicate; failed, poison, given_up,
    filtered (no row landed). `reason` says why it was dropped or failed. `step` and `age` (publications) of its claim.
    """
    gaps = Gaps()
    return _frame(group_table(_run(run), gaps), gaps)


def trajectories(run: Run, step: int | None = None, *, of: pd.DataFrame | None = None, tokens: bool = False,
                 text: bool = False) -> pd.DataFrame:
    """One row per landed answer, or per answer that `step` trains on, in training order; docs/frames.md section 3.

    of: some rows of `groups(run)`, whose answers are read alone, in order of (stream, seq, row).
    tokens: lists of token ids, log-probs (nats), loss mask and version ends too; mapped from the shards, not copied.
    text: `prompt` and `text`, decoded by the run's tokenizer; a Python object each.
    Raises FileNotFoundError for a step without a claim, ValueError for a step and groups at once.
    """
    if step is not None and of is not None:
        raise ValueError(f"trajectories: of a step or of groups, not of both (got step {step} and {len(of)} groups)")
    run, gaps = _run(run), Gaps()
    if of is None:
        table = answer_table(run, step, tokens=tokens or text, gaps=gaps)
    else:
        groups = _table(of).select(GROUP_SCHEMA.names).cast(GROUP_SCHEMA)
        table = answers_of(run, groups, tokens=tokens or text, gaps=gaps)
    answers = _frame(table, gaps)
    if text:
        answers = with_text(answers, run)
    return answers.drop(columns=list(TOKEN_COLUMNS)) if text and not tokens else answers


TOKEN_COLUMNS = ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask", "ver_run_end")


def with_text(answers: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Some rows of `trajectories(run, tokens=True)` with `prompt` and `text` as the run's tokenizer reads them."""
    texts: dict[str, list[str]] = {"prompt": [], "text": []}
    if len(answers):
        from rl_core.rollout.prompts import load_tokenizer

        tokenizer, table = load_tokenizer(_run(run).model), _table(answers)
        for name, ids in (("prompt", "prompt_ids"), ("text", "response_ids")):
            texts[name] = [str(tokenizer.decode(each, skip_special_tokens=True))
                           for each in table.column(ids).to_pylist()]
    return answers.assign(**{name: _series(pa.array(each, pa.string()), answers) for name, each in texts.items()})


def validations(run: Run) -> pd.DataFrame:
    """One row per validation and data source, and one (`data_source` null) for all of them; docs/frames.md section 5.

    `step` (int64): training steps behind the weights. Then every number of the record (double) by its name, the ends of
    `<name>_interval` as `<name>_lo` and `<name>_hi`, and those by k as `pass_at_<k>`.
    """
    gaps = Gaps()
    rows: list[dict[str, Any]] = []
    for validation in read_validations(_run(run), gaps=gaps):
        record = validation.record
        parts = cast(Mapping[str, Mapping[str, Any]], record.get("by_source") or {})
        rows += [{"step": validation.step, "data_source": source, **_numbers_of(part)}
                 for source, part in ((None, record), *parts.items())]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("step", "data_source")))
    schema = pa.schema([("step", pa.int64()), ("data_source", pa.string()), *((name, pa.float64()) for name in names)])
    return _frame(pa.Table.from_pylist(rows, schema=schema), gaps)


BESIDE = ("format", "step", "ts_us")


def _numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a validation's record, flat."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        match value:
            case bool() | None:
                continue
            case int() | float() if name not in BESIDE:
                flat[name] = float(value)
            case [lo, hi] if name.endswith("_interval"):
                flat |= {f"{name.removesuffix('_interval')}_lo": lo, f"{name.removesuffix('_interval')}_hi": hi}
            case dict() if "_at_k" in name:
                by_k = cast(dict[str, Any], value)
                flat |= _numbers_of({name.replace("_at_k", f"_at_{k}"): part for k, part in by_k.items()})
            case _:
                continue
    return flat


def samples(run: Run, step: int) -> pd.DataFrame:
    """The sample table of the validation after `step` training steps: prompt, answer, mode, text, reward ... of some of
    its answers. Raises FileNotFoundError where there is none."""
    rows = read_json(_run(run).validation_table(step))["rows"]
    return _frame(pa.Table.from_pylist(rows), Gaps())


def compare(runs: Sequence[Run], *, last: int = LAST_STEPS) -> pd.DataFrame:
    """One row per run, index `run` (the directory's name); docs/frames.md section 6.

    `steps`; `accuracy_start`, `accuracy_end`, `accuracy_best` (greedy, shares) and `best_step`; `reward`, the mean over
    the `last` steps; `samples_per_s`; `staleness_mean`, `staleness_max` (publications), `update_lag` (updates);
    `wasted` (share of generated tokens that never landed), `dropped` (share of groups). Where a spread is known,
    `<name>_lo` and `<name>_hi` are the 95 % interval. `<name>_diff` (and its ends) is the difference to the first run.
    """
    rows: list[dict[str, Any]] = []
    gaps, first = Gaps(), None
    for run in map(_run, runs):
        facts = read_group_facts(run, outcomes=False, gaps=gaps)
        its_steps, its_validations = steps(run), validations(run)
        of = run_numbers(its_steps, its_validations, facts, last=last)
        gaps = merged(gaps, its_steps.attrs["gaps"], its_validations.attrs["gaps"])
        first = first or of
        rows.append({"run": run.root.name, **_compared(of, first)})
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("run", "steps", "best_step")))
    schema = pa.schema([("run", pa.string()), ("steps", pa.int64()), ("best_step", pa.int64()),
                        *((name, pa.float64()) for name in names)])
    return _frame(pa.Table.from_pylist(rows, schema=schema), gaps, index="run")


def differences(baseline: Run, runs: Sequence[Run]) -> pd.DataFrame:
    """Each run against `baseline`, as `headway compare` has it: one row per run and number; docs/frames.md section 7.

    `run`, `name` (string); `baseline`, `value`, `difference` (value - baseline); `low`, `high`, the 95 % interval of
    the difference (double); `unit`, `better` (`more`, `less` or `neither`), `verdict` (`better`, `worse` or empty).
    What keeps the numbers from being read as they stand is in `attrs["caveats"]`, a list by run. Raises ConfigError for
    a run that is given twice.
    """
    first, others = _run(baseline), [_run(run) for run in runs]
    check_comparable([first, *others])
    rows = [{"run": run.root.name, "name": each.name, **{name: _known(getattr(each, name)) for name in OF_DIFFERENCE},
             "unit": each.unit, "better": each.better, "verdict": each.verdict}
            for run in others for each in compared_to(first, run)]
    schema = pa.schema([("run", pa.string()), ("name", pa.string()), *((name, pa.float64()) for name in OF_DIFFERENCE),
                        ("unit", pa.string()), ("better", pa.string()), ("verdict", pa.string())])
    frame = _frame(pa.Table.from_pylist(rows, schema=schema), Gaps())
    frame.attrs["caveats"] = {run.root.name: list(caveats(first, run)) for run in others}
    return frame


OF_DIFFERENCE = ("baseline", "value", "difference", "low", "high")


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The learning curves of runs, to be drawn over each other: one row per run and number of steps done.

    `run` (string); `step` (int64): training steps done; `reward`, the mean of the step that was done last; `accuracy`,
    `accuracy_lo`, `accuracy_hi`: greedy, of the validation behind so many steps (double).
    """
    gaps, tables = Gaps(), list[pa.Table]()
    for run in map(_run, runs):
        curve = read_curve(run, gaps)
        steps = pa.table({"step": curve.done_K, "reward": _doubles(curve.reward_K)})
        validated = pa.table({"step": curve.done_V, "accuracy": _doubles(curve.accuracy_V),
                              "accuracy_lo": _doubles(curve.low_V), "accuracy_hi": _doubles(curve.high_V)})
        both = steps.join(validated, "step", join_type="full outer").sort_by("step")
        tables.append(both.add_column(0, "run", pa.array([run.root.name] * both.num_rows, pa.string())))
    return _frame(pa.concat_tables(tables), gaps)


def _compared(of: RunNumbers, first: RunNumbers) -> dict[str, Any]:
    row: dict[str, Any] = {"steps": of.steps, "best_step": of.best_step}
    for name, mine, base in (
            ("accuracy_start", of.accuracy_start, first.accuracy_start),
            ("accuracy_end", of.accuracy_end, first.accuracy_end),
            ("accuracy_best", of.accuracy_best, first.accuracy_best), ("reward", of.reward_last, first.reward_last),
            ("samples_per_s", of.samples_per_s, first.samples_per_s)):
        apart = Estimate(0.0, 0.0, 0.0) if of is first and math.isfinite(mine.value) else difference(mine, base)
        for suffix, estimate in (("", mine), ("_diff", apart)):
            row |= {f"{name}{suffix}": estimate.value, f"{name}{suffix}_lo": estimate.lo,
                    f"{name}{suffix}_hi": estimate.hi}
    for name, mine, base in (
            ("staleness_mean", of.staleness_mean, first.staleness_mean),
            ("staleness_max", of.staleness_max, first.staleness_max),
            ("update_lag", of.update_lag_mean, first.update_lag_mean), ("wasted", of.wasted, first.wasted),
            ("dropped", of.dropped_share, first.dropped_share)):
        row |= {name: mine, f"{name}_diff": mine - base}
    return {name: _known(value) for name, value in row.items()}


# -- from Arrow to pandas


def _run(run: Run) -> RunDir:
    """Raises FileNotFoundError for a directory that is not there."""
    found_run = run if isinstance(run, RunDir) else RunDir(Path(run).expanduser())
    if not found_run.root.is_dir():
        raise FileNotFoundError(f"{found_run.root}: there is no such run directory")
    return found_run


def _known(value: float | None) -> float | None:
    """NaN is what does not exist: null in a frame."""
    return None if value is None or math.isnan(value) else value


def _doubles(values: Any) -> pa.Array:
    return pa.array(np.asarray(values, np.float64), pa.float64(), from_pandas=True)  # NaN becomes null


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as Python values by column, None for null; without the index."""
    return _table(frame).to_pylist()


def _table(frame: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False)


def _series(values: pa.Array, beside: pd.DataFrame) -> Any:
    import pandas as pd

    return pd.Series(pd.arrays.ArrowExtensionArray(values), index=beside.index)


def _frame(table: pa.Table, gaps: Gaps, *, index: str | None = None) -> pd.DataFrame:
    import pandas as pd

    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    frame = cast("pd.DataFrame", frame if index is None else frame.set_index(index))
    frame.attrs["gaps"] = gaps
    return frame
