"""A reward model: a sequence classifier that reads prompt and answer. Runs in a process of its own (child.py).

The prompt and the answer are one chat by the tokenizer's template, as the model was trained on; without a template they
stand one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

from rl_core.errors import ConfigError, refuse

FIELD = "scoring.model.path"
ENDING = "ForSequenceClassification"


class ModelTask(TypedDict):
    """The settings `scoring.model`."""

    path: str
    label: int | None
    squash: bool
    right: float | None
    threads: int
    device: str
    dtype: str


def check_classifier(path: str, label: int | None) -> None:
    """Raises ConfigError for a directory that holds no sequence classifier, and for an output that it does not have.

    Reads its config.json alone.
    """
    directory = Path(path).expanduser()
    try:
        payload: Any = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        refuse(FIELD, path, f"has no config.json that can be read ({error}); give a directory written by "
                            "save_pretrained")
    settings = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
    names = settings.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(ENDING) for name in cast("list[Any]", names)):
        refuse(FIELD, path, f"holds {names}, not a sequence classifier (...{ENDING}): its score would be of a head "
                            "that nobody has trained")
    labels = len(settings.get("id2label") or {}) or 2  # what transformers takes where none is said
    if label is None and labels != 1:
        refuse("scoring.model.label", label, f"{path} has {labels} outputs; say which one is the reward")
    if label is not None and label >= labels:
        refuse("scoring.model.label", label, f"{path} has {labels} outputs, from 0 on")


def scorer_of(task: ModelTask) -> Callable[..., dict[str, Any]]:
    """The reward, with the model loaded: `scorer_of(task)(answer, prompt)`. Raises ConfigError for no classifier."""
    check_classifier(task["path"], task["label"])
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(task["threads"])
    device = task["device"]
    if device == "cuda" and not torch.cuda.is_available():
        refuse("scoring.model.device", device, "the process that scores sees no GPU: it has those of its rollout "
               "worker (rollout.engine.device); set cpu, or give the worker one")
    directory = str(Path(task["path"]).expanduser())
    load: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(directory, **load)
    model, told = cast(Any, AutoModelForSequenceClassification).from_pretrained(
        directory, dtype=getattr(torch, task["dtype"]), output_loading_info=True, **load)
    if told["missing_keys"]:
        raise ConfigError(f"{FIELD}: {directory} lacks {sorted(told['missing_keys'])[:3]}: its score would be of "
                          "weights drawn by lot")
    model.to(device).eval()
    context = int(getattr(model.config, "max_position_embeddings", 0) or 0)

    def score(answer: str, truth: str, prompt: Any = None) -> dict[str, Any]:
        ids = token_ids(tokenizer, prompt, answer)
        if context and len(ids) > context:
            raise ValueError(f"prompt and answer have {len(ids)} tokens, and the reward model takes {context}")
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids], device=device)).logits[0].float()
        value = logits[task["label"] or 0]
        reward = float(value.sigmoid() if task["squash"] else value)
        right = task["right"]
        return {"reward": reward, "correct": None if right is None else reward >= right}

    return score


def token_ids(tokenizer: Any, prompt: Any, answer: str) -> list[int]:
    """Prompt and answer as the model reads them. Raises ValueError for nothing to read."""
    if tokenizer.chat_template:
        asked = cast("list[Any]", prompt) if isinstance(prompt, list) else \
            [{"role": "user", "content": str(prompt or "")}]
        chat = [*asked, {"role": "assistant", "content": answer}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        ids = cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        ids = cast("list[int]", tokenizer(f"{prompt or ''}{answer}")["input_ids"])
    if not ids:
        raise ValueError("neither prompt nor answer has a token for the reward model")
    return ids
