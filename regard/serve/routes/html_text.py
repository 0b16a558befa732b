"""The texts of an HTML fragment, which are translated, and its markup, which is kept."""

import html
import re
from collections.abc import Callable

# Tags, comments, and elements whose content is not text.
_MARKUP = re.compile(r"(?is)<!--.*?-->|<(script|style|code|pre)\b[^>]*>.*?</\1\s*>|<[^<>]*>")


def split_html(source: str) -> tuple[list[str], Callable[[list[str]], str]]:
    """The texts between the tags of a fragment, and a function that puts their translations in their places.

    >>> texts, join = split_html("<p>The cat <b>sleeps</b> &amp; eats.</p>")
    >>> texts, join(["LE CHAT", "DORT", "& MANGE."])
    (['The cat', 'sleeps', '& eats.'], '<p>LE CHAT <b>DORT</b> &amp; MANGE.</p>')
    """
    parts: list[tuple[str, bool]] = []
    end = 0
    for match in _MARKUP.finditer(source):
        parts += [(source[end : match.start()], True), (match[0], False)]
        end = match.end()
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
