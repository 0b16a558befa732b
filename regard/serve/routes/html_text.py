"""The texts of an HTML fragment, which are translated, and its markup, which is kept."""

import html
import re
from collections.abc import Callable, Iterator

# The start of a comment, or of an element whose content is not text; or a tag.
_START = re.compile(r"(?i)<!--|<(script|style|code|pre)\b[^>]*>|<[^<>]*>")
_TAG = re.compile(r"<[^<>]*>")


def _find_markup(source: str) -> Iterator[tuple[int, int]]:
    """The start and the end of each piece of markup. The time is linear: an end that is missing is searched once."""
    position = 0
    missing: set[str] = set()
    while match := _START.search(source, position):
        start, position = match.span()
        end = r"-->" if match[0] == "<!--" else rf"</{match[1].lower()}\s*>" if match[1] else ""
        closing = re.compile(f"(?i){end}").search(source, position) if end and end not in missing else None
        if closing is not None:
            position = closing.end()
        elif end:  # not closed: only its tag, if it has one, is markup
            missing.add(end)
            tag = _TAG.match(source, start)
            position = start + 1 if tag is None else tag.end()
            if tag is None:
                continue
        yield start, position


def split_html(source: str) -> tuple[list[str], Callable[[list[str]], str]]:
    """The texts between the tags of a fragment, and a function that puts their translations in their places.

    >>> texts, join = split_html("<p>The cat <b>sleeps</b> &amp; eats.</p>")
    >>> texts, join(["LE CHAT", "DORT", "& MANGE."])
    (['The cat', 'sleeps', '& eats.'], '<p>LE CHAT <b>DORT</b> &amp; MANGE.</p>')
    """
    parts: list[tuple[str, bool]] = []
    end = 0
    for start, stop in _find_markup(source):
        parts += [(source[end:start], True), (source[start:stop], False)]
        end = stop
    parts.append((source[end:], True))
    texts = [html.unescape(part).strip() for part, is_text in parts if is_text and part.strip()]

    def join(translations: list[str]) -> str:
        rest = iter(translations)
        result = []
        for part, is_text in parts:
            if is_text and part.strip():
                before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
                part = before + html.escape(next(rest), quote=False) + after
            result.append(part)
        return "".join(result)

    return texts, join
