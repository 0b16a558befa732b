"""Finite automaton that finds phrases as whole words in an output, token by token."""

from collections.abc import Sequence
from math import inf

import numpy as np
from jaxtyping import Int

from regard.decode.interruption import check_interruption
from regard.decode.rules.token_texts import TokenTexts

# Character classes of an automaton; the characters of its phrases follow.
_PADDING, _OTHER, _OTHER_JOINING = range(3)


# Numbers in the tables of the size of the vocabulary that an automaton keeps.
_MAX_NUMBERS = 1 << 23


def max_tables(vocab: int) -> int:
    """How many tables of the size of the vocabulary are kept.

    >>> max_tables(32_000)
    262
    """
    return max(16, _MAX_NUMBERS // max(1, vocab))


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
        self.alphabet = sorted(set("".join(phrases)))
        self._build_tables()
        self._can_continue: dict[int, bool] = {}
        self._classes: dict[bytes, Int[np.ndarray, "V L"]] = {}
        self._moves: dict[tuple[int, bytes], tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]] = {}

    def moves(self, state: int, pending: bytes) -> tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]:
        """For every token, the next state and the number of phrases that it completes.

        `pending` are the first bytes of an incomplete character.
        """
        moves = self._moves.get((state, pending))  # other threads may clear the cache
        if moves is None:
            if len(self._moves) >= max_tables(len(self.texts.texts)):
                self._moves.clear()
            moves = self._moves[state, pending] = self._run(state, pending)
        return moves

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
            other = _OTHER_JOINING if self.texts.joins(character) else _OTHER
            kind = self._classes_of.get(" " if character.isspace() else character, other)
            hits += int(self._hits[state, kind])
            state = int(self._next[state, kind])
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

    def _is_boundary(self, before: str, after: str) -> bool:
        return not (self.texts.joins(before) and self.texts.joins(after))

    def _build_tables(self) -> None:
        """The next state, and whether a phrase is found, for each state and character class.

        A state that a character does not extend moves as its failure state does: the longest proper suffix that is a
        state and begins at a word boundary.
        """
        joins = np.array([False, False, True, *map(self.texts.joins, self.alphabet)])
        index = self._classes_of = {character: i for i, character in enumerate(self.alphabet, 3)}
        children: list[list[tuple[int, int]]] = [[] for _ in self.prefixes]
        for prefix, state in self._states.items():
            children[self._states.get(prefix[:-1], 0)].append((index[prefix[-1]], state))
        shape = (len(self.prefixes), len(joins))
        self._next = np.zeros(shape, dtype=np.int32)
        self._hits = np.zeros(shape, dtype=bool)
        self.is_pending = [False] * len(self.prefixes)
        """whether a text that ends with the prefix ends with a phrase, which is found if the word ends here"""
        phrases = {self._states[phrase] for phrase in self.phrases}
        failure = [0] * len(self.prefixes)
        self._next[:2] = joins
        for character, child in children[0]:
            # Inside a word no phrase begins with a character that joins.
            self._next[: 1 if joins[character] else 2, character] = child
            failure[child] = int(joins[character])
        # Short prefixes first, so that failure states are complete.
        for state in sorted(self._states.values(), key=lambda state: len(self.prefixes[state])):
            fallback, prefix = failure[state], self.prefixes[state]
            self.is_pending[state] = state in phrases or self.is_pending[fallback]
            self._next[state], self._hits[state] = self._next[fallback], self._hits[fallback]
            for character, child in children[state]:
                failure[child] = int(self._next[fallback, character])
                self._next[state, character], self._hits[state, character] = child, False
            if self._merge_spaces and prefix.endswith(" ") and " " in index:
                self._next[state, index[" "]], self._hits[state, index[" "]] = state, False
            if self.is_pending[state]:  # a word ends; the next occurrence starts here or later
                self._next[state, ~joins], self._hits[state, ~joins] = self._next[0, ~joins], True
        # A phrase that ends in a character that does not join is found at once.
        found = np.array(self.is_pending)[self._next] & ~joins
        self._next[found], self._hits[found] = 0, True
        self._next[:, _PADDING], self._hits[:, _PADDING] = np.arange(len(self.prefixes)), False

    def _run(self, state: int, pending: bytes) -> tuple[Int[np.ndarray, "V"], Int[np.ndarray, "V"]]:
        check_interruption()
        characters = self.texts.characters(pending)
        classes = self._classes.get(pending)
        if classes is None:
            classes = np.where(characters.joins, _OTHER_JOINING, _OTHER)
            classes[characters.codes < 0] = _PADDING
            alphabet = np.array([*map(ord, self.alphabet), np.iinfo(np.int32).max])
            index = np.searchsorted(alphabet, characters.codes)
            classes = self._classes[pending] = np.where(alphabet[index] == characters.codes, index + 3, classes)
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
