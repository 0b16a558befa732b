"""Finite automaton that finds phrases as whole words in an output, token by token."""

from collections.abc import Sequence
from math import inf

import numpy as np
from jaxtyping import Int

from regard.decode.rules.token_texts import TokenTexts

# Character classes of an automaton; the characters of its phrases follow.
_PADDING, _OTHER, _OTHER_JOINING = range(3)


class PhraseMatcher:
    """Automaton over characters (Aho and Corasick 1975) for one or more phrases, applied to all tokens at once.

    A phrase is found where it begins and ends at a word boundary. A phrase that ends in a letter is found only at the
    next character, so that "cat" is not found in "catalog". Occurrences of a phrase that overlap count once. With
    `merge_spaces`, a space of a phrase matches any number of spaces.

    State 0 is a word boundary, state 1 the inside of a word; every other state is a prefix of a phrase: the longest one
    with which the text ends.

    >>> matcher = PhraseMatcher(["cat"], TokenTexts([b" cat", b"alog", b"."]))
    >>> next_state, hits = matcher.moves(0, b"")
    >>> next_state.tolist(), hits.tolist()
    ([4, 1, 0], [0, 0, 0])
    >>> matcher.prefixes[4], matcher.moves(4, b"")[1].tolist()  # the phrase is found if a space or a period follows
    ('cat', [1, 0, 1])
    """

    def __init__(self, phrases: Sequence[str], texts: TokenTexts, *, merge_spaces: bool = False) -> None:
        self.phrases, self.texts, self._merge_spaces = list(phrases), texts, merge_spaces
        self.prefixes = ["", "", *dict.fromkeys(p[:n] for p in phrases for n in range(1, len(p) + 1))]
        self._states = {prefix: state for state, prefix in enumerate(self.prefixes) if prefix}
        self.is_pending = [self._ends_with_phrase(prefix) for prefix in self.prefixes]
        self.alphabet = sorted(set("".join(phrases)))
        self._build_tables()
        self._can_continue: dict[int, bool] = {}
        self._classes: dict[bytes, Int[np.ndarray, "V L"]] = {}
        self._moves: dict[tuple[int, bytes], tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]] = {}

    def moves(self, state: int, pending: bytes) -> tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]:
        """For every token, the next state and the number of phrases that it completes.

        `pending` are the first bytes of an incomplete character.
        """
        if (state, pending) not in self._moves:
            self._moves[state, pending] = self._run(state, pending)
        return self._moves[state, pending]

    def contains(self, text: str) -> bool:
        """Whether a text contains a phrase as whole words.

        >>> matcher = PhraseMatcher(["cat"], TokenTexts([]))
        >>> matcher.contains("a cat."), matcher.contains("a catalog")
        (True, False)
        """
        state, hits = self.match(text)
        return hits > 0 or self.is_pending[state]

    def match(self, text: str, state: int = 0) -> tuple[int, int]:
        """The state after a text, and how often a phrase is found in it before its end."""
        hits = 0
        for character in text:
            state, hit = self._step(state, " " if character.isspace() else character, self.texts.joins(character))
            hits += hit
        return state, hits

    def clear_caches(self) -> None:
        """Free the tables of the size of the vocabulary; they are computed again when needed."""
        self._classes.clear()
        self._moves.clear()

    def can_continue(self, state: int) -> bool:
        """Whether some token continues a complete phrase to a longer word, so that the phrase is not found."""
        if state not in self._can_continue:
            next_state, hits = self.moves(state, b"")
            others = (hits == 0) & ~np.array(self.is_pending)[next_state]
            self._can_continue[state] = not self.texts.whole_words and bool(others.any())
        return self._can_continue[state]

    def _ends_with_phrase(self, prefix: str) -> bool:
        """Whether a text that ends with this prefix ends with a phrase, found if the word ends here."""
        starts = (len(prefix) - len(phrase) for phrase in self.phrases if prefix.endswith(phrase))
        return any(start == 0 or self._is_boundary(prefix[start - 1], prefix[start]) for start in starts)

    def _is_boundary(self, before: str, after: str) -> bool:
        return not (self.texts.joins(before) and self.texts.joins(after))

    def _step(self, state: int, character: str, joins: bool) -> tuple[int, bool]:
        """The next state, and whether a phrase is found."""
        prefix = self.prefixes[state]
        if self.is_pending[state] and not joins:  # a word ends; the next occurrence starts here or later
            return self._step(0, character, joins)[0], True
        if self._merge_spaces and character == " " and prefix.endswith(" "):
            return state, False
        text = prefix + character
        for start in range(len(text)):
            if start > 0:
                is_boundary = self._is_boundary(text[start - 1], text[start])
            else:
                is_boundary = bool(prefix) or state == 0 or not joins
            if is_boundary and text[start:] in self._states:
                state = self._states[text[start:]]
                if self.is_pending[state] and not joins:
                    return 0, True
                return state, False
        return int(joins), False

    def _build_tables(self) -> None:
        shape = (len(self.prefixes), len(self.alphabet) + 3)
        self._next = np.zeros(shape, dtype=np.int32)
        self._hits = np.zeros(shape, dtype=np.int32)
        others = [(_OTHER, "\0", False), (_OTHER_JOINING, "\0", True)]
        characters = [(i, character, self.texts.joins(character)) for i, character in enumerate(self.alphabet, 3)]
        for state in range(len(self.prefixes)):
            self._next[state, _PADDING] = state
            for index, character, joins in others + characters:
                self._next[state, index], self._hits[state, index] = self._step(state, character, joins)

    def _run(self, state: int, pending: bytes) -> tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]:
        characters = self.texts.characters(pending)
        if pending not in self._classes:
            classes = np.where(characters.joins, _OTHER_JOINING, _OTHER).astype(np.int16)
            classes[characters.codes < 0] = _PADDING
            for index, character in enumerate(self.alphabet, 3):
                classes[characters.codes == ord(character)] = index
            self._classes[pending] = classes
        classes = self._classes[pending]
        states = np.full(len(classes), state, dtype=np.int32)
        hits = np.zeros(len(classes), dtype=np.int32)
        for column in range(classes.shape[1]):
            active = characters.active(column)
            current, character = states[active], classes[active, column]
            hits[active] += self._hits[current, character]
            states[active] = self._next[current, character]
        return states, hits


