"""Pages of a run: what is in the file is text, and only its own script may run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from rl_core.pages.page import asset, page, text

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028\u2029 \ud83d"


class Elements(HTMLParser):
    """Elements of a document with their attributes, and what stands in each, as a parser finds them."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.open = False
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, attrs, said = self.found[-1]
            self.found[-1] = (tag, attrs, said + data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, said) for name, attrs, said in self.found if name == tag]


def data_of(document: str) -> Any:
    (raw,) = (said for attrs, said in Elements(document).of("script") if attrs.get("id") == "data")
    return json.loads(raw)


def test_its_policy_admits_its_own_script_and_style_by_their_digests_and_no_host() -> None:
    made = Elements(page("A run", style="p { color: red }\n", script="document.title = 'ran'\n", data={"a": 1}))
    (policy,) = (attrs["content"] for attrs, _ in made.of("meta") if "http-equiv" in attrs)
    assert policy is not None
    rules = {name: words for name, *words in map(str.split, policy.split(";"))}
    inline = {"style": made.of("style")[0][1], "script": made.of("script")[1][1]}
    digests = {tag: base64.b64encode(hashlib.sha256(said.encode()).digest()).decode() for tag, said in inline.items()}
    assert rules == {"default-src": ["'none'"], "base-uri": ["'none'"], "form-action": ["'none'"],
                     "img-src": ["data:"], "style-src": [f"'sha256-{digests['style']}'"],
                     "script-src": [f"'sha256-{digests['script']}'"]}


def test_hostile_text_ends_no_element_and_comes_back_as_it_was() -> None:
    document = page(HOSTILE, body=f'<p title="{text(HOSTILE)}">{text(HOSTILE)}</p>', script="0", data={
        "answer": HOSTILE, HOSTILE: [HOSTILE]})
    document.encode("utf-8")
    made = Elements(document)
    assert [tag for tag, _, _ in made.found if tag in ("script", "img", "p", "title")] == [
        "title", "p", "script", "script"]
    shown = HOSTILE.replace("\ud83d", "\ufffd")
    ((attrs, said),) = made.of("p")
    assert attrs == {"title": shown} and said == shown
    assert data_of(document) == {"answer": HOSTILE, HOSTILE: [HOSTILE]}
    raw = document.split('id="data">')[1].split("</script>")[0]
    assert not re.search("[<>&\u2028\u2029]", raw)


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    assert data_of(page("x", data={"gap": [math.nan, math.inf, 1.5], "of": {"a": -math.inf}})) == {
        "gap": [None, None, 1.5], "of": {"a": None}}


def test_without_data_or_script_there_is_no_script_at_all() -> None:
    document = page("x", body="<p>only text</p>")
    assert "<script" not in document and "script-src" not in document


@pytest.mark.parametrize("wrong", ["a = '</script>'", "a = '</SCRIPT'", "a = '<!--'", "a = '<script'", "a\r\nb"])
def test_a_script_that_the_parser_would_cut_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="two pieces"):
        page("x", script=wrong)


def test_what_lies_beside_it_is_read_and_follows_the_scheme_of_the_reader() -> None:
    assert "prefers-color-scheme: dark" in asset("page.css")
    assert "prefers-color-scheme: dark" in page("x")
    with pytest.raises(FileNotFoundError):
        asset("nothing.js")
