"""Random sentences, and which of them a model may train on."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Literal
from zlib import crc32

from regard.data.phrasebook.grammar import (
    Combination,
    Pair,
    Phrase,
    Sentence,
    being,
    born,
    clause,
    closing_adverb,
    here_is,
    name,
    noun_phrase,
    predicate,
    prepositional,
    subject_pronoun,
    there_is,
    time,
)
from regard.data.phrasebook.lexicon import (
    ADJECTIVES,
    FREQUENCY,
    GIVING,
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
from regard.data.phrasebook.morphology import IL, ILS, JE
from regard.errors import RegardError

_NAMES = tuple(NAMES)
# Each is a form of the verb to learn; he, she and they share theirs with every noun and name.
_PRONOUNS = ("I", "I", "you", "you", "we", "we", "he", "she", "she", "they")
_FOR_PEOPLE = tuple(adjective for adjective, nouns in ADJECTIVES.items() if set(HUMANS) <= set(nouns))
_FOUND_ANYWHERE = tuple(GROUPS[group] for group in ("PEOPLE", "FRIENDS", "PETS", "WILD", "CLOTHES", "THINGS"))
_DIRECT = tuple(verb for verb in TRANSITIVE if not verb.preposition)
_REPORTED = tuple(verb for verb in (*_DIRECT, *GIVING) if not verb.traits & {"state", "present"})
_ABOUT_PEOPLE = tuple(verb for verb in TRANSITIVE if "person" in verb.traits)
_PLACES = tuple(PLACE_NOUNS)
_BIRTHPLACES = (
    ("in", "village"),
    ("in", "castle"),
    ("in", "house"),
    ("in", "forest"),
    ("on", "island"),
    ("on", "boat"),
)
_LONGEST = 10  # words of English
_ANY: frozenset[str] = frozenset()
_DEFINITE = frozenset({"definite"})


@cache
def _adjectives(noun: Noun) -> tuple[Adjective, ...]:
    """Those that suit a noun, the choosy ones twice: they have fewer nouns to be met with."""
    fitting = [adjective for adjective, nouns in ADJECTIVES.items() if noun in nouns]
    return tuple(fitting + [adjective for adjective in fitting if len(ADJECTIVES[adjective]) < 20])


class _Speaker:
    """Draws sentences that make sense. A draw that would be ambiguous or absurd is None."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.chance: Callable[[], float] = random.random
        self.choice = random.choice
        self.kinds: list[Callable[[], Sentence | None]] = []
        for kind, weight in (
            (self.transitive, 40),
            (self.intransitive, 13),
            (self.about_people, 9),
            (self.giving, 9),
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
        return sentence if len(names) == len(set(names)) else None  # nobody sends letters to themselves

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
            return name(self.choice(_NAMES))
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

    def _human(self) -> Phrase:
        """Somebody, as the object of a preposition."""
        if self.chance() < 0.4:
            return name(self.choice(_NAMES))
        return self._noun_phrase(self.choice(HUMANS), traits=_DEFINITE, described=0.1)

    def _subject(self, nouns: tuple[Noun, ...]) -> Phrase:
        draw = self.chance()
        if draw < 0.48:
            return subject_pronoun(self.choice(_PRONOUNS))
        if draw < 0.58:
            return name(self.choice(_NAMES))
        if draw < 0.62:
            return name(*self.random.sample(_NAMES, 2))
        return self._noun_phrase(self.choice(nouns), traits=_DEFINITE if self.chance() < 0.85 else _ANY, described=0.2)

    def _place(self) -> Phrase:
        preposition = self.choice(_PLACES)
        noun = self.choice(PLACE_NOUNS[preposition])
        determiner = self.choice(POSSESSIVES) if noun.owned and self.chance() < 0.2 else "the"
        return prepositional(preposition, noun_phrase(noun, determiner))

    # What happens

    def _happening(self, verb: Verb, subject: Phrase, *, tail: bool = True, **parts) -> Sentence | None:
        """Tense, mood, negation, question and circumstances around a verb with its subject and objects."""
        traits = verb.traits
        modal = self.choice(MODALS) if self.chance() < 0.15 and not traits & {"past", "state"} else None
        # In the past all verbs share ai, avons, avez; in the present each has forms of its own to be met.
        share = 0.55 if subject.form in (IL, ILS) else 0.3
        past = not modal and ("past" in traits or ("present" not in traits and self.chance() < share))
        negation = parts.pop("negation", "")
        question = adverb = ""
        after: list[Phrase] = []
        if negation == "never" and modal:
            negation = "not"
        if "past" in traits and subject.form not in (IL, ILS):  # nobody tells of their own death
            return None
        if not negation and subject.form != JE and self.chance() < 0.16:  # nobody asks what they do themselves
            asked = ["yes-no", "yes-no", "why"]
            asked += ["where"] * ("place" in traits) + ["when"] * (past and "state" not in traits)
            question = self.choice(asked)
            if self.chance() < 0.2:
                question, subject = "", subject_pronoun("who")
        elif not negation and not modal and "state" not in traits and self.chance() < 0.1:
            adverb = self.choice(tuple(FREQUENCY))
            if adverb == "already" and not past:
                adverb = "often"
        if not adverb and not modal and "well" in traits and self.chance() < 0.2 and negation != "never":
            adverb = self.choice(tuple(QUALITY))
        if tail and not adverb and question in ("", "yes-no") and negation != "never":
            after = self._circumstances(traits, past, modal is not None)
        # "I read the book": today or yesterday? English alone does not tell.
        if verb.base == verb.past and not modal and not question and negation != "not" and subject.form != IL:
            return None
        return clause(
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

    def _circumstances(self, traits: frozenset[str], past: bool, modal: bool) -> list[Phrase]:
        draw = self.chance()
        if draw < 0.2 and "state" not in traits:
            times = TIMES_FUTURE if modal else TIMES_PAST if past else TIMES_PRESENT
            return [time(self.choice(times[:3] if "reflexive" in traits else times))]
        if draw < 0.38 and "place" in traits:
            return [self._place()]
        if draw < 0.5 and "for" in traits:
            return [prepositional("for", self._human())]
        if draw < 0.5 and "with" in traits:
            return [prepositional("with" if self.chance() < 0.7 else "without", self._human())]
        if draw < 0.7 and "slowly" in traits:
            return [closing_adverb(*self.choice(tuple(MANNER.items())))]
        return []

    def _negation(self) -> str:
        draw = self.chance()
        return "not" if draw < 0.16 else "never" if draw < 0.2 else ""

    def transitive(self) -> Sentence | None:
        verb = self.choice(TRANSITIVE)
        subject = self._subject(verb.subjects)
        if not verb.preposition and "person" not in verb.traits and self.chance() < 0.06:  # "What did she buy?"
            return clause(subject, verb, past=self.chance() < 0.5, question="what")
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
        return self._happening(verb, subject, object=thing, negation=negation)

    def intransitive(self) -> Sentence | None:
        verb = self.choice(INTRANSITIVE)
        negation = "" if "past" in verb.traits else self._negation()
        return self._happening(verb, self._subject(verb.subjects), negation=negation)

    def about_people(self) -> Sentence | None:
        """A verb with an object pronoun."""
        verb = self.choice(_ABOUT_PEOPLE)
        subject = self._subject(verb.subjects)
        pronoun = self._object_pronoun(subject)
        return self._happening(verb, subject, pronoun=pronoun, negation=self._negation())

    def _object_pronoun(self, subject: Phrase) -> str:
        """Not the subject's own person: nobody sees me but others."""
        own = {"I": ("me", "us"), "we": ("me", "us"), "you": ("you",)}.get(subject.english[0].text, ())
        return self.choice([pronoun for pronoun in OBJECT_PRONOUNS if pronoun not in own])

    def giving(self) -> Sentence | None:
        verb = self.choice(GIVING)
        subject = self._subject(verb.subjects)
        negation = self._negation()
        thing = self._noun_phrase(self.choice(verb.objects), negated=bool(negation), described=0.2)
        if self.chance() < 0.5:
            pronoun = self._object_pronoun(subject)
            return self._happening(verb, subject, object=thing, negation=negation, pronoun=pronoun, tail=False)
        return self._happening(verb, subject, object=thing, negation=negation, recipient=self._human(), tail=False)

    # What is

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
        intensity = closing_adverb(*self.choice(tuple(INTENSITY.items()))) if graded else None
        complement = predicate(subject, adjective, intensity)
        mood = self.chance()
        return being(subject, complement, past=self.chance() < 0.4, negated=mood < 0.2, question=mood > 0.85)

    def sensation(self) -> Sentence | None:
        complement = closing_adverb(*self.choice(tuple(SENSATIONS.items())))
        mood = self.chance()
        return being(
            self._subject(HUMANS),
            complement,
            infinitive="avoir",
            past=self.chance() < 0.4,
            negated=mood < 0.2,
            question=mood > 0.85,
        )

    def existence(self) -> Sentence | None:
        noun = self.choice(self.choice(_FOUND_ANYWHERE))
        plural = self.chance() < 0.5
        determiner = self.choice(("some", "many", *NUMBERS)) if plural else "a"
        adjectives = [self.choice(_adjectives(noun))] if self.chance() < 0.3 else []
        phrase = noun_phrase(noun, determiner, *adjectives, plural=plural)
        return there_is(phrase, self._place(), past=self.chance() < 0.4, question=self.chance() < 0.2)

    def birth(self) -> Sentence | None:
        preposition, noun = self.choice(_BIRTHPLACES)
        determiner = self.choice(
            ("the", "a", "this", "my", "your", "our") if noun == "house" else ("the", "the", "a", "this")
        )
        return born(self._subject(HUMANS), prepositional(preposition, noun_phrase(NOUNS[noun], determiner)))

    def presentation(self) -> Sentence | None:
        verb = self.choice(_REPORTED)
        subject = self._subject(verb.subjects)
        noun = self.choice(verb.objects)
        if (verb.base == verb.past and subject.form != IL) or noun is subject.noun or noun in KIN:
            return None
        plural = noun.pluralized and self.chance() < 0.5
        pronoun = self._object_pronoun(subject) if verb in GIVING else ""
        return here_is(noun_phrase(noun, "the", plural=plural), subject, verb, pronoun)


@cache
def held_out(combination: Combination) -> bool:
    """Whether a verb and its object, or an adjective and its noun, are kept from training: about one in eleven.

    >>> held_out(("chase", "mouse")), held_out(("chase", "bird"))
    (True, False)
    """
    # With this salt "The cat chased the mouse." is new to every model.
    return crc32(":".join(("0", *combination)).encode()) % 11 == 0


def phrasebook_pairs(split: Literal["train", "val", "test"], count: int, seed: int = 0) -> list[Pair]:
    """Draws `count` different pairs of one split; what belongs to which split depends on no seed.

    train: no held-out combination. test: a held-out combination in every sentence. val: half and half, in turn.
    Sentences are dealt to the splits by their text, so that no two splits ever share one.

    >>> phrasebook_pairs("train", 2)[0] == phrasebook_pairs("train", 1)[0]
    True
    """
    if split not in ("train", "val", "test"):
        raise RegardError(f"The phrasebook has no split named {split!r}.", hint="Ask for train, val or test.")
    speaker = _Speaker(Random(f"{split} {seed}"))
    pairs: dict[str, Pair] = {}
    fruitless = 0
    while len(pairs) < count:
        fruitless += 1
        if fruitless > 10_000:
            raise RegardError(
                f"The phrasebook found no more than {len(pairs)} different {split} sentences.",
                hint="Ask for fewer.",
            )
        wanted = split == "test" or (split == "val" and len(pairs) % 2 == 1)
        sentence = speaker.sentence()
        if sentence is None or len(sentence.english) > _LONGEST or any(map(held_out, sentence.combinations)) != wanted:
            continue
        pair = sentence.pair()
        reserved = crc32(pair.source.encode()) % 10 == 0  # for validation
        if reserved == (split == "val") and pair.source not in pairs:
            pairs[pair.source] = pair
            fruitless = 0
    return list(pairs.values())
