"""Grammar of the phrasebook: builds a sentence in both languages at once, deterministically.

Every French word is created with links to the English words that it translates, so the alignment is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.phrasebook.lexicon import (
    CAN,
    DETERMINERS,
    FREQUENCY,
    NAMES,
    OBJECT_PRONOUNS,
    PREPOSITIONS,
    QUALITY,
    QUESTION_WORDS,
    REFLEXIVE_PRONOUNS,
    SUBJECT_PRONOUNS,
    TIMES,
    WANT,
    Adjective,
    Noun,
    Verb,
)
from tools.phrasebook.morphology import (
    IL,
    ILS,
    IMPERFECT,
    JE,
    conjugate,
    contract,
    elide,
    english_article,
    french_feminine,
    french_plural,
    triggers_elision,
)

Combination = tuple[str, str]


@dataclass(frozen=True)
class AlignedPair:
    """A sentence, its translation, and their word alignment: index pairs into `split_words` of source and target."""

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...]


class Word:
    """A word of a sentence; French words link to the English words that they translate."""

    __slots__ = ("index", "links", "text")

    def __init__(self, text: str, *links: "Word") -> None:
        self.text = text
        self.links = links
        self.index = -1


class Phrase:
    """A part of a sentence. Noun phrases have a noun, the form of the verb that agrees with it, gender and number.
    `combinations` are its adjective-noun and verb-object pairs."""

    __slots__ = ("combinations", "english", "feminine", "form", "french", "noun", "plural")

    def __init__(
        self,
        english: list[Word],
        french: list[Word],
        combinations: Iterable[Combination] = (),
        *,
        noun: Noun | None = None,
        form: int = IL,
        feminine: bool = False,
        plural: bool = False,
    ) -> None:
        self.english, self.french, self.combinations = english, french, list(combinations)
        self.noun, self.form, self.feminine, self.plural = noun, form, feminine, plural


@dataclass(frozen=True)
class Sentence:
    """English and French words in order, adjective-noun and verb-object combinations, and the final punctuation
    mark."""

    english: list[Word]
    french: list[Word]
    combinations: list[Combination]
    mark: str

    def pair(self) -> AlignedPair:
        """The sentence as text in both languages, with elision, contraction, capitalization and punctuation."""
        english = [*self.english, Word(self.mark)]
        french = [*self.french, Word(self.mark, english[-1])]
        for index, word in enumerate(english):
            word.index = index
        source = english[0].text[0].upper() + english[0].text[1:]
        for word in english[1:]:
            source += word.text if word.text in (".", "?", "'s") else " " + word.text
        texts = [elide(word.text, following.text) for word, following in pairwise(french)] + [self.mark]
        target, links, position = "", [], 0
        is_contracted = False  # merged into the previous word, which has the links of both
        for word, text, following in zip(french, texts, [*texts[1:], ""]):
            links += [(link.index, position) for link in word.links]
            if not is_contracted:
                contraction = contract(text, following)
                target += contraction or text
                if contraction:
                    is_contracted = True
                    continue
            is_contracted = False
            position += 1
            if not text.endswith("'") and following not in (".", ""):
                target += " "
        return AlignedPair(source, target[0].upper() + target[1:], tuple(sorted(set(links))))


def subject_pronoun(english: str) -> Phrase:
    """A subject pronoun: "I", "you" and so on; "who" makes a question."""
    french, form, feminine, plural = SUBJECT_PRONOUNS[english]
    word = Word(english)
    return Phrase([word], [Word(french, word)], form=form, feminine=feminine, plural=plural)


def name_phrase(*names: str) -> Phrase:
    """One name, or two joined by "and"; feminine if all of them are."""
    english: list[Word] = []
    french: list[Word] = []
    for text in names:
        if english:
            english.append(Word("and"))
            french.append(Word("et", english[-1]))
        english.append(Word(text))
        french.append(Word(text, english[-1]))
    plural = len(names) > 1
    feminine = all(NAMES[text] for text in names)
    return Phrase(english, french, form=ILS if plural else IL, feminine=feminine, plural=plural)


def noun_phrase(
    noun: Noun,
    determiner: str | Phrase,
    *adjectives: Adjective,
    plural: bool = False,
    negated: bool = False,
) -> Phrase:
    """Determiner, adjectives and noun; the determiner may be an owner ("Anne's dog", le chien d'Anne). The indefinite
    object of a negated verb has "de" (Elle n'a pas de chien); "des" becomes "de" before an adjective."""
    english_noun = Word(noun.english[plural])
    adjective_words = {adjective: Word(adjective.english) for adjective in adjectives}
    described = [*adjective_words.values(), english_noun]
    before = [adjective for adjective in adjectives if adjective.before_noun]

    if isinstance(determiner, Phrase):
        genitive = Word("'s")
        english = [*determiner.english, genitive, *described]
        article = DETERMINERS["the"][4 if plural else 3 if noun.feminine else 2]
        french = [Word(article, genitive)]
        owner = [Word("de", genitive), *determiner.french]
    else:
        forms = DETERMINERS[determiner]
        text, article = forms[plural], forms[4 if plural else 3 if noun.feminine else 2]
        if determiner == "a":
            text = english_article(described[0].text)
        if (negated and determiner == "a") or (article == "des" and before):
            article = "de"
        english = [Word(text), *described]
        french = [Word(part, english[0]) for part in article.split()]
        owner = []

    combinations = list(determiner.combinations) if isinstance(determiner, Phrase) else []
    french_noun = Word(noun.french[plural], english_noun)
    after = []
    for adjective, word in adjective_words.items():
        combinations.append((adjective.english, noun.english[0]))
        inflected = adjective.french[noun.feminine][plural]
        if adjective.before_noun:
            if not (noun.feminine or plural) and triggers_elision(french_noun.text):
                inflected = adjective.before_vowel
            french.append(Word(inflected, word))
        else:
            after.append(Word(inflected, word))
    french += [french_noun, *after, *owner]
    form = ILS if plural else IL
    return Phrase(english, french, combinations, noun=noun, form=form, feminine=noun.feminine, plural=plural)


def prepositional_phrase(preposition: str, phrase: Phrase) -> Phrase:
    """A prepositional phrase: "in the garden", dans le jardin."""
    english = [Word(text) for text in preposition.split()]
    french = [Word(text, *english) for text in PREPOSITIONS[preposition].split()]
    return Phrase(english + phrase.english, french + phrase.french, phrase.combinations)


def time_phrase(english: str) -> Phrase:
    """A time expression: "last week", la semaine dernière."""
    words = [Word(text) for text in english.split()]
    french = []
    for entry in TIMES[english].split():
        text, links = entry.split(":")
        french.append(Word(text, *(words[int(link)] for link in links)))
    return Phrase(words, french)


def adverb_phrase(english: str, french: str) -> Phrase:
    """A single word that keeps its position in both languages, such as an adverb at the end of a sentence."""
    word = Word(english)
    return Phrase([word], [Word(french, word)])


def inflect_participle(participle: str, feminine: bool, plural: bool) -> str:
    """The participle with the ending for its gender and number.

    >>> inflect_participle("vu", True, True), inflect_participle("pris", False, True)
    ('vues', 'pris')
    """
    inflected = french_feminine(participle) if feminine else participle
    return french_plural(inflected) if plural else inflected


def _question_opening(question: str, operator: Word) -> tuple[list[Word], list[Word]]:
    """The opening of a question: an optional question word, and "est-ce que" for the English auxiliary."""
    question_words = [] if question == "yes-no" else [Word(question)]
    french = [Word(QUESTION_WORDS[word.text], word) for word in question_words]
    return [*question_words, operator], [*french, Word("est-ce", operator), Word("que", operator)]


def verb_clause(
    subject: Phrase,
    verb: Verb,
    object: Phrase | None = None,
    *,
    pronoun: str = "",
    recipient: Phrase | None = None,
    past: bool = False,
    modal: Verb | None = None,
    negation: str = "",
    adverb: str = "",
    question: str = "",
    tail: Sequence[Phrase] = (),
) -> Sentence:
    """A sentence with a full verb. `negation` is "not" or "never"; `adverb` is one of frequency or quality; `question`
    is "yes-no" or a question word (with the subject "who" the sentence is a question anyway); `pronoun` is an object
    pronoun."""
    # English: an operator (auxiliary) if the sentence is negated, a question or modal.
    head = WANT if modal is WANT else verb
    inverted = bool(question)
    operator: Word | None = None
    if modal and modal is not WANT:
        operator = Word(modal.base)
        first = Word(verb.base)
    elif inverted or negation == "not":
        operator = Word("did" if past else "does" if subject.form == IL else "do")
        first = Word(head.base)
    else:
        first = Word(head.past if past else head.third if subject.form == IL else head.base)
    main = [first]
    to = Word("to")
    if modal is WANT:
        main += [to, Word(verb.base)]
    particles = [Word(text) for text in verb.particle.split()]
    negator = Word(negation)
    if negation == "not" and modal is CAN and operator:
        operator.text, negator = "cannot", operator

    english, opening = _question_opening(question, operator) if inverted and operator else ([], [])
    english += subject.english
    if operator and not inverted:
        english.append(operator)
    if negation and negator is not operator:
        english.append(negator)
    mid = Word(adverb)
    if adverb in FREQUENCY:
        english.append(mid)
    english += [*main, *particles]

    # French: the finite verb, its clitics and negation, and its complements.
    # A particle translates the preposition if there is one (go to: aller à), otherwise the verb (look for: chercher).
    lexical = [main[-1], *([] if verb.preposition else particles)]
    support = [operator] if operator and not inverted else []  # "does" and "did" become the ending of the finite verb
    clitics = []
    feminine, plural = (subject.feminine, subject.plural) if verb.with_etre else (False, False)
    if verb.reflexive:
        clitics.append(Word(REFLEXIVE_PRONOUNS[subject.form], *lexical))
    if pronoun:
        direct, indirect, *agreement = OBJECT_PRONOUNS[pronoun]
        english.append(Word(pronoun))
        is_direct = object is None and verb.preposition != "à"
        clitics.append(Word(direct if is_direct else indirect, english[-1], *(particles if verb.preposition else ())))
        if is_direct:  # the participle agrees with a preceding direct object
            feminine, plural = agreement
    if modal:
        modal_links = [first, to] if modal is WANT else [operator] if operator else []
        before, finite = [], Word(modal.present[subject.form], *support, *modal_links)
        after = [*clitics, Word(verb.infinitive, *lexical)]
    elif past and verb.infinitive in IMPERFECT:
        before, finite, after = clitics, Word(IMPERFECT[verb.infinitive][subject.form], *support, *lexical), []
    elif past:
        auxiliary = conjugate("être" if verb.with_etre else "avoir")[0][subject.form]
        before, finite = clitics, Word(auxiliary, *support, *lexical)
        after = [Word(inflect_participle(verb.participle, feminine, plural), *lexical)]
    else:
        before, finite, after = clitics, Word(verb.present[subject.form], *support, *lexical), []

    french = opening + subject.french
    if negation:
        french.append(Word("ne", negator))
    french += [*before, finite]
    if negation:
        french.append(Word("pas" if negation == "not" else "jamais", negator))
    if adverb:
        french.append(Word(FREQUENCY.get(adverb) or QUALITY[adverb], mid))
    french += after

    combinations = list(subject.combinations)
    if object:
        english += object.english
        if verb.preposition:
            french.append(Word(verb.preposition, *(particles or lexical)))
        french += object.french
        combinations += object.combinations
        if object.noun:
            combinations.append((verb.name, object.noun.english[0]))
    if adverb in QUALITY:
        english.append(mid)
    if recipient:
        tail = [prepositional_phrase("to", recipient), *tail]
    for phrase in tail:
        english += phrase.english
        french += phrase.french
        combinations += phrase.combinations
    is_question = inverted or subject.english[0].text == "who"
    return Sentence(english, french, combinations, "?" if is_question else ".")


def _be(subject: Phrase, past: bool) -> Word:
    if past:
        return Word("was" if subject.form in (JE, IL) else "were")
    return Word("am" if subject.form == JE else "is" if subject.form == IL else "are")


def copular_clause(
    subject: Phrase,
    complement: Phrase,
    *,
    infinitive: str = "être",
    past: bool = False,
    negated: bool = False,
    question: bool = False,
) -> Sentence:
    """A sentence with "be"; some complements use avoir in French (être fatigué, but avoir faim). The past is
    imperfect."""
    be = _be(subject, past)
    english, french = _question_opening("yes-no", be) if question else ([], [])
    english += subject.english
    french += subject.french
    negator = Word("not")
    finite = Word((IMPERFECT[infinitive] if past else conjugate(infinitive)[0])[subject.form], be)
    if not question:
        english.append(be)
    if negated:
        english.append(negator)
        french += [Word("ne", negator), finite, Word("pas", negator)]
    else:
        french.append(finite)
    combinations = subject.combinations + complement.combinations
    return Sentence(english + complement.english, french + complement.french, combinations, "?" if question else ".")


def predicate_adjective(subject: Phrase, adjective: Adjective, intensity: Phrase | None = None) -> Phrase:
    """A predicate adjective, which agrees with the subject."""
    word = Word(adjective.english)
    french = Word(adjective.french[subject.feminine][subject.plural], word)
    combinations = [(adjective.english, subject.noun.english[0])] if subject.noun else []
    if intensity is None:
        return Phrase([word], [french], combinations)
    return Phrase([*intensity.english, word], [*intensity.french, french], combinations)


def born_clause(subject: Phrase, tail: Phrase) -> Sentence:
    """A sentence with "was born": "She was born on the island.", Elle est née sur l'île."""
    english = [_be(subject, past=True), Word("born")]
    auxiliary = Word(conjugate("être")[0][subject.form], *english)
    participle = Word(inflect_participle("né", subject.feminine, subject.plural), english[1])
    return Sentence(
        subject.english + english + tail.english,
        [*subject.french, auxiliary, participle, *tail.french],
        subject.combinations + tail.combinations,
        ".",
    )


def existential_clause(phrase: Phrase, place: Phrase, *, past: bool = False, question: bool = False) -> Sentence:
    """A sentence with "there is": "There is a cat in the garden.", Il y a un chat dans le jardin."""
    there, be = Word("there"), _be(phrase, past)
    opening = [Word("est-ce", be), Word("que", be)] if question else []
    finite = Word("avait" if past else "a", be)
    return Sentence(
        [*([be, there] if question else [there, be]), *phrase.english, *place.english],
        [*opening, Word("il", there), Word("y", there), finite, *phrase.french, *place.french],
        phrase.combinations + place.combinations,
        "?" if question else ".",
    )


def presentative_clause(phrase: Phrase, subject: Phrase, verb: Verb, pronoun: str = "") -> Sentence:
    """A sentence with "here is": "Here are the letters that I wrote.", Voici les lettres que j'ai écrites. `pronoun` is
    the indirect object."""
    assert phrase.noun is not None
    here, be, that = Word("here"), _be(phrase, past=False), Word("that")
    past, particles = Word(verb.past), [Word(text) for text in verb.particle.split()]
    auxiliary = Word(conjugate("avoir")[0][subject.form], past, *particles)
    participle = Word(inflect_participle(verb.participle, phrase.feminine, phrase.plural), past, *particles)
    recipient = [Word(pronoun)] if pronoun else []
    clitics = [Word(OBJECT_PRONOUNS[word.text][1], word) for word in recipient]
    return Sentence(
        [here, be, *phrase.english, that, *subject.english, past, *particles, *recipient],
        [Word("voici", here, be), *phrase.french, Word("que", that), *subject.french, *clitics, auxiliary, participle],
        [*phrase.combinations, *subject.combinations, (verb.name, phrase.noun.english[0])],
        ".",
    )
