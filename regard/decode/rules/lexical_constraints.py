"""Lexical constraints: phrases that an output must or must not contain.

The search divides the beam among hypotheses by how much of the required phrases they contain: dynamic beam allocation
(Post and Vilar 2018). The phrases are matched in the text of the tokens, as finite automata (Anderson et al. 2017).
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from regard.decode.interruption import check_interruption
from regard.decode.rules.phrase_matcher import PhraseMatcher, RequiredPhrase, max_tables
from regard.decode.rules.token_texts import TokenTexts
from regard.errors import RegardError

# The largest product of column sizes for which columns are combined into one 64-bit key.
_MAX_KEY = 1 << 62
# The largest number of tokens that are planned, one recursive call each.
_MAX_PLAN = 200


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
            for one in np.unique(moves.next_state[~moves.is_forbidden & ~is_certain]).tolist():
                if self.planned_tokens(one) <= room:
                    allowed |= (moves.next_state == one) & ~moves.is_forbidden
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


@dataclass(frozen=True)
class LexicalTracker:
    """The lexical constraints of B sentences and the states of their hypotheses during a search."""

    constraints: list[LexicalConstraints]
    limits: list[int]
    """Maximum number of tokens of each output."""
    states: list[list[int | None]]
    """For each sentence the states of its K hypotheses; None: ended or unused."""

    @classmethod
    def start(
        cls, constraints: Sequence[LexicalConstraints], limits: Sequence[int], prefixes: Sequence[Sequence[int]]
    ) -> "LexicalTracker":
        """One hypothesis per sentence. Required phrases that do not fit, or a prefix that contains a forbidden phrase,
        are errors.
        """
        if len(constraints) != len(limits):
            raise RegardError(
                f"Expected lexical constraints for each sentence: got {len(constraints)} for {len(limits)} sentences.",
                "Pass constraints without phrases for a sentence that has none.",
            )
        for constraint, limit, prefix in zip(constraints, limits, prefixes):
            constraint.check(limit, prefix)
        return cls(list(constraints), list(limits), [[constraint.start_state] for constraint in constraints])

    def select_sentences(self, rows: Sequence[int]) -> "LexicalTracker":
        """The tracker of these sentences."""
        return LexicalTracker(
            [self.constraints[row] for row in rows],
            [self.limits[row] for row in rows],
            [self.states[row] for row in rows],
        )

    def repeat(self, K: int) -> "LexicalTracker":
        """K hypotheses per sentence, all with the state of its first."""
        return replace(self, states=[states[:1] * K for states in self.states])

    def advance(
        self, parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], is_live: Sequence[Sequence[bool]]
    ) -> "LexicalTracker":
        """The tracker after each new hypothesis that is live has extended its parent by a token."""
        states: list[list[int | None]] = []
        for constraint, old, sentence in zip(self.constraints, self.states, zip(parents, tokens, is_live)):
            states.append(
                [
                    constraint.advance(state, token) if live and (state := old[parent]) is not None else None
                    for parent, token, live in zip(*sentence)
                ]
            )
        return replace(self, states=states)

    def allowed(self, t: int, V: int, eos: int) -> Bool[np.ndarray, "B K V"]:
        """The tokens that are allowed at position t of each hypothesis."""
        allowed = np.ones((len(self.states), len(self.states[0]), V), dtype=bool)
        for row, (constraint, states) in enumerate(zip(self.constraints, self.states)):
            for beam, state in enumerate(states):
                if state is not None:
                    allowed[row, beam] = constraint.allowed(state, self.limits[row] - t - 1)
                    allowed[row, beam, eos] = constraint.can_end(state)
        return allowed

    def refusal_reason(self, row: int, beam: int, token: int, eos: int) -> str:
        """Why a token is not allowed: "forbidden" or "required"."""
        constraint, state = self.constraints[row], self.states[row][beam]
        assert state is not None
        if token == eos:
            return "required" if constraint.missing_tokens(state) else "forbidden"
        moves = constraint.moves(state)
        is_forbidden = moves.is_forbidden[token] or moves.needed[token] == inf or moves.missing[token] == 0
        return "forbidden" if is_forbidden else "required"

    def can_end(self, stuck: Sequence[bool]) -> list[list[bool]]:
        """Whether each hypothesis may end. If none of a sentence may, although it is stuck, this is an error."""
        pairs = zip(self.constraints, self.states)
        valid = [[state is not None and constraint.can_end(state) for state in states] for constraint, states in pairs]
        for constraint, is_stuck, can_end in zip(self.constraints, stuck, valid):
            if is_stuck and not any(can_end):
                required = ", ".join(repr(phrase.phrase) for phrase in constraint.required) or "none"
                forbidden = ", ".join(map(repr, constraint.forbidden.phrases)) or "none"
                raise RegardError(
                    f"The search found no output that satisfies the constraints (required: {required}; forbidden: "
                    f"{forbidden}).",
                    "Raise beam or max_len, or use fewer phrases.",
                )
        return valid

    def missing_tokens(self, row: int, beam: int, tokens: Sequence[int], eos: int) -> Float[np.ndarray, "C"]:
        """For each token, how many tokens of the required phrases are missing after it."""
        constraint, state = self.constraints[row], self.states[row][beam]
        if state is None:
            return np.zeros(len(tokens))
        missing = constraint.moves(state).missing[np.array(tokens, dtype=np.int64)]
        return np.where(np.array(tokens) == eos, constraint.missing_tokens(state), missing)

    def next_tokens(self) -> list[list[list[int]]]:
        """For each hypothesis, the tokens that begin or continue a missing phrase."""
        pairs = zip(self.constraints, self.states)
        return [[[] if s is None else constraint.next_tokens(s) for s in states] for constraint, states in pairs]


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


def check_no_required(constraints: Sequence[LexicalConstraints] | None, method: str) -> None:
    """Check that there are no required phrases, for methods other than beam search."""
    for constraint in constraints or ():
        if constraint.required:
            raise RegardError(
                f"Required phrases need beam search (got method {method}).",
                "Use method beam.",
            )
