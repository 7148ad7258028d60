"""Passwords in URIs: whether there is one, and the URI without it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

OF_USER = re.compile(r"(://[^:/]*:)(?!\d*(?:[/?]|$)).*@")
"""From a URI's user to its host, with what is special left as it is in the password; no port with an @ behind it."""
OF_QUERY = re.compile(r"([?&]password=)[^&#]*", re.IGNORECASE)


def has_password(uri: str) -> bool:
    """Also where it is not escaped, so that the text is no URI."""
    return (OF_USER.search(uri) or OF_QUERY.search(uri)) is not None


def without_password(uri: str) -> str:
    """What may be shown of a text that a person meant for a URI: all between its user and its host is gone."""
    return OF_QUERY.sub(r"\1***", OF_USER.sub(r"\1***@", uri))


def is_uri(uri: str) -> bool:
    """Whether it is one, and `redact` would find its password."""
    try:
        password = urlsplit(uri).password
    except ValueError:
        return False
    return "://" in uri and (password is not None or OF_USER.search(uri) is None)


def redact(uri: str) -> str:
    """The URI without its password: `postgresql://me:pw@host/db` -> `postgresql://me:***@host/db`; also one in the
    query."""
    uri = OF_QUERY.sub(r"\1***", uri)
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def redact_in(text: str, uri: str) -> str:
    """`text` with every occurrence of the URI, and of its password, made harmless."""
    password = urlsplit(uri).password
    text = text.replace(uri, redact(uri))
    return text.replace(password, "***") if password else text
