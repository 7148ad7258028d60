"""A data set looked at before a run is built on it: `headway data check`. Starts nothing, writes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.preflight import left_to_set, model_inputs
from rl_core.rollout.data_warnings import duplicates, warnings_of
from rl_core.rollout.dataset import Source
from rl_core.rollout.encoder import Encoder, Limits
from rl_core.rollout.prompts import PromptSource
from tasks.paths import headway_home

LISTED = 5
"""Prompts over the limit that are named."""


def check_data(config: Config, *, row: int = 0) -> dict[str, Any]:
    """What the rows of `data.train` are, JSON values: sources, tokens, overlong, duplicates, warnings, example, holds.

    Lengths are exact, of however many rows. `row`: the one that is rendered as the example, from 0, of those that are
    used. `holds` is False where a run would refuse prompts over the limit. Raises ConfigError and DataError for what
    cannot be read at all.
    """
    if empty := [line for line in left_to_set(config) if not line.startswith("data.validation")]:
        raise ConfigError("\n".join(empty))
    inputs = model_inputs(config, headway_home() / "models")
    kept = config.model_copy(update={"data": config.data.model_copy(update={"overlong": "drop"})})
    source = PromptSource(kept, inputs.tokenizer, vocab_size=inputs.model.vocabulary, exact_above=-1)
    if not 0 <= row < len(source.keys):
        raise ConfigError(f"--row {row}: there are {len(source.keys)} prompts that are used, from 0")
    over = np.flatnonzero(source.all_lengths > config.data.max_prompt_tokens)
    again, first, second = duplicates(source.keys)
    return {
        "sources": [_source(each) for each in source.data.sources], "rows": len(source.data), "positions": len(source),
        "tokens": _quantiles(source.all_lengths),
        "overlong": {"limit": config.data.max_prompt_tokens, "policy": config.data.overlong, "count": len(over),
                     "first": [{"where": source.data.where(int(at)), "tokens": int(source.all_lengths[at])}
                               for at in over[:LISTED]]},
        "duplicates": {"count": again, "first": {"where": source.where(second), "repeats": source.where(first)}
                       if again else None},
        "warnings": list(warnings_of(source, source.held_out)),
        "example": _example(source, Encoder(inputs.tokenizer, Limits(max_tokens=config.data.max_prompt_tokens)), row,
                            config.sampling.max_new_tokens),
        "holds": not len(over) or config.data.overlong == "drop",
    }


def _source(source: Source) -> dict[str, Any]:
    counted: Counter[str] = sum((table.data_sources() for table in source.tables), Counter[str]())
    first = source.tables[0]
    return {"path": source.path, "rows": len(source), "weight": source.weight, "prompt": first.form,
            "answer": config_name(first.shape, first.keys.answer), "data_sources": dict(counted.most_common())}


def config_name(shape: str, answer_key: str) -> str:
    """The column that answers come from."""
    return answer_key if shape == "answer" else "reward_model.ground_truth"


def _quantiles(lengths: Any) -> dict[str, float]:
    """Tokens of a prompt: each is the length of one that is there, but for mean and median."""
    low, p95, high = np.quantile(lengths, [0.0, 0.95, 1.0], method="higher").tolist()
    median = float(np.median(lengths))
    return {"min": low, "median": int(median) if median.is_integer() else median, "p95": p95, "max": high,
            "mean": float(np.mean(lengths))}


def _example(source: PromptSource, encoder: Encoder, row: int, max_new_tokens: int) -> dict[str, Any]:
    """One prompt as the model gets it: prompt tokens have mask 0, and every token sampled behind them has mask 1."""
    prompt = source.used(row)
    words = [str(encoder.tokenizer.decode([token], skip_special_tokens=False)) for token in prompt.token_ids_P.tolist()]
    return {"where": source.where(row), "answer": prompt.answer, "data_source": prompt.data_source,
            "columns": sorted(prompt.columns), "text": "".join(words) if prompt.token_ids_P.size == 0 else
            str(encoder.tokenizer.decode(prompt.token_ids_P, skip_special_tokens=False)),
            "tokens": [{"id": token, "text": word, "mask": 0}
                       for token, word in zip(prompt.token_ids_P.tolist(), words, strict=True)],
            "sampled_at": len(words), "max_new_tokens": max_new_tokens}
