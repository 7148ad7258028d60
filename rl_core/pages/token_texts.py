"""Token ids as the texts that a page shows, one by one: a dictionary of those that occur.

A tokenizer decodes sequences. Of one token alone it drops the space before a word (SentencePiece), and shows part of a
character as U+FFFD: both are mended here, so that the texts of an answer's tokens, put together, are its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

LOST = "\ufffd"
SPACE = "\u2581"
"""SentencePiece's sign for a space."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's token of a single byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTexts:
    """`TokenTexts(ids=(5, 9), texts=("a", ""), pieces={1: "e282"}, special=(0,))`."""

    ids: tuple[int, ...]
    """Different token ids, ascending; a page names a token by its place here."""
    texts: tuple[str, ...]
    pieces: dict[int, str]
    """Place -> bytes (hex) of a token that is no whole character; the next token goes on with it."""
    special: tuple[int, ...]
    """Places of tokens that are no text: ends of turns, padding."""


NO_TEXTS = TokenTexts(ids=(), texts=(), pieces={}, special=())


def token_texts(model: Path, token_ids: Sequence[NDArray[np.int32]]) -> TokenTexts:
    """The texts of all tokens that occur, by the tokenizer of a Hugging Face directory.

    Raises FileNotFoundError where the directory has no `tokenizer.json`.
    """
    tokenizer = Tokenizer.from_buffer((model / "tokenizer.json").read_bytes())
    ids: list[int] = np.unique(np.concatenate([np.zeros(0, np.int32), *token_ids])).tolist()
    texts: list[str] = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    pieces: dict[int, str] = {}
    for place, token in enumerate(ids):
        name = tokenizer.id_to_token(token)
        if name is None:  # of a vocabulary that is larger than the tokenizer's
            texts[place] = f"[{token}]"
        elif LOST in texts[place] and (raw := _bytes_of(name)) is not None:
            texts[place], pieces[place] = "", raw.hex()
        elif name.startswith(SPACE) and not texts[place].startswith(" "):
            texts[place] = " " * (len(name) - len(name.lstrip(SPACE))) + texts[place].lstrip(" ")
    return TokenTexts(ids=tuple(ids), texts=tuple(texts), pieces=pieces,
                      special=tuple(place for place, token in enumerate(ids) if token in special))


def _bytes_of(name: str) -> bytes | None:
    """The bytes that a token stands for, by its name; None where the name does not say it."""
    if (single := BYTE.fullmatch(name)) is not None:
        return bytes([int(single.group(1), 16)])
    found = [BYTE_OF.get(sign) for sign in name]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def _byte_signs() -> dict[str, int]:
    """The sign that byte-level BPE writes for each byte, as GPT-2 chose them: a printable one for itself, else the next
    of those from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
                 *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_signs()
