"""Lexical constraints: phrases that an output must or must not contain.

The search divides the beam among hypotheses by how much of the required phrases they contain: dynamic beam allocation
(Post and Vilar 2018). The phrases are matched in the text of the tokens, as finite automata (Anderson et al. 2017).
"""

import copy
import threading
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from regard.decode.protocol import check_interruption
from regard.decode.token_texts import TokenTexts
from regard.errors import RegardError

# The largest product of column sizes for which columns are combined into one 64-bit key.
_MAX_KEY = 1 << 62


# The largest number of tokens that are planned, one recursive call each.
_MAX_PLAN = 200


# Numbers in the tables of the size of the vocabulary that an automaton keeps.
_MAX_NUMBERS = 1 << 23


# Character classes of an automaton; the characters of its phrases follow.
_PADDING, _OTHER, _OTHER_JOINING = range(3)


class PhraseState(NamedTuple):
    """Progress of one hypothesis: the states of the automata."""

    required: tuple[int, ...]
    missing: tuple[int, ...]
    """How often each required phrase must still be completed."""
    forbidden: int
    pending: bytes
    """The first bytes of a character that is not complete."""


class Moves(NamedTuple):
    """What each token of the vocabulary leads to from one state."""

    next_state: Int[np.ndarray, "V"]
    is_forbidden: Bool[np.ndarray, "V"]
    """Whether the token completes a forbidden phrase."""
    missing: Float[np.ndarray, "V"]
    """`LexicalConstraints.missing_tokens` of the next state."""
    needed: Float[np.ndarray, "V"]
    """`LexicalConstraints.needed_tokens` of the next state."""


