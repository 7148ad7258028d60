"""What is asked of a server before a run relies on it: is it SGLang, of a tested version, with the run's model,
tokenizer and context. Whether its log-probs are those of the learner: agreement.py.

Blocking, at the start only. A refusal names the server's address or the setting, what was got, and what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import ConfigError, DeadPart
from rl_core.rollout.prompts import load_tokenizer, read_vocab_size
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.server import MARGIN

TESTED = ((0, 5, 23), (0, 5, 24))
"""Versions from the first on, and below the second. The contract test runs against the pin of `make sglang`."""
TEXTS = ("user sort 31245: (a + b) * 2 = x, or y - 7?\n",
         "Naïve \"QUOTES\" & <tags>\n\tdef f(x):\n        return x  # 2.5",
         "北京 ≥ Привет 🙂")
"""Tokenised on both sides, one by one: a small tokenizer may know the first alone."""
NO_TOKEN = 2**40
RANGE = re.compile(r"valid range is \[0, (\d+)\)")
"""How a server says how large its vocabulary is: in its refusal of log-probs of an id outside."""
CHANGES_LOGPROBS: dict[str, tuple[Any, ...]] = {
    "speculative_algorithm": (None,), "quantization": (None,), "preferred_sampling_params": (None, "", "{}"),
    "json_model_override_args": (None, "", "{}"), "lora_paths": (None, [], {}), "enable_watermark": (None, False)}
"""Settings of a server that change what is sampled or what its log-probs are of, and the values that leave it alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What was found out of one server."""

    version: str
    warnings: tuple[str, ...]
    """What refuses nothing, and a person should know."""


def check_server(url: str, config: Config, model_dir: Path) -> Checked:
    """Whether this server can serve the run. Raises ConfigError naming what is wrong, DeadPart where nothing answers.
    """
    engine = cast(SglangEngineConfig, config.rollout.engine)
    info, model = _asked(url, "/server_info"), _asked(url, "/model_info")
    if not isinstance(info.get("version"), str) or "weight_version" not in model or "is_generation" not in model:
        _refuse(url, "is no server of SGLang: /server_info and /model_info have other fields; give the address of one, "
                     "or no rollout.engine.urls, and Headway starts one")
    warnings = [*_version(url, str(info["version"]), engine), *_settings(url, info, engine)]
    if not model["is_generation"]:
        _refuse(url, "serves a model that does not generate (is_generation is false)")
    _model(url, info, model, config, model_dir)
    _tokenizer(url, config, model_dir)
    return Checked(version=str(info["version"]), warnings=tuple(warnings))


def parse_version(text: str) -> tuple[int, ...]:
    """`"0.5.23.post1"` -> `(0, 5, 23)`; what begins with no number is `()`."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def tested_range() -> str:
    """`0.5.23 or newer, below 0.5.24`"""
    first, below = (".".join(map(str, version)) for version in TESTED)
    return f"{first} or newer, below {below}"


def _asked(url: str, route: str) -> Mapping[str, Any]:
    answer = ask(url, route)
    if answer.status == 0:
        raise DeadPart(f"server {url}: nothing answers at {route} ({answer.payload}); start it, or mend "
                       "rollout.engine.urls")
    if answer.status in (401, 403):
        _refuse(url, f"wants a key for {route}, and Headway sends none: start it without --api-key, on a network where "
                     "nobody else asks")
    if answer.status != 200 or not answer.fields:
        _refuse(url, f"is no server of SGLang: {route} answers with status {answer.status} and "
                     f"{answer.message[:200]!r}; give the address of one")
    return answer.fields


def _version(url: str, version: str, engine: SglangEngineConfig) -> list[str]:
    first, below = TESTED
    if first <= parse_version(version) < below:
        return []
    told = f"server {url} is SGLang {version}; tested are {tested_range()}"
    if engine.untested_version == "warn":
        return [f"{told}: routes and fields may differ"]
    raise ConfigError(f"rollout.engine.untested_version: {told}; install a tested one (docs/sglang.md), or allow it "
                      f"with warn (got 'refuse')")


def _settings(url: str, info: Mapping[str, Any], engine: SglangEngineConfig) -> list[str]:
    for name, harmless in CHANGES_LOGPROBS.items():
        if name in info and info[name] not in harmless:
            _refuse(url, f"runs with {name}={info[name]!r}, under which its log-probs are not those of the learner's "
                         "model; start it without")
    if info.get("dtype") not in ("auto", engine.dtype):
        _refuse(url, f"computes in {info.get('dtype')}, and rollout.engine.dtype is {engine.dtype}; make them equal")
    if not info.get("incremental_streaming_output", True):
        return [f"server {url} sends each answer from its beginning with every part, quadratic in its length: start it "
                "with --incremental-streaming-output"]
    return []


def _model(url: str, info: Mapping[str, Any], model: Mapping[str, Any], config: Config, model_dir: Path) -> None:
    ours = cast("dict[str, Any]", json.loads((model_dir / "config.json").read_text()))
    for name in ("model_type", "architectures"):
        if ours.get(name) and model.get(name) and model[name] != ours[name]:
            _refuse(url, f"serves another model: {name} {model[name]!r}, and that of the run has {ours[name]!r}")
    served, here = served_vocabulary(url), read_vocab_size(model_dir)
    if served is not None and served != here:
        _refuse(url, f"serves another model: a vocabulary of {served}, and that of the run has {here}")
    longest = config.served_tokens
    needed = longest + MARGIN
    room, pool = info.get("context_length") or ours.get("max_position_embeddings"), info.get("max_total_num_tokens")
    if isinstance(room, int) and room < needed:
        _refuse(url, f"takes {room} tokens, and data.max_prompt_tokens and the longest answer together are {longest}; "
                     f"start it with --context-length {needed}: it keeps {MARGIN} to itself, or lower them")
    if isinstance(pool, int) and pool < needed:
        _refuse(url, f"has a key/value cache of {pool} tokens, and one prompt with its answer takes {needed}; raise "
                     "--max-total-tokens or --mem-fraction-static (rollout.engine.server_args)")


def served_vocabulary(url: str) -> int | None:
    """Ids that the server knows are below this; None if it does not say. An id outside in the prompt itself would end
    the whole server, so it is asked for log-probs of one."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
            "token_ids_logprob": [NO_TOKEN]}
    found = RANGE.search(ask(url, "/generate", body).message)
    return int(found[1]) if found else None


def _tokenizer(url: str, config: Config, model_dir: Path) -> None:
    tokenizer: Any = load_tokenizer(model_dir)
    for text in TEXTS:
        try:
            ours = cast("list[int]", tokenizer.encode(text, add_special_tokens=False))
        except Exception:  # some tokenizers raise what they like for characters that they do not know
            continue
        answer = ask(url, "/tokenize", {"prompt": text, "add_special_tokens": False})
        theirs: Any = answer.fields.get("tokens")
        if answer.status != 200 or not isinstance(theirs, list):
            if config.sampling.stop:
                _refuse(url, f"has no tokenizer (/tokenize: {answer.message[:200]!r}), and sampling.stop needs one; "
                             "start it without --skip-tokenizer-init")
            return
        if theirs != ours:
            _refuse(url, f"has another tokenizer: a text that is {len(ours)} tokens here ({ours[:8]} ...) is "
                         f"{len(cast('list[int]', theirs))} there ({theirs[:8]} ...)")


def _refuse(url: str, why: str) -> NoReturn:
    raise ConfigError(f"server {url} {why}")
