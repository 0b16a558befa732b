"""Sentence boundaries by rules: end marks of many scripts, with abbreviations, initials and numbers kept in mind."""

import re
from collections.abc import Sequence

# An end mark, with the quotes and brackets that close after it. Full-width marks and those of some scripts always end a
# sentence; the others only before white space and something that can begin one.
_END = re.compile(r"""([。！？｡]+|[.!?…؟۔।॥։።]+)(?:["'”’)\]」』）】]|“(?!\w)|[ \u00a0\u202f]?»)*""")
_NEXT = re.compile(r"""\s+["'“‘«„(\[¿¡—–-]*\s*(\w)""")
_WORD_BEFORE = re.compile(r"[^\s\"'“‘«„(\[]+$")
_ALWAYS = frozenset("。！？｡")
_ABBREVIATIONS = """
    mr mrs ms dr prof st sr jr vs gen col capt lt sgt rev hon pres gov sen rep mt inc ltd corp approx dept
    jan feb mar apr jun jul aug sep sept oct nov dec
    mme mlle mgr cf env ca bzw vgl evtl ggf inkl exkl hr fr sog
    sra srta dra ud uds sig dott avv ing dhr mevr bijv
"""
# Abbreviations only before a number: "No. 5", "fig. 2".
_BEFORE_NUMBERS = "no nr fig vol art p pp pag n num ch sec abb bd kap"
_NEVER_LAST, _LAST_BUT_BEFORE_NUMBERS = frozenset(_ABBREVIATIONS.split()), frozenset(_BEFORE_NUMBERS.split())


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space between them.

    >>> split_sentences("Dr. Smith came at 3.15 p.m. on Monday. He left! 他走了。真的？")
    ['Dr. Smith came at 3.15 p.m. on Monday.', 'He left!', '他走了。', '真的？']
    """
    sentences, start = [], 0
    for end in _END.finditer(text):
        if _is_boundary(text, start, end):
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    return [sentence for sentence in (*sentences, text[start:].strip()) if sentence]


def join_sentences(sentences: Sequence[str]) -> str:
    """Sentences as one text: with a space between them, except after a full-width mark.

    >>> join_sentences(["He left.", "Really?"]), join_sentences(["他走了。", "真的？"])
    ('He left. Really?', '他走了。真的？')
    """
    filled = [sentence.strip() for sentence in sentences if sentence.strip()]
    return "".join(
        sentence if last or sentence[-1] in _ALWAYS else sentence + " "
        for sentence, last in zip(filled, [False] * (len(filled) - 1) + [True])
    )


def _is_boundary(text: str, start: int, end: re.Match[str]) -> bool:
    if end[1][0] in _ALWAYS:
        return True
    following = _NEXT.match(text, end.end())
    if following is None or following[1].islower():
        return False
    return end[1] != "." or not _is_abbreviation(text[max(start, end.start() - 20) : end.start()], following[1])


def _is_abbreviation(before: str, following: str) -> bool:
    """Whether a period after this text belongs to its last word, given the first letter of what follows."""
    found = _WORD_BEFORE.search(before)
    word = found[0].lower() if found else ""
    if following.isdigit() and word in _LAST_BUT_BEFORE_NUMBERS:
        return True
    if word.isdigit():
        return len(word) <= 2  # an ordinal: "am 3. Mai"
    parts = word.split(".")  # "e.g", "z.b", "u.s"
    return word in _NEVER_LAST or (all(len(part) == 1 for part in parts) and word.isascii())
