"""Random phrasebook sentences, their assignment to training, validation and test, and the files of the package.

python -m tools.phrasebook.generator
"""

import gzip
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal
from zlib import crc32

from regard.errors import RegardError
from tools.phrasebook.grammar import (
    AlignedPair,
    Combination,
    Phrase,
    Sentence,
    adverb_phrase,
    born_clause,
    copular_clause,
    existential_clause,
    name_phrase,
    noun_phrase,
    predicate_adjective,
    prepositional_phrase,
    presentative_clause,
    subject_pronoun,
    time_phrase,
    verb_clause,
)
from tools.phrasebook.lexicon import (
    ADJECTIVES,
    DITRANSITIVE,
    FREQUENCY,
    GROUPS,
    HUMANS,
    INTENSITY,
    INTRANSITIVE,
    KIN,
    MANNER,
    MODALS,
    NAMES,
    NOUNS,
    NUMBERS,
    OBJECT_PRONOUNS,
    PLACE_NOUNS,
    POSSESSIVES,
    QUALITY,
    SENSATIONS,
    TIMES_FUTURE,
    TIMES_PAST,
    TIMES_PRESENT,
    TRANSITIVE,
    Adjective,
    Noun,
    Verb,
)
from tools.phrasebook.morphology import IL, ILS, JE, split_words

_NAMES = tuple(NAMES)
# Weighted: I, you and we have distinct verb forms; he, she and they have those of nouns and names.
_PRONOUNS = ("I", "I", "you", "you", "we", "we", "he", "she", "she", "they")
_FOR_PEOPLE = tuple(adjective for adjective, nouns in ADJECTIVES.items() if set(HUMANS) <= set(nouns))
_EXISTENTIAL_NOUNS = tuple(GROUPS[group] for group in ("PEOPLE", "FRIENDS", "PETS", "WILD", "CLOTHES", "THINGS"))
_DIRECT = tuple(verb for verb in TRANSITIVE if not verb.preposition)
_REPORTED = tuple(verb for verb in (*_DIRECT, *DITRANSITIVE) if not verb.traits & {"state", "present"})
_WITH_PERSON_OBJECT = tuple(verb for verb in TRANSITIVE if "person" in verb.traits)
_PLACES = tuple(PLACE_NOUNS)
_BIRTHPLACES = (
    ("in", "village"),
    ("in", "castle"),
    ("in", "house"),
    ("in", "forest"),
    ("on", "island"),
    ("on", "boat"),
)
_MAX_WORDS = 10  # words of English
_ANY: frozenset[str] = frozenset()
_DEFINITE = frozenset({"definite"})


@cache
def _adjectives(noun: Noun) -> tuple[Adjective, ...]:
    """Adjectives that fit a noun. Those that fit fewer than 20 nouns are listed twice, since they have fewer
    chances."""
    fitting = [adjective for adjective, nouns in ADJECTIVES.items() if noun in nouns]
    return tuple(fitting + [adjective for adjective in fitting if len(ADJECTIVES[adjective]) < 20])


