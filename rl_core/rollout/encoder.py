"""From a row to its token ids: the chat template, the tokenizer, what is wrong with a prompt's tokens. Needs no torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from rl_core.errors import ConfigError, DataError
from rl_core.rollout.data_rows import Row, short

TEMPLATE_BUGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a chat template raises beside TemplateError: it is a program of the model's authors."""


class Tokenizer(Protocol):
    """What this package asks of a transformers tokenizer."""

    chat_template: Any
    unk_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a prompt's tokens must keep: `Limits(max_tokens=256, vocab_size=58)`."""

    max_tokens: int
    vocab_size: int | None = None
    """None: not known."""
    exact_above: int | None = None
    """Prompts that may be longer are counted exactly; None: max_tokens."""

    @property
    def exact(self) -> int:
        return self.max_tokens if self.exact_above is None else min(self.max_tokens, self.exact_above)


class Encoder:
    """Renders and tokenises rows. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._lock = threading.Lock()

    def __call__(self, rows: Sequence[Row]) -> list[NDArray[np.int32]]:
        """Token ids of each row, whatever their number.

        Raises DataError naming the row that holds text which the tokenizer cannot represent, has a token id outside the
        vocabulary or no token at all, or that the template refuses; ConfigError for a chat where the tokenizer has no
        template.
        """
        texts = [i for i, row in enumerate(rows) if row.form != "ids"]
        with self._lock:  # a fast tokenizer can be borrowed once
            rendered = [self.render(rows[i]) for i in texts]
            encoded = dict(zip(texts, self._encode([rows[i] for i in texts], rendered), strict=True))
        lists = [np.asarray(encoded.get(i, row.prompt), np.int32) for i, row in enumerate(rows)]
        for row, ids in zip(rows, lists, strict=True):
            self._check(row, ids)
        return lists

    def render(self, row: Row) -> str:
        """The text of a row by the chat template. Without a template a text is taken as it is."""
        if not self.tokenizer.chat_template:
            if row.form == "text":
                return cast(str, row.prompt)
            raise ConfigError(f"{row.where}: a chat prompt needs a tokenizer with a chat template, and this model's "
                              "has none; write prompts as text or use an instruction-tuned model (model.path)")
        chat: Any = [{"role": "user", "content": row.prompt}] if row.form == "text" else row.prompt
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except (TemplateError, *TEMPLATE_BUGS) as error:
            raise DataError(f"{row.where}: the model's chat template refuses this prompt: {error}: "
                            f"{short(row.prompt)}; write it as the template wants it, or leave it out") from error

    def _encode(self, rows: Sequence[Row], texts: list[str]) -> Sequence[Sequence[int]]:
        """Token ids of each text, special tokens by the template alone where there is one."""
        if not texts:
            return []
        try:
            return self.tokenizer(texts, add_special_tokens=not self.tokenizer.chat_template)["input_ids"]
        except Exception as error:  # the tokenizers library raises bare Exception for text that it cannot represent
            if len(texts) == 1:
                raise DataError(f"{rows[0].where}: the model's tokenizer cannot represent this prompt ({error}): "
                                f"{str(rows[0].prompt)[:80]!r}; leave it out, or use another model") from error
        return [self._encode([row], [text])[0] for row, text in zip(rows, texts, strict=True)]

    def _check(self, row: Row, ids: NDArray[np.int32]) -> None:
        vocabulary, unknown = self.limits.vocab_size, self.tokenizer.unk_token_id
        if not len(ids):
            raise DataError(f"{row.where}: the prompt has 0 tokens; write one")
        if vocabulary is not None and ids.max() >= vocabulary:
            if row.form == "ids":
                raise DataError(f"{row.where}: token id {ids[ids >= vocabulary][0]} is outside the model's vocabulary "
                                f"of {vocabulary}; use ids of this model's tokenizer, from 0 on, or write the prompt "
                                "as text")
            raise DataError(f"{row.where}: token id {ids.max()} is outside the model's vocabulary of {vocabulary}: the "
                            "tokenizer is not this model's")
        if unknown is not None and row.form != "ids" and (ids == unknown).any() and not is_bytewise(self.tokenizer):
            raise DataError(f"{row.where}: the prompt holds characters that the model's tokenizer does not know: "
                            f"{str(row.prompt)[:80]!r}; leave it out, or use another model")


def is_bytewise(tokenizer: Tokenizer) -> bool:
    """Byte-level BPE with all 256 bytes in its vocabulary: every text has tokens, and no more than it has bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE" or backend.pre_tokenizer is None:
        return False
    from tokenizers.pre_tokenizers import ByteLevel

    state = state_of(backend.pre_tokenizer)
    steps: list[dict[str, Any]] = state.get("pretokenizers", [state])
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    return (len(levels) == 1 and not levels[0]["add_prefix_space"]
            and {step["type"] for step in steps} <= {"ByteLevel", "Split", "Digits"}
            and all(backend.token_to_id(letter) is not None for letter in cast(Any, ByteLevel).alphabet()))


def state_of(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON in tokenizer.json."""
    return json.loads(part.__getstate__())