class LexicalConstraints:
    """The required and the forbidden phrases of one output; immutable apart from caches, so all threads may share it.

    The output contains each required phrase as often as it is listed, and no forbidden phrase, as whole words and
    regardless of how they are split into tokens. States are numbered; `start_state` is the empty output.

    >>> texts = TokenTexts([b"", b"", b"", b"", b" green", b" tree", b"s", b"."])
    >>> constraints = LexicalConstraints(texts, ["green tree"], ["tree."])
    >>> state = constraints.advance(constraints.advance(constraints.start_state, 4), 5)
    >>> constraints.missing_tokens(constraints.start_state), constraints.missing_tokens(state)
    (2.0, 0.0)
    >>> constraints.moves(state).is_forbidden.tolist().index(True)
    7
    """

    def __init__(self, texts: TokenTexts, required: Sequence[str] = (), forbidden: Sequence[str] = ()) -> None:
        normalized = [_normalize(texts, phrase, "required") for phrase in required]
        self.required = [RequiredPhrase(phrase, texts) for phrase in dict.fromkeys(normalized)]
        self.forbidden = PhraseMatcher(
            [_normalize(texts, phrase, "forbidden") for phrase in forbidden], texts, merge_spaces=True
        )
        self.texts = texts
        for phrase in self.required:
            if phrase.full_cost == inf:
                raise RegardError(
                    f"The required phrase {phrase.phrase!r} cannot be generated: the vocabulary of the model lacks "
                    f"{_describe_unknown(phrase)}.",
                    "Use other words, or leave the phrase out.",
                )
            if self.forbidden.contains(phrase.phrase):
                raise RegardError(
                    f"The required phrase {phrase.phrase!r} contains a forbidden phrase.",
                    "Remove one of the two phrases.",
                )
        missing = tuple(normalized.count(phrase.phrase) for phrase in self.required)
        self._lock = threading.Lock()
        self._states: list[PhraseState] = []
        self._indices: dict[PhraseState, int] = {}
        self._moves: dict[int, Moves] = {}
        self._missing: dict[int, float] = {}
        self._planned: dict[int, float] = {}
        self.start_state = self._index(PhraseState((0,) * len(missing), missing, 0, b""))

    def after(self, prompt: Sequence[int]) -> "LexicalConstraints":
        """The same constraints for an output that continues a prompt. Forbidden phrases may begin in the prompt,
        required ones begin in the output.
        """
        text = b"".join(self.texts.texts[token] for token in prompt).decode(errors="replace")
        inside = int(bool(text) and self.texts.joins(text[-1]))
        forbidden, _ = self.forbidden.match(text)
        if self.forbidden.is_pending[forbidden]:
            forbidden = inside
        start = self._states[0]._replace(required=(inside,) * len(self.required), forbidden=forbidden)
        constraints = copy.copy(self)  # with the same caches
        constraints.start_state = self._index(start)
        return constraints

    def advance(self, state: int, token: int) -> int:
        """The state after a token."""
        return int(self.moves(state).next_state[token])

    def missing_tokens(self, state: int) -> float:
        """Number of tokens that complete the required phrases from this state, one phrase after the other."""
        if state not in self._missing:
            self._missing[state] = self._count_missing(self._states[state])
        return self._missing[state]

    def needed_tokens(self, state: int) -> float:
        """Number of tokens after which the output may be able to end; infinite if it never is.

        A word that would be a forbidden phrase if it ended here must continue.
        """
        forbidden = self._states[state].forbidden
        if not self.forbidden.is_pending[forbidden]:
            return self.missing_tokens(state)
        return max(self.missing_tokens(state), 1) if self.forbidden.can_continue(forbidden) else inf

    def planned_tokens(self, state: int) -> float:
        """Number of tokens of one continuation that satisfies the constraints; infinite if none was found.

        A very long continuation is not checked against the forbidden phrases.
        """
        if self.needed_tokens(state) == inf or self.missing_tokens(state) > _MAX_PLAN:
            return self.needed_tokens(state)
        if state not in self._planned:
            planned = self._plan_phrases(state)
            if planned == inf and self.missing_tokens(state) > 0:  # try another token before the next phrase
                moves = self.moves(state)
                others = np.unique(
                    moves.next_state[~moves.is_forbidden & (moves.missing <= self.missing_tokens(state))]
                )
                planned = min((1 + self._plan_phrases(other) for other in others.tolist()), default=inf)
            self._planned[state] = planned
        return self._planned[state]

    def _plan_phrases(self, state: int) -> float:
        """`planned_tokens` if the next token begins or continues a required phrase."""
        check_interruption()  # the number of plans grows exponentially with the phrases
        missing = self.missing_tokens(state)
        if missing == 0:
            return self.needed_tokens(state)
        best = inf
        for token in self.next_tokens(state):
            following = self._follow(state, token)
            if following is not None and self.missing_tokens(following) < missing:
                best = min(best, 1 + self.planned_tokens(following))
                if best == missing:
                    break
        return best

    def _follow(self, state: int, token: int) -> int | None:
        """The state after a token, without computing the moves of all tokens; None if it is forbidden."""
        current = self._states[state]
        text, pending = self.texts.decode(current.pending, token)
        forbidden, hits = self.forbidden.match(text, current.forbidden)
        states, missing = [], []
        for phrase, phrase_state, count in zip(self.required, current.required, current.missing):
            phrase_state, found = phrase.match(text, phrase_state)
            missing.append(max(count - found, 0))
            states.append(phrase_state if missing[-1] else 0)
        return None if hits else self._index(PhraseState(tuple(states), tuple(missing), forbidden, pending))

    def can_end(self, state: int) -> bool:
        """Whether the output may end here: it has all required phrases and does not end in a forbidden one."""
        return self.needed_tokens(state) == 0

    def missing_phrases(self, state: int) -> list[str]:
        """The required phrases that an output in this state lacks."""
        current = self._states[state]
        found = [int(s == phrase.found_state) for phrase, s in zip(self.required, current.required)]
        return [p.phrase for p, count, done in zip(self.required, current.missing, found) if count > done]

    def next_tokens(self, state: int) -> list[int]:
        """The tokens that begin or continue a missing phrase."""
        current = self._states[state]
        tokens: dict[int, None] = {}
        for phrase, phrase_state, missing in zip(self.required, current.required, current.missing):
            if missing > 0:
                position = phrase.position(phrase_state, current.pending)
                starts = [0] if position is None else [0, position]
                tokens |= dict.fromkeys(token for start in starts for token in phrase.tokens[start])
        return list(tokens)

    def allowed(self, state: int, room: int) -> Bool[np.ndarray, "V"]:
        """The tokens (other than `<eos>`) that are allowed if at most `room` tokens may follow them."""
        moves = self.moves(state)
        is_certain = moves.needed <= room
        if self.required and self.forbidden.phrases:
            # Forbidden phrases may require another token before each token of the required ones.
            is_certain = 2 * moves.needed + 1 <= room
        allowed = ~moves.is_forbidden & is_certain
        if self.required:
            for following in np.unique(moves.next_state[~moves.is_forbidden & ~is_certain]).tolist():
                if self.planned_tokens(following) <= room:
                    allowed |= (moves.next_state == following) & ~moves.is_forbidden
        return allowed

    def check(self, limit: int, prefix: Sequence[int]) -> None:
        """Check that an output of at most `limit` tokens that begins with these tokens can satisfy the constraints."""
        state, has_forbidden = self.start_state, False
        for token in prefix:
            has_forbidden = has_forbidden or bool(self.moves(state).is_forbidden[token])
            state = self.advance(state, token)
        if has_forbidden or self.needed_tokens(state) == inf:
            raise RegardError("A prefix contains a forbidden phrase.", "Remove the phrase, or change the prefix.")
        planned = self.planned_tokens(state)
        if planned == inf:  # the search may still find an output
            planned = self.needed_tokens(state)
        if len(prefix) + planned > limit:
            raise RegardError(
                f"The required phrases ({', '.join(map(repr, self.missing_phrases(state)))}) need {int(planned)} "
                f"tokens; the maximum output length leaves {limit - len(prefix)}.",
                "Raise max_len and max_extra, or require fewer phrases.",
            )

    def moves(self, state: int) -> Moves:
        """The next state for every token of the vocabulary."""
        moves = self._moves.get(state)  # other threads may clear the cache
        if moves is None:
            if len(self._moves) >= max_tables(len(self.texts.texts)):
                self._moves.clear()
            moves = self._moves[state] = self._compute_moves(self._states[state])
        return moves

    def clear_caches(self) -> None:
        """Free the tables of the size of the vocabulary; they are computed again when needed."""
        self._moves.clear()
        for matcher in (self.forbidden, *self.required):
            matcher.clear_caches()

    def _index(self, state: PhraseState) -> int:
        with self._lock:
            if state not in self._indices:
                self._states.append(state)
                self._indices[state] = len(self._states) - 1
            return self._indices[state]

    def _count_missing(self, state: PhraseState) -> float:
        total = 0.0  # if every phrase were started anew
        saved_at_boundary = 0.0  # by phrases that are complete if the word ends here
        savings = [(0.0, False)]  # by continuing one phrase, and whether this continues the current word
        for phrase, phrase_state, missing in zip(self.required, state.required, state.missing):
            if missing == 0:
                continue
            total += missing * phrase.full_cost
            if phrase_state == phrase.found_state:
                saved_at_boundary += phrase.full_cost
            elif (position := phrase.position(phrase_state, state.pending)) is not None:
                breaks_word = phrase.breaks_word(phrase_state) or bool(state.pending)
                savings.append((phrase.full_cost - phrase.cost[position], breaks_word))
        if self.forbidden.is_pending[state.forbidden]:  # the word must not end here
            saved_at_boundary = 0.0
        return total - max(saved + (0 if breaks else saved_at_boundary) for saved, breaks in savings)

    def _compute_moves(self, state: PhraseState) -> Moves:
        check_interruption()
        forbidden, forbidden_hits = self.forbidden.moves(state.forbidden, state.pending)
        characters = self.texts.characters(state.pending)
        columns = [(forbidden, len(self.forbidden.prefixes)), (characters.pending_index, len(characters.pending))]
        for phrase, phrase_state, missing in zip(self.required, state.required, state.missing):
            if missing == 0:
                phrase_states, left = np.zeros_like(forbidden), np.zeros_like(forbidden)
            else:
                phrase_states, hits = phrase.moves(phrase_state, state.pending)
                left = (missing - hits).clip(min=0)
                phrase_states = np.where(left == 0, 0, phrase_states)
            columns += [(phrase_states, len(phrase.prefixes)), (left, missing + 1)]
        first, inverse = _distinct_rows(columns)
        pairs = [column for column, _ in columns[2:]]
        indices = [
            self._index(
                PhraseState(
                    tuple(int(column[i]) for column in pairs[::2]),
                    tuple(int(column[i]) for column in pairs[1::2]),
                    int(forbidden[i]),
                    characters.pending[characters.pending_index[i]],
                )
            )
            for i in first.tolist()
        ]
        missing_counts, needed = (
            np.array([count(index) for index in indices], dtype=np.float32)[inverse]
            for count in (self.missing_tokens, self.needed_tokens)
        )
        return Moves(np.array(indices, dtype=np.int32)[inverse], forbidden_hits > 0, missing_counts, needed)


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


