"""The character tokenizer and ChatML template of the tiny model (models.md section 2). Needs `tokenizers`, not torch.

58 tokens: six for the chat form and 52 characters. Every id decodes to text, and text over these characters comes back
exactly. A character outside the alphabet is an error of the `tokenizers` library ("Missing [UNK] token"), never a
silent replacement.

    "sort 312" as a chat -> <|im_start|> user \\n s o r t ' ' 3 1 2 <|im_end|> \\n <|im_start|> assistant \\n
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, IM_START, IM_END = "<pad>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, IM_START, IM_END)
ROLES = ("system", "user", "assistant")
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz.,:;?!'-+*/=()"
VOCABULARY: tuple[str, ...] = (*SPECIAL, *ROLES, *CHARACTERS)
"""Token text by id. The model has exactly these: ids beyond could be sampled and would decode to nothing."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown chat role ' ~ message['role'] ~ '; use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def character_tokenizer() -> Tokenizer:
    """A word-level tokenizer whose words are single characters and the three role names."""
    vocabulary = {text: i for i, text in enumerate(VOCABULARY)}
    # The typed stub demands an unknown token; leaving it out is what makes unknown characters an error.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # pyright: ignore[reportCallIssue]
    # [\s\S] and not `.`, which skips the newline; Oniguruma has no (?s).
    words = Regex("|".join(ROLES) + r"|[\s\S]")
    tokenizer.pre_tokenizer = cast(Any, pre_tokenizers.Split(words, behavior="isolated"))
    tokenizer.decoder = cast(Any, decoders.Fuse())
    cast(Any, tokenizer).add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def encode_chat(tokenizer: Tokenizer, content: str) -> list[int]:
    """Ids of one user message and the opening of the assistant's turn, as the chat template renders them."""
    text = f"{IM_START}user\n{content}{IM_END}\n{IM_START}assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def write_tokenizer(directory: Path, max_tokens: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`: what AutoTokenizer reads."""
    directory.mkdir(parents=True, exist_ok=True)
    character_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": IM_END,
        "additional_special_tokens": [IM_START],
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