class _SentenceSampler:
    """Samples meaningful sentences. Returns None if a sample is ambiguous or absurd."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.chance: Callable[[], float] = random.random
        self.choice = random.choice
        self.kinds: list[Callable[[], Sentence | None]] = []
        for kind, weight in (
            (self.transitive, 40),
            (self.intransitive, 13),
            (self.with_object_pronoun, 9),
            (self.ditransitive, 9),
            (self.quality, 10),
            (self.sensation, 2),
            (self.existence, 5),
            (self.birth, 2),
            (self.presentation, 10),
        ):
            self.kinds += [kind] * weight

    def sentence(self) -> Sentence | None:
        sentence = self.choice(self.kinds)()
        if sentence is None:
            return None
        names = [word.text for word in sentence.english if word.text in NAMES]
        return sentence if len(names) == len(set(names)) else None  # "Anne sends Anne a letter" is absurd

    # Noun phrases

    def _determiner(self, noun: Noun, plural: bool, definite: bool, indefinite: bool, negated: bool) -> str | Phrase:
        draw = 0.65 + 0.35 * self.chance() if indefinite else self.chance()
        if noun in KIN and not indefinite:
            return self.choice(POSSESSIVES) if draw < 0.6 else self._owner() if draw < 0.75 else "the"
        if draw < 0.20 and noun.owned:
            return self.choice(POSSESSIVES)
        if draw < 0.27 and noun.owned:
            return self._owner()
        if draw < 0.35:
            return "this"
        if draw < 0.65 or definite:
            return "the"
        if draw < 0.85:
            return "a" if noun.countable and not plural else "any" if negated else "some"
        if plural:
            return "many" if draw < 0.89 else "any" if negated else self.choice(NUMBERS)
        if noun.countable:
            return "each" if draw < 0.88 and not negated and not indefinite else "a"
        return "the"

    def _owner(self) -> Phrase:
        if self.chance() < 0.6:
            return name_phrase(self.choice(_NAMES))
        noun = self.choice(HUMANS)
        return noun_phrase(noun, self.choice(POSSESSIVES) if noun in KIN else "the")

    def _noun_phrase(
        self, noun: Noun, described: float, negated: bool = False, traits: frozenset[str] = _ANY
    ) -> Phrase:
        plural = noun.pluralized and "singular" not in traits and self.chance() < 0.42
        adjectives = []
        fitting = _adjectives(noun)
        if fitting and self.chance() < described:
            adjectives.append(self.choice(fitting))
            if adjectives[0].before_noun and self.chance() < 0.3:
                second = self.choice(fitting)
                adjectives += [] if second.before_noun else [second]
        determiner = self._determiner(noun, plural, "definite" in traits, "indefinite" in traits, negated)
        return noun_phrase(noun, determiner, *adjectives, plural=plural, negated=negated)

    def _human_noun_phrase(self) -> Phrase:
        """A person, as the object of a preposition."""
        if self.chance() < 0.4:
            return name_phrase(self.choice(_NAMES))
        return self._noun_phrase(self.choice(HUMANS), traits=_DEFINITE, described=0.1)

    def _subject(self, nouns: tuple[Noun, ...]) -> Phrase:
        draw = self.chance()
        if draw < 0.48:
            return subject_pronoun(self.choice(_PRONOUNS))
        if draw < 0.58:
            return name_phrase(self.choice(_NAMES))
        if draw < 0.62:
            return name_phrase(*self.random.sample(_NAMES, 2))
        return self._noun_phrase(self.choice(nouns), traits=_DEFINITE if self.chance() < 0.85 else _ANY, described=0.2)

    def _place(self) -> Phrase:
        preposition = self.choice(_PLACES)
        noun = self.choice(PLACE_NOUNS[preposition])
        determiner = self.choice(POSSESSIVES) if noun.owned and self.chance() < 0.2 else "the"
        return prepositional_phrase(preposition, noun_phrase(noun, determiner))

    # Sentences with a full verb

    def _verb_sentence(self, verb: Verb, subject: Phrase, *, tail: bool = True, **parts) -> Sentence | None:
        """A sentence with random tense, modality, negation, question and adverbials around a verb and its arguments."""
        traits = verb.traits
        modal = self.choice(MODALS) if self.chance() < 0.15 and not traits & {"past", "state"} else None
        # In the past all verbs share ai, avons, avez; in the present each verb has its own forms to cover.
        share = 0.55 if subject.form in (IL, ILS) else 0.3
        past = not modal and ("past" in traits or ("present" not in traits and self.chance() < share))
        negation = parts.pop("negation", "")
        question = adverb = ""
        after: list[Phrase] = []
        if negation == "never" and modal:
            negation = "not"
        if "past" in traits and subject.form not in (IL, ILS):  # "I died" is absurd
            return None
        if not negation and subject.form != JE and self.chance() < 0.16:  # questions about oneself are odd
            kinds = ["yes-no", "yes-no", "why"]
            kinds += ["where"] * ("place" in traits) + ["when"] * (past and "state" not in traits)
            question = self.choice(kinds)
            if self.chance() < 0.2:
                question, subject = "", subject_pronoun("who")
        elif not negation and not modal and "state" not in traits and self.chance() < 0.1:
            adverb = self.choice(tuple(FREQUENCY))
            if adverb == "already" and not past:
                adverb = "often"
        if not adverb and not modal and "well" in traits and self.chance() < 0.2 and negation != "never":
            adverb = self.choice(tuple(QUALITY))
        if tail and not adverb and question in ("", "yes-no") and negation != "never":
            after = self._adverbials(traits, past, modal is not None)
        # "I read the book" may be present or past.
        if verb.base == verb.past and not modal and not question and negation != "not" and subject.form != IL:
            return None
        return verb_clause(
            subject,
            verb,
            past=past,
            modal=modal,
            negation=negation,
            adverb=adverb,
            question=question,
            tail=after,
            **parts,
        )

    def _adverbials(self, traits: frozenset[str], past: bool, modal: bool) -> list[Phrase]:
        draw = self.chance()
        if draw < 0.2 and "state" not in traits:
            times = TIMES_FUTURE if modal else TIMES_PAST if past else TIMES_PRESENT
            return [time_phrase(self.choice(times[:3] if "reflexive" in traits else times))]
        if draw < 0.38 and "place" in traits:
            return [self._place()]
        if draw < 0.5 and "for" in traits:
            return [prepositional_phrase("for", self._human_noun_phrase())]
        if draw < 0.5 and "with" in traits:
            return [prepositional_phrase("with" if self.chance() < 0.7 else "without", self._human_noun_phrase())]
        if draw < 0.7 and "slowly" in traits:
            return [adverb_phrase(*self.choice(tuple(MANNER.items())))]
        return []

    def _negation(self) -> str:
        draw = self.chance()
        return "not" if draw < 0.16 else "never" if draw < 0.2 else ""

    def transitive(self) -> Sentence | None:
        verb = self.choice(TRANSITIVE)
        subject = self._subject(verb.subjects)
        if not verb.preposition and "person" not in verb.traits and self.chance() < 0.06:  # "What did she buy?"
            return verb_clause(subject, verb, past=self.chance() < 0.5, question="what")
        negation = self._negation()
        noun = self.choice(verb.objects)
        if noun is subject.noun:
            return None
        thing = self._noun_phrase(
            noun,
            described=0.3,
            negated=bool(negation),
            traits=_DEFINITE if negation and verb.preposition and "singular" not in verb.traits else verb.traits,
        )
        return self._verb_sentence(verb, subject, object=thing, negation=negation)

    def intransitive(self) -> Sentence | None:
        verb = self.choice(INTRANSITIVE)
        negation = "" if "past" in verb.traits else self._negation()
        return self._verb_sentence(verb, self._subject(verb.subjects), negation=negation)

    def with_object_pronoun(self) -> Sentence | None:
        """A verb with an object pronoun."""
        verb = self.choice(_WITH_PERSON_OBJECT)
        subject = self._subject(verb.subjects)
        pronoun = self._object_pronoun(subject)
        return self._verb_sentence(verb, subject, pronoun=pronoun, negation=self._negation())

    def _object_pronoun(self, subject: Phrase) -> str:
        """A random object pronoun of another person than the subject ("I see me" is wrong)."""
        same_person = {"I": ("me", "us"), "we": ("me", "us"), "you": ("you",)}.get(subject.english[0].text, ())
        return self.choice([pronoun for pronoun in OBJECT_PRONOUNS if pronoun not in same_person])

    def ditransitive(self) -> Sentence | None:
        verb = self.choice(DITRANSITIVE)
        subject = self._subject(verb.subjects)
        negation = self._negation()
        thing = self._noun_phrase(self.choice(verb.objects), negated=bool(negation), described=0.2)
        if self.chance() < 0.5:
            pronoun = self._object_pronoun(subject)
            return self._verb_sentence(verb, subject, object=thing, negation=negation, pronoun=pronoun, tail=False)
        return self._verb_sentence(
            verb, subject, object=thing, negation=negation, recipient=self._human_noun_phrase(), tail=False
        )

    # Sentences with "be"

    def quality(self) -> Sentence | None:
        if self.chance() < 0.25:
            adjective = self.choice(_FOR_PEOPLE)
            subject = self._subject(HUMANS)
        else:
            adjective, nouns = self.choice(tuple(ADJECTIVES.items()))
            if adjective.english == "new":  # la maison est neuve, but une nouvelle maison
                return None
            subject = self._noun_phrase(self.choice(nouns), traits=_DEFINITE, described=0)
        graded = adjective.graded and self.chance() < 0.25
        intensity = adverb_phrase(*self.choice(tuple(INTENSITY.items()))) if graded else None
        complement = predicate_adjective(subject, adjective, intensity)
        mood = self.chance()
        return copular_clause(subject, complement, past=self.chance() < 0.4, negated=mood < 0.2, question=mood > 0.85)

    def sensation(self) -> Sentence | None:
        complement = adverb_phrase(*self.choice(tuple(SENSATIONS.items())))
        mood = self.chance()
        return copular_clause(
            self._subject(HUMANS),
            complement,
            infinitive="avoir",
            past=self.chance() < 0.4,
            negated=mood < 0.2,
            question=mood > 0.85,
        )

    def existence(self) -> Sentence | None:
        noun = self.choice(self.choice(_EXISTENTIAL_NOUNS))
        plural = self.chance() < 0.5
        determiner = self.choice(("some", "many", *NUMBERS)) if plural else "a"
        adjectives = [self.choice(_adjectives(noun))] if self.chance() < 0.3 else []
        phrase = noun_phrase(noun, determiner, *adjectives, plural=plural)
        return existential_clause(phrase, self._place(), past=self.chance() < 0.4, question=self.chance() < 0.2)

    def birth(self) -> Sentence | None:
        preposition, noun = self.choice(_BIRTHPLACES)
        determiner = self.choice(
            ("the", "a", "this", "my", "your", "our") if noun == "house" else ("the", "the", "a", "this")
        )
        place = prepositional_phrase(preposition, noun_phrase(NOUNS[noun], determiner))
        return born_clause(self._subject(HUMANS), place)

    def presentation(self) -> Sentence | None:
        verb = self.choice(_REPORTED)
        subject = self._subject(verb.subjects)
        noun = self.choice(verb.objects)
        if (verb.base == verb.past and subject.form != IL) or noun is subject.noun or noun in KIN:
            return None
        plural = noun.pluralized and self.chance() < 0.5
        pronoun = self._object_pronoun(subject) if verb in DITRANSITIVE else ""
        return presentative_clause(noun_phrase(noun, "the", plural=plural), subject, verb, pronoun)


@cache
def held_out(combination: Combination) -> bool:
    """Whether a verb-object or adjective-noun combination never occurs in training; about one in eleven.

    >>> held_out(("chase", "mouse")), held_out(("chase", "bird"))
    (True, False)
    """
    # With this salt, "The cat chased the mouse." is not in the training data.
    return crc32(":".join(("0", *combination)).encode()) % 11 == 0


def phrasebook_pairs(split: Literal["train", "val", "test"], count: int, seed: int = 0) -> list[AlignedPair]:
    """Sample `count` different pairs of a split. The split of a sentence does not depend on the seed.

    Training sentences have no held-out combination; test sentences have at least one; validation alternates between
    both. Sentences are assigned to splits by their text, so that no two splits share a sentence.

    >>> phrasebook_pairs("train", 2)[0] == phrasebook_pairs("train", 1)[0]
    True
    """
    if split not in ("train", "val", "test"):
        raise RegardError(f"The phrasebook has no split {split!r}.", hint="Use train, val or test.")
    sampler = _SentenceSampler(Random(f"{split} {seed}"))
    pairs: dict[str, AlignedPair] = {}
    attempts = 0
    while len(pairs) < count:
        attempts += 1
        if attempts > 10_000:
            raise RegardError(
                f"The phrasebook has only {len(pairs)} different {split} sentences.", hint="Request fewer sentences."
            )
        needs_held_out = split == "test" or (split == "val" and len(pairs) % 2 == 1)
        sentence = sampler.sentence()
        if sentence is None or len(sentence.english) > _MAX_WORDS:
            continue
        if any(map(held_out, sentence.combinations)) != needs_held_out:
            continue
        pair = sentence.pair()
        is_validation = crc32(pair.source.encode()) % 10 == 0
        if is_validation == (split == "val") and pair.source not in pairs:
            pairs[pair.source] = pair
            attempts = 0
    return list(pairs.values())


# The parts of the packaged phrasebook, and their numbers of pairs.
FILES: dict[str, tuple[Literal["train", "val", "test"], int]] = {
    "phrasebook.tsv.gz": ("train", 80_000),
    "phrasebook-validation.tsv.gz": ("val", 500),
    "phrasebook-test.tsv.gz": ("test", 1000),
}


def format_line(pair: AlignedPair) -> str:
    """A pair as a line of the file: source, target, and the alignment of its words, separated by white space.

    >>> format_line(AlignedPair("Anne's cat!", "Le chat d'Anne !", ((0, 3), (1, 0), (2, 1), (3, 4))))
    "Anne's cat!\\tLe chat d'Anne !\\t0-0 0-2 1-1 1-3\\n"
    """
    sources, targets = list(_containing_words(pair.source)), list(_containing_words(pair.target))
    links = sorted({(sources[source], targets[target]) for source, target in pair.alignment})
    return f"{pair.source}\t{pair.target}\t{' '.join(f'{source}-{target}' for source, target in links)}\n"


def _containing_words(text: str) -> Iterator[int]:
    """For each word of `split_words`, the index of the word, separated by white space, that contains it."""
    end = 0
    for word in split_words(text):
        end = text.index(word, end) + len(word)
        yield len(text[:end].split()) - 1


def main() -> None:
    for name, (split, count) in FILES.items():
        text = "".join(map(format_line, phrasebook_pairs(split, count)))
        path = Path(__file__).parents[2] / "regard" / "data" / name
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(f"{path}: {count:,} pairs, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