def max_tables(vocab: int) -> int:
    """How many tables of the size of the vocabulary are kept.

    >>> max_tables(32_000)
    262
    """
    return max(16, _MAX_NUMBERS // max(1, vocab))


def _distinct_rows(
    columns: Sequence[tuple[Int[np.ndarray, "V"], int]],
) -> tuple[Int[np.ndarray, "R"], Int[np.ndarray, "V"]]:
    """The first index of each distinct row of a table, and for each row which of these it equals.

    Each column has its number of values.
    """
    key, size = np.zeros(len(columns[0][0]), dtype=np.int64), 1
    for column, count in columns:
        if size * count > _MAX_KEY:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
        key, size = key * count + column, size * count
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _normalize(texts: TokenTexts, phrase: str, kind: str) -> str:
    normalized = texts.normalize(phrase)
    if not normalized:
        raise RegardError(f"A {kind} phrase is empty: {phrase!r}.", "Leave it out, or write at least one word.")
    return normalized


def _describe_unknown(phrase: RequiredPhrase) -> str:
    """The words of a phrase that the vocabulary lacks."""
    words = phrase.phrase.split()
    unknown = [word for word in words if RequiredPhrase(word, phrase.texts).full_cost == inf]
    return ", ".join(map(repr, unknown or words))


class PhraseRules:
    """The phrases of the sentences in B slots, and the states of their K hypotheses during a search."""

    def __init__(self, slots: int, hypotheses: int) -> None:
        self.hypotheses = hypotheses
        self.phrases: list[LexicalConstraints | None] = [None] * slots
        self.limits = [0] * slots
        """maximum number of tokens of each output"""
        self.states: list[list[int | None]] = [[None] * hypotheses] * slots
        """None: ended or unused"""

    def set_slots(
        self, slots: Sequence[int], phrases: Sequence[LexicalConstraints | None], limits: Sequence[int], used: int
    ) -> None:
        """The phrases of new sentences in these slots, of which this many hypotheses are used."""
        for slot, constraints, limit in zip(slots, phrases, limits):
            self.phrases[slot], self.limits[slot] = constraints, limit
            start = None if constraints is None else constraints.start_state
            self.states[slot] = [start] * used + [None] * (self.hypotheses - used)

    def select_slots(self, slots: Sequence[int]) -> None:
        """Keep only these slots."""
        for name in ("phrases", "limits", "states"):
            setattr(self, name, [getattr(self, name)[slot] for slot in slots])

    def release(self, slots: Sequence[int]) -> None:
        """Forget the phrases of these slots."""
        for slot in slots:
            self.phrases[slot], self.states[slot] = None, [None] * self.hypotheses

    def update(
        self,
        parents: Sequence[Sequence[int]] | None,
        tokens: Sequence[Sequence[int]],
        is_live: Sequence[Sequence[bool]],
    ) -> None:
        """Extend hypotheses by tokens. If none of a sentence is live any more, their states stay as they were."""
        for slot, phrases in enumerate(self.phrases):
            if phrases is None or not any(is_live[slot]):
                continue
            old, states = self.states[slot], list[int | None]()
            for k, (token, live) in enumerate(zip(tokens[slot], is_live[slot])):
                state = old[k if parents is None else parents[slot][k]]
                states.append(phrases.advance(state, token) if live and state is not None else None)
            self.states[slot] = states

    def allowed(self, steps: Sequence[int], V: int, ends: Sequence[int]) -> Bool[np.ndarray, "B K V"]:
        """The tokens that are allowed at this step of each slot."""
        allowed = np.ones((len(self.states), self.hypotheses, V), dtype=bool)
        for slot, phrases in enumerate(self.phrases):
            for beam, state in enumerate(self.states[slot]):
                if phrases is not None and state is not None:
                    allowed[slot, beam] = phrases.allowed(state, self.limits[slot] - steps[slot] - 1)
                    allowed[slot, beam, list(ends)] = phrases.can_end(state)
        return allowed

    def refusal_reason(self, slot: int, beam: int, token: int, eos: int) -> str:
        """Why a token is not allowed: "forbidden" or "required"."""
        phrases, state = self.phrases[slot], self.states[slot][beam]
        assert phrases is not None
        assert state is not None
        if token == eos:
            return "required" if phrases.missing_tokens(state) else "forbidden"
        moves = phrases.moves(state)
        is_forbidden = moves.is_forbidden[token] or moves.needed[token] == inf or moves.missing[token] == 0
        return "forbidden" if is_forbidden else "required"

    def can_end(self, slot: int) -> list[bool]:
        """Whether each hypothesis may end."""
        phrases = self.phrases[slot]
        if phrases is None:
            return [True] * self.hypotheses
        return [state is not None and phrases.can_end(state) for state in self.states[slot]]

    def error(self, slot: int) -> RegardError:
        """That no output satisfies the constraints."""
        phrases = self.phrases[slot]
        assert phrases is not None
        required = ", ".join(repr(phrase.phrase) for phrase in phrases.required) or "none"
        forbidden = ", ".join(map(repr, phrases.forbidden.phrases)) or "none"
        return RegardError(
            f"The search found no output that satisfies the constraints (required: {required}; forbidden: "
            f"{forbidden}).",
            "Raise beam or max_len, or use fewer phrases.",
        )

    def missing_tokens(self, slot: int, beam: int, tokens: Sequence[int], eos: int) -> Float[np.ndarray, "C"]:
        """For each token, how many tokens of the required phrases are missing after it."""
        phrases, state = self.phrases[slot], self.states[slot][beam]
        if phrases is None or state is None:
            return np.zeros(len(tokens))
        missing = phrases.moves(state).missing[np.array(tokens, dtype=np.int64)]
        return np.where(np.array(tokens) == eos, phrases.missing_tokens(state), missing)

    def next_tokens(self) -> list[list[list[int]]]:
        """For each hypothesis, the tokens that begin or continue a missing phrase."""
        pairs = zip(self.phrases, self.states)
        return [
            [[] if phrases is None or state is None else phrases.next_tokens(state) for state in states]
            for phrases, states in pairs
        ]


def allocate_beam(
    log_prob: Float[np.ndarray, "C"], missing: Float[np.ndarray, "C"], count: int
) -> Int[np.ndarray, "C2"]:
    """Dynamic beam allocation: indices of the `count` candidates to keep, most important first.

    The candidates with the same number of missing tokens form a bank. The best candidates of all banks come first,
    those with the fewest missing tokens before the others, then the second best of all banks, and so on: each bank has
    the same share of the beam, and what a small bank leaves unused goes to the others.

    >>> allocate_beam(np.array([-1.0, -2.0, -3.0, -9.0, -np.inf]), np.array([1, 1, 1, 0, 0]), 3).tolist()
    [3, 0, 1]
    """
    order = np.argsort(-log_prob, kind="stable")
    order = order[log_prob[order] > -inf]
    banks = missing[order]
    rank = np.zeros(len(order), dtype=np.int64)
    for bank in np.unique(banks):
        rank[banks == bank] = np.arange((banks == bank).sum())
    return order[np.lexsort((banks, rank))][:count]


def check_phrases(
    phrases: Sequence[LexicalConstraints], method: str, limits: Sequence[int], prefixes: Sequence[Sequence[int]] | None
) -> None:
    """Check that each sentence has phrases, and that an output within its limit can satisfy them. Required phrases need
    beam search, and must fit; a prefix must not contain a forbidden phrase.
    """
    if method != "beam" and any(constraints.required for constraints in phrases):
        raise RegardError(f"Required phrases need beam search (got method {method}).", "Use method beam.")
    if len(phrases) != len(limits):
        raise RegardError(
            f"Expected lexical constraints for each sentence: got {len(phrases)} for {len(limits)} sentences.",
            "Pass constraints without phrases for a sentence that has none.",
        )
    for i, (constraints, limit) in enumerate(zip(phrases, limits)):
        constraints.check(limit, () if prefixes is None else prefixes[i])
