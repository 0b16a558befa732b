"""Rule-based sentence splitter: end marks of many scripts, with exceptions for abbreviations, initials and numbers."""

import re
from collections.abc import Sequence

# An end mark with the closing quotes and brackets after it. Full-width marks always end a sentence; the others only
# before white space and a possible start of a sentence.
_END = re.compile(r"""([。！？｡]+|[.!?…؟۔।॥։።]+)(?:["'”’)\]」』）】]|“(?!\w)|[ \u00a0\u202f]?»)*""")
_NEXT = re.compile(r"""\s+["'“‘«„(\[¿¡—–-]*\s*(\w)""")
_WORD_BEFORE = re.compile(r"[^\s\"'“‘«„(\[]+$")
_FULL_WIDTH_MARKS = frozenset("。！？｡")
_ABBREVIATIONS = """
    mr mrs ms dr prof st sr jr vs gen col capt lt sgt rev hon pres gov sen rep mt inc ltd corp approx dept
    jan feb mar apr jun jul aug sep sept oct nov dec
    mme mlle mgr cf env ca bzw vgl evtl ggf inkl exkl hr fr sog
    sra srta dra ud uds sig dott avv ing dhr mevr bijv
"""
# Abbreviations only if a number follows: "No. 5", "fig. 2".
_BEFORE_NUMBERS = "no nr fig vol art p pp pag n num ch sec abb bd kap"
_ABBREVIATION_SET, _BEFORE_NUMBER_SET = frozenset(_ABBREVIATIONS.split()), frozenset(_BEFORE_NUMBERS.split())


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, without the white space between them.

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
    """Join sentences into one text, with a space between them except after a full-width mark.

    >>> join_sentences(["He left.", "Really?"]), join_sentences(["他走了。", "真的？"])
    ('He left. Really?', '他走了。真的？')
    """
    stripped = [sentence.strip() for sentence in sentences if sentence.strip()]
    return "".join(
        sentence if is_last or sentence[-1] in _FULL_WIDTH_MARKS else sentence + " "
        for sentence, is_last in zip(stripped, [False] * (len(stripped) - 1) + [True])
    )


def _is_boundary(text: str, start: int, end: re.Match[str]) -> bool:
    if end[1][0] in _FULL_WIDTH_MARKS:
        return True
    following = _NEXT.match(text, end.end())
    if following is None or following[1].islower():
        return False
    return end[1] != "." or not _is_abbreviation(text[max(start, end.start() - 20) : end.start()], following[1])


def _is_abbreviation(before: str, following: str) -> bool:
    """Whether a period after this text is part of an abbreviation, given the first letter of the next word."""
    match = _WORD_BEFORE.search(before)
    word = match[0].lower() if match else ""
    if following.isdigit() and word in _BEFORE_NUMBER_SET:
        return True
    if word.isdigit():
        return len(word) <= 2  # an ordinal: "am 3. Mai"
    parts = word.split(".")  # "e.g", "z.b", "u.s"
    return word in _ABBREVIATION_SET or (all(len(part) == 1 for part in parts) and word.isascii())