class RequiredPhrase(PhraseMatcher):
    """A required phrase: an automaton that finds it, and the tokens that produce it.

    Positions of the phrase are those of its UTF-8 text with a leading space: position 0 is before the space, position 1
    before the first character.

    >>> phrase = RequiredPhrase("cat", TokenTexts([b" cat", b" ", b"c", b"at"]))
    >>> phrase.cost[0], phrase.cost[1], phrase.tokens[1]
    (1, 2, [2])
    """

    def __init__(self, phrase: str, texts: TokenTexts) -> None:
        super().__init__([phrase], texts)
        self.phrase, self.text = phrase, b" " + phrase.encode()
        self.starts_anywhere = not texts.joins(phrase[0])
        """Whether the phrase may directly follow a word."""
        self.tokens, self.cost = self._segment()
        self.full_cost = min(self.cost[0], self.cost[1] if self.starts_anywhere else inf)
        """Number of tokens of the phrase after any text; infinite if the vocabulary cannot produce it."""

    @property
    def found_state(self) -> int:
        """The state of a complete phrase whose word has not ended."""
        return len(self.prefixes) - 1

    def position(self, state: int, pending: bytes) -> int | None:
        """The position of a text that ends in this state; None if the phrase cannot begin or continue there."""
        prefix = self.prefixes[state]
        position = 1 + len(prefix.encode())
        is_valid = (prefix or state == 0 or self.starts_anywhere) and self.text[position:].startswith(pending)
        return position + len(pending) if is_valid else None

    def breaks_word(self, state: int) -> bool:
        """Whether the next character of the phrase continues a word, so that no other phrase ends before it."""
        prefix = self.prefixes[state]
        return 0 < len(prefix) < len(self.phrase) and not self._is_boundary(prefix[-1], self.phrase[len(prefix)])

    def _segment(self) -> tuple[list[list[int]], list[float]]:
        """For each position, the tokens that continue the phrase, and the number of tokens to its end.

        These are the tokens into which the tokenizer splits the phrase; elsewhere those of the shortest split.
        """
        end = len(self.text)
        tokens: list[list[int]] = [[] for _ in range(end + 1)]
        for sequence in self.texts.canonical(self.phrase):
            position = end - sum(len(self.texts.texts[token]) for token in sequence)
            for token in sequence:
                if token not in tokens[position]:
                    tokens[position].append(token)
                position += len(self.texts.texts[token])
        cost: list[float] = [inf] * end + [0]
        for position in range(end - 1, -1, -1):
            costs = {
                token: 1 + cost[position + len(self.texts.texts[token])]
                for token in tokens[position] or self.texts.matching(self.text, position)
            }
            cost[position] = min(costs.values(), default=inf)
            if not tokens[position] and cost[position] < inf:
                tokens[position] = [min(costs, key=costs.__getitem__)]
        return tokens, cost
