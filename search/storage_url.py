"""Display of a storage's URL without its secrets."""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_plus

_MASK = "***"
_JOURNAL = "journal:"
# Names of options that hold a secret, in any driver: password, passwd, sslpassword, pwd, ...
_SECRET = re.compile(
    r"pass|pwd|secret|token|credential|auth|private|(api|access|account).?key", re.IGNORECASE
)
# An option of a query, and one of a list of keywords (host=... password=...).
_OPTION = re.compile(r"(?<=[?&])([^=&]*)=([^&]*(?:&[^=&]*(?=&|$))*)")
_KEYWORD = re.compile(r"(?<!\w)(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|\"[^\"]*\"|\{[^}]*\}|[^\s;&]*)")
_USER = re.compile(r"[^:/?#]*")
# Shorter secrets would hide half of a sentence; they are hidden only as separate words.
_LONG = 4


def without_password(url: str) -> str:
    """A storage's URL without secrets.

    If a URL is ambiguous, the longer secret counts: everything between the colon after a user's
    name and the last @ is hidden.

    Example:
        >>> without_password("postgresql://ann:secret@host/layers")
        'postgresql://ann:***@host/layers'
        >>> without_password("mysql://host/layers?user=ann&password=se/cret@x&charset=utf8")
        'mysql://host/layers?user=ann&password=***&charset=utf8'
        >>> without_password("sqlite:///a:b@c.db"), without_password("journal:trials@home.log")
        ('sqlite:///a:b@c.db', 'journal:trials@home.log')
    """
    shown, end = "", 0
    for start, stop in _secret_spans(url):
        shown += url[end:start] + _MASK
        end = stop
    return shown + url[end:]


def without_secrets(text: str, url: str) -> str:
    """A text about a storage, such as a driver's error, without the secrets of its URL.

    Example:
        >>> url = "postgresql://ann:hunter%202@host/db"
        >>> without_secrets("no access with 'hunter 2' to postgresql://ann:hunter%202@host/db", url)
        "no access with '***' to postgresql://ann:***@host/db"
    """
    text = text.replace(url, without_password(url))
    secrets = set()
    for start, stop in _secret_spans(url):
        whole = url[start:stop]
        # A driver may split a URL at another place than its author intended.
        for part in (whole, *re.split(r"[@/:?#&=]", whole)):
            for form in (part, unquote(part), unquote_plus(part)):
                secrets |= {form, repr(form)[1:-1]}
    for secret in sorted(secrets - {"", _MASK}, key=len, reverse=True):
        pattern = re.escape(secret)
        text = re.sub(pattern if len(secret) >= _LONG else rf"(?<!\w){pattern}(?!\w)", _MASK, text)
    return text


def _secret_spans(url: str) -> list[tuple[int, int]]:
    """Spans of the secrets, in order and disjoint."""
    spans = _after_user(url)
    for option in _OPTION.finditer(url):
        name, value = unquote_plus(option[1]), unquote_plus(option[2])
        # An option may contain a list of others: odbc_connect=...PWD%3D...
        inner = any(_SECRET.search(keyword[1]) for keyword in _KEYWORD.finditer(value))
        if _SECRET.search(name) or inner:
            spans.append(option.span(2))
    for keyword in _KEYWORD.finditer(url):
        if _SECRET.search(keyword[1]):
            spans.append(keyword.span(2))
    apart: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if apart and start <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(stop, apart[-1][1]))
        else:
            apart.append((start, stop))
    return apart


def _after_user(url: str) -> list[tuple[int, int]]:
    """Span of the password after a user's name, if there is one."""
    scheme = re.match(r"[\w+.-]*:/+", url)
    if url.startswith(_JOURNAL) or re.match(r"sqlite[\w+]*:///", url):
        return []  # a file's path
    user = _USER.match(url, scheme.end() if scheme is not None else 0)
    assert user is not None  # it matches the empty string, too
    start = user.end()
    if url[start : start + 1] != ":" or (scheme is None and "@" not in url[start:]):
        return []
    start += 1
    stop = url.rfind("@", start)
    if stop < 0:  # no host: the password is what is not a port
        end = re.compile(r"[^/?#]*").match(url, start)
        assert end is not None
        return [] if re.fullmatch(r"\d*", end[0]) else [end.span()]
    return [(start, stop)]
