"""The generator of the phrasebook: correct French, gold alignments, held-out combinations outside of training."""

import gzip
import re
from collections import defaultdict
from pathlib import Path

import pytest

import regard
from regard.data.text.readers import read_aligned_pairs
from regard.errors import RegardError
from tools.phrasebook import grammar as g
from tools.phrasebook.generator import FILES, format_line, held_out, phrasebook_pairs
from tools.phrasebook.grammar import AlignedPair
from tools.phrasebook.lexicon import (
    ADJECTIVES,
    CAN,
    DETERMINERS,
    DITRANSITIVE,
    INTRANSITIVE,
    MUST,
    NAMES,
    NOUNS,
    SENSATIONS,
    TIMES,
    TRANSITIVE,
    WANT,
    count_lemmas,
)
from tools.phrasebook.morphology import conjugate, english_past, english_plural, split_words

VERBS = {verb.name: verb for verb in (*INTRANSITIVE, *DITRANSITIVE, *TRANSITIVE)}
PARTIR = next(verb for verb in INTRANSITIVE if verb.name == "leave")
ADJECTIVE = {adjective.english: adjective for adjective in ADJECTIVES}


def parse_noun_phrase(text: str, **options) -> g.Phrase:
    """ "the small mouse" or "Anne's dog"; a plural is marked by a star: "the mouse*"."""
    determiner, *adjectives, noun = text.split()
    plural = noun.endswith("*")
    owner = g.name_phrase(determiner[:-2]) if determiner.endswith("'s") else determiner
    chosen = [ADJECTIVE[adjective] for adjective in adjectives]
    return g.noun_phrase(NOUNS[noun.rstrip("*")], owner, *chosen, plural=plural, **options)


def parse_subject(text: str) -> g.Phrase:
    names = text.split(" and ")
    return (
        g.name_phrase(*names)
        if names[0] in NAMES
        else g.subject_pronoun(text)
        if " " not in text
        else parse_noun_phrase(text)
    )


def make_clause(subject: str, verb: str, thing: str = "", **options) -> g.Sentence:
    phrase = parse_noun_phrase(thing, negated="negation" in options) if thing else None
    return g.verb_clause(parse_subject(subject), VERBS[verb], phrase, **options)


def near(preposition: str, thing: str) -> g.Phrase:
    return g.prepositional_phrase(preposition, parse_noun_phrase(thing))


def quality(subject: str, adjective: str, **options) -> g.Sentence:
    phrase = parse_subject(subject)
    return g.copular_clause(phrase, g.predicate_adjective(phrase, ADJECTIVE[adjective]), **options)


def sensation(subject: str, english: str, **options) -> g.Sentence:
    complement = g.adverb_phrase(english, SENSATIONS[english])
    return g.copular_clause(parse_subject(subject), complement, infinitive="avoir", **options)


# A sentence, its English text, its French text.
SENTENCES = [
    # Articles, gender, number; passé composé with avoir
    (
        make_clause("the cat", "chase", "the mouse", past=True),
        "The cat chased the mouse.",
        "Le chat a chassé la souris.",
    ),
    (make_clause("the cat*", "chase", "the mouse*"), "The cats chase the mice.", "Les chats chassent les souris."),
    (make_clause("we", "eat", "the apple*"), "We eat the apples.", "Nous mangeons les pommes."),
    (make_clause("we", "throw", "the ball"), "We throw the ball.", "Nous lançons la balle."),
    (make_clause("she", "buy", "some water"), "She buys some water.", "Elle achète de l'eau."),
    (make_clause("she", "drink", "some milk", past=True), "She drank some milk.", "Elle a bu du lait."),
    (make_clause("they", "clean", "a knife"), "They clean a knife.", "Ils nettoient un couteau."),
    (make_clause("I", "open", "the door"), "I open the door.", "J'ouvre la porte."),
    (
        make_clause("you", "choose", "many hat*", past=True),
        "You chose many hats.",
        "Vous avez choisi beaucoup de chapeaux.",
    ),
    # Elision, h aspiré, forms before a vowel
    (make_clause("the owl", "see", "the axe"), "The owl sees the axe.", "Le hibou voit la hache."),
    (make_clause("the hero", "read", "the story"), "The hero reads the story.", "Le héros lit l'histoire."),
    (
        make_clause("this man", "lose", "my scarf", past=True),
        "This man lost my scarf.",
        "Cet homme a perdu mon écharpe.",
    ),
    (make_clause("he", "see", "a beautiful bird"), "He sees a beautiful bird.", "Il voit un bel oiseau."),
    (make_clause("he", "see", "the old tree*"), "He sees the old trees.", "Il voit les vieux arbres."),
    (make_clause("I", "love", "my old friend"), "I love my old friend.", "J'aime mon vieil ami."),
    (
        make_clause("she", "buy", "a new computer", past=True),
        "She bought a new computer.",
        "Elle a acheté un nouvel ordinateur.",
    ),
    # Adjectives around the noun
    (
        make_clause("he", "sell", "a small red car", past=True),
        "He sold a small red car.",
        "Il a vendu une petite voiture rouge.",
    ),
    (
        make_clause("Marie", "wear", "some white shoe*"),
        "Marie wears some white shoes.",
        "Marie porte des chaussures blanches.",
    ),
    (make_clause("Marie", "have", "some new shoe*"), "Marie has some new shoes.", "Marie a de nouvelles chaussures."),
    (quality("the nurse*", "happy"), "The nurses are happy.", "Les infirmières sont heureuses."),
    (quality("the soup", "cold", past=True), "The soup was cold.", "La soupe était froide."),
    (quality("you", "tired", negated=True), "You are not tired.", "Vous n'êtes pas fatigués."),
    (quality("Marie and Paul", "proud"), "Marie and Paul are proud.", "Marie et Paul sont fiers."),
    # Contraction and owners
    (make_clause("the child", "go to", "the market"), "The child goes to the market.", "L'enfant va au marché."),
    (make_clause("he", "speak to", "the girl*"), "He speaks to the girls.", "Il parle aux filles."),
    (make_clause("she", "play", "the piano"), "She plays the piano.", "Elle joue du piano."),
    (make_clause("I", "look for", "Anne's dog"), "I look for Anne's dog.", "Je cherche le chien d'Anne."),
    (
        make_clause("the cat", "sleep", tail=[near("near", "the bed")]),
        "The cat sleeps near the bed.",
        "Le chat dort près du lit.",
    ),
    # Negation
    (
        make_clause("the cat", "chase", "the mouse", past=True, negation="not"),
        "The cat did not chase the mouse.",
        "Le chat n'a pas chassé la souris.",
    ),
    (make_clause("he", "have", "a dog", negation="not"), "He does not have a dog.", "Il n'a pas de chien."),
    (
        make_clause("we", "eat", "any egg*", negation="never"),
        "We never eat any eggs.",
        "Nous ne mangeons jamais d'œufs.",
    ),
    (make_clause("you", "swim", modal=CAN, negation="not"), "You cannot swim.", "Vous ne pouvez pas nager."),
    # Être in the passé composé; reflexive verbs
    (make_clause("Marie and Anne", "arrive", past=True), "Marie and Anne arrived.", "Marie et Anne sont arrivées."),
    (
        make_clause("she", "enter", "the kitchen", past=True),
        "She entered the kitchen.",
        "Elle est entrée dans la cuisine.",
    ),
    (
        g.verb_clause(parse_subject("we"), PARTIR, past=True, tail=[g.time_phrase("last year")]),
        "We left last year.",
        "Nous sommes partis l'année dernière.",
    ),
    (make_clause("the girl*", "get up", past=True), "The girls got up.", "Les filles se sont levées."),
    (make_clause("I", "get up", modal=WANT), "I want to get up.", "Je veux me lever."),
    (
        g.born_clause(parse_subject("the queen"), near("on", "the island")),
        "The queen was born on the island.",
        "La reine est née sur l'île.",
    ),
    # Object pronouns and the participle's agreement
    (make_clause("I", "see", pronoun="them", past=True), "I saw them.", "Je les ai vus."),
    (make_clause("he", "wait for", pronoun="her", past=True), "He waited for her.", "Il l'a attendue."),
    (make_clause("he", "answer", pronoun="her", past=True), "He answered her.", "Il lui a répondu."),
    (make_clause("Luc", "help", pronoun="us", modal=MUST), "Luc must help us.", "Luc doit nous aider."),
    (
        make_clause("she", "give", "the book", pronoun="them", past=True),
        "She gave them the book.",
        "Elle leur a donné le livre.",
    ),
    (
        make_clause("he", "send", "the letter", recipient=parse_noun_phrase("the king*")),
        "He sends the letter to the kings.",
        "Il envoie la lettre aux rois.",
    ),
    (
        g.presentative_clause(parse_noun_phrase("the letter*"), parse_subject("I"), VERBS["write"]),
        "Here are the letters that I wrote.",
        "Voici les lettres que j'ai écrites.",
    ),
    (
        g.presentative_clause(parse_noun_phrase("the apple"), parse_subject("Anne"), VERBS["give"], "me"),
        "Here is the apple that Anne gave me.",
        "Voici la pomme qu'Anne m'a donnée.",
    ),
    # Questions
    (make_clause("she", "see", pronoun="him", question="yes-no"), "Does she see him?", "Est-ce qu'elle le voit ?"),
    (
        make_clause("the dog", "hide", question="what", past=True),
        "What did the dog hide?",
        "Qu'est-ce que le chien a caché ?",
    ),
    (make_clause("you", "sleep", question="where"), "Where do you sleep?", "Où est-ce que vous dormez ?"),
    (make_clause("who", "take", "my coat", past=True), "Who took my coat?", "Qui a pris mon manteau ?"),
    # Adverbs, and complements with "avoir" in French
    (
        make_clause("he", "forget", "his key*", adverb="often", past=True),
        "He often forgot his keys.",
        "Il a souvent oublié ses clés.",
    ),
    (make_clause("she", "sing", adverb="well", past=True), "She sang well.", "Elle a bien chanté."),
    (sensation("I", "hungry"), "I am hungry.", "J'ai faim."),
    (
        g.existential_clause(parse_noun_phrase("two horse*"), near("in", "the forest"), question=True),
        "Are there two horses in the forest?",
        "Est-ce qu'il y a deux chevaux dans la forêt ?",
    ),
]


@pytest.mark.parametrize(("sentence", "english", "french"), SENTENCES, ids=[row[1] for row in SENTENCES])
def test_sentences_checked_by_hand(sentence, english, french):
    pair = sentence.pair()
    assert (pair.source, pair.target) == (english, french)


def links(sentence: g.Sentence) -> set[str]:
    """The alignment as words: "chased-a" for chased → a."""
    pair = sentence.pair()
    source, target = split_words(pair.source), split_words(pair.target)
    return {f"{source[s]}-{target[t]}" for s, t in pair.alignment}


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            make_clause("the cat", "chase", "the mouse", past=True),
            "The-Le cat-chat chased-a chased-chassé the-la mouse-souris .-.",
        ),
        (make_clause("he", "have", "a dog", negation="not"), "He-Il not-n' does-a have-a not-pas a-de dog-chien .-."),
        (
            make_clause("the cat", "chase", "the mouse", past=True, negation="not"),
            "The-Le cat-chat not-n' did-a chase-a not-pas chase-chassé the-la mouse-souris .-.",
        ),
        (make_clause("she", "play", "the piano"), "She-Elle plays-joue plays-du the-du piano-piano .-."),
        (
            make_clause("I", "look for", "Anne's dog"),
            "I-Je look-cherche for-cherche 's-le dog-chien 's-d' Anne-Anne .-.",
        ),
        (make_clause("he", "see", "a small red car"), "He-Il sees-voit a-une small-petite car-voiture red-rouge .-."),
        (
            make_clause("you", "swim", modal=CAN, negation="not"),
            "You-Vous cannot-ne cannot-pouvez cannot-pas swim-nager .-.",
        ),
        (make_clause("Luc", "help", pronoun="us", modal=WANT), "Luc-Luc wants-veut to-veut us-nous help-aider .-."),
        (
            make_clause("the dog", "hide", question="what", past=True),
            "What-Qu' did-est-ce did-que the-le dog-chien hide-a hide-caché ?-?",
        ),
        (
            g.presentative_clause(parse_noun_phrase("the letter*"), parse_subject("I"), VERBS["write"]),
            "Here-Voici are-Voici the-les letters-lettres that-que I-j' wrote-ai wrote-écrites .-.",
        ),
        (make_clause("she", "sing", adverb="well", past=True), "She-Elle sang-a well-bien sang-chanté .-."),
        (
            make_clause("the girl*", "get up", past=True),
            "The-Les girls-filles got-se up-se got-sont up-sont got-levées up-levées .-.",
        ),
        (
            g.existential_clause(parse_noun_phrase("a cat"), near("near", "the market")),
            "There-Il There-y is-a a-un cat-chat near-près near-du the-du market-marché .-.",
        ),
    ],
)
def test_alignments_checked_by_hand(sentence, expected):
    assert links(sentence) == set(expected.split())


@pytest.mark.parametrize(
    ("infinitive", "strong", "expected"),
    [
        ("partager", "", "partage partage partageons partagez partagent partagé"),
        ("lancer", "", "lance lance lançons lancez lancent lancé"),
        ("envoyer", "envoi", "envoie envoie envoyons envoyez envoient envoyé"),
        ("appeler", "appell", "appelle appelle appelons appelez appellent appelé"),
        ("protéger", "protèg", "protège protège protégeons protégez protègent protégé"),
        ("obéir", "", "obéis obéit obéissons obéissez obéissent obéi"),
        ("attendre", "", "attends attend attendons attendez attendent attendu"),
        ("prendre", "", "prends prend prenons prenez prennent pris"),
    ],
)
def test_conjugation(infinitive, strong, expected):
    present, participle = conjugate(infinitive, strong)
    assert " ".join((*present, participle)) == expected


def test_every_changing_stem_is_listed():
    """No -er verb with a changing stem uses the regular rule."""
    changing = re.compile(r"(e[lmntsv]|é[a-z]{1,2}|oy|uy)er$")
    for verb in VERBS.values():
        if changing.search(verb.infinitive):
            assert verb.present[0] != verb.infinitive[:-1], verb.infinitive


def test_words():
    assert split_words("Is Anne's dog here?") == ["Is", "Anne", "'s", "dog", "here", "?"]
    assert split_words("Qu'est-ce qu'elle a vu aujourd'hui ?") == [
        "Qu'",
        "est-ce",
        "qu'",
        "elle",
        "a",
        "vu",
        "aujourd'hui",
        "?",
    ]


@pytest.fixture(scope="module")
def train() -> list[AlignedPair]:
    return phrasebook_pairs("train", 20_000)


@pytest.fixture(scope="module")
def val() -> list[AlignedPair]:
    return phrasebook_pairs("val", 1000)


@pytest.fixture(scope="module")
def test() -> list[AlignedPair]:
    return phrasebook_pairs("test", 1000)


def test_packaged_files_are_what_the_generator_writes(train, val, test):
    for (name, (_, count)), pairs in zip(FILES.items(), (train, val, test), strict=True):
        with gzip.open(Path(regard.__file__).parent / "data" / name, "rt", encoding="utf-8") as file:
            lines = file.readlines()
        assert len(lines) == count
        assert lines[: len(pairs)] == [format_line(pair) for pair in pairs[:count]]


def test_packaged_alignments_link_words_between_white_space():
    """As the third column of any file, from which `read_aligned_pairs` rejects other links."""
    pair = AlignedPair("Anne's cat?", "Le chat d'Anne ?", ((0, 3), (1, 0), (1, 2), (2, 1), (3, 4)))
    assert format_line(pair) == "Anne's cat?\tLe chat d'Anne ?\t0-0 0-2 1-1 1-3\n"
    for name, size in (("phrasebook", 80_000), ("phrasebook:validation", 500), ("phrasebook:test", 1000)):
        pairs, alignments = read_aligned_pairs([name])
        assert len(pairs) == len(alignments) == size
        for (source, target), links in zip(pairs[:2000], alignments):
            words = [set(range(len(text.split()))) for text in (source, target)]
            assert [set(side) for side in zip(*links)] == words


def test_lexicon_is_large_enough():
    assert count_lemmas() >= 300
    assert len(NOUNS) + len(ADJECTIVES) + len(VERBS) >= 250


def test_same_seed_gives_the_same_pairs(train):
    assert phrasebook_pairs("train", 500) == train[:500]
    assert phrasebook_pairs("train", 500, seed=1) != train[:500]


def test_splits_share_no_sentence(train, val, test):
    sources = [{pair.source for pair in split} for split in (train, val, test)]
    assert [len(split) for split in sources] == [20_000, 1000, 1000]
    other = {pair.source for pair in phrasebook_pairs("train", 5000, seed=1)}
    assert not (sources[0] | other) & sources[1]
    assert not (sources[0] | other) & sources[2]
    assert not sources[1] & sources[2]


def test_each_english_sentence_has_one_translation(train, val, test):
    french = defaultdict(set)
    for pair in (*train, *val, *test, *phrasebook_pairs("train", 20_000, seed=1)):
        french[pair.source].add(pair.target)
    assert all(len(translations) == 1 for translations in french.values())


# An independent parser of the surface text: which verb has which object, and which adjective which noun.
_NOUN_OF = {form: noun.english[0] for noun in NOUNS.values() for form in noun.english}
_VERBS_OF = defaultdict(set)
for _verb in (*TRANSITIVE, *DITRANSITIVE):
    for _form in (_verb.base, _verb.third, _verb.past):
        _VERBS_OF[_form].add(_verb)
_OBJECT_PRONOUNS = {"me", "you", "him", "us", "them"}  # and "her", where a determiner follows
_DETERMINERS = {"an", "these"} | DETERMINERS.keys()


def object_of(rest: list[str]) -> str:
    """The noun of the object at the start of these words, if any."""
    rest = [word for word in rest if word not in ADJECTIVE] + ["", "", ""]
    if rest[0] in _OBJECT_PRONOUNS or (rest[0] == "her" and (rest[1] in _DETERMINERS or rest[1] in NAMES)):
        rest = rest[1:]
    if rest[0] in _DETERMINERS:
        rest = rest[1:]
        return rest[2] if rest[1] == "'s" else rest[0]
    return rest[2] if rest[0] in NAMES and rest[1] == "'s" else ""


def combinations(pair: AlignedPair) -> set[tuple[str, str]]:
    tokens = split_words(pair.source)
    tokens[0] = tokens[0] if tokens[0] in NAMES else tokens[0].lower()
    found = set()
    for i, token in enumerate(tokens):
        if token in ADJECTIVE:
            later = next((word for word in tokens[i + 1 :] if word not in ADJECTIVE), "")
            if later in _NOUN_OF:
                found.add((token, _NOUN_OF[later]))
            else:  # "the house is not very big", "is the house big?"
                earlier = [word for word in tokens[:i] if word in _NOUN_OF]
                if earlier:
                    found.add((token, _NOUN_OF[earlier[-1]]))
        for verb in _VERBS_OF[token]:
            rest = tokens[i + 1 :]
            particle = verb.particle.split()
            if rest[: len(particle)] != particle:
                continue
            noun = object_of(rest[len(particle) :])
            if noun in _NOUN_OF:
                found.add((verb.name, _NOUN_OF[noun]))
            if tokens[0] == "here":  # "here is the letter that she wrote"
                found.add((verb.name, _NOUN_OF[next(word for word in tokens if word in _NOUN_OF)]))
    return found


def test_parser_finds_combinations():
    def read(text):
        return combinations(AlignedPair(text, "", ()))

    assert read("The small cat chased the fat grey mouse.") == {
        ("small", "cat"),
        ("chase", "mouse"),
        ("fat", "mouse"),
        ("grey", "mouse"),
    }
    assert ("give", "book") in read("She gave him Anne's old book.")
    assert ("look for", "key") in read("Here are the keys that he looked for.")
    assert read("Is the house too big?") == {("big", "house")}


def test_held_out_combinations_never_occur_in_training(train, val, test):
    seen = set().union(*map(combinations, train))
    assert len(seen) > 2000
    assert not list(filter(held_out, seen))
    for pair in (*test, *val[1::2]):
        assert combinations(pair) - seen, f"nothing new in {pair.source}"
        assert any(map(held_out, combinations(pair))), pair.source
    for pair in val[::2]:
        assert not any(map(held_out, combinations(pair))), pair.source


def test_about_a_tenth_of_combinations_is_held_out():
    objects = [(verb.name, noun.english[0]) for verb in (*TRANSITIVE, *DITRANSITIVE) for noun in verb.objects]
    described = [(adjective.english, noun.english[0]) for adjective, nouns in ADJECTIVES.items() for noun in nouns]
    for pairs in (objects, described):
        assert 0.07 < sum(map(held_out, pairs)) / len(pairs) < 0.11


def test_demo_sentence_is_new_but_its_words_are_not(train):
    assert held_out(("chase", "mouse"))
    assert {"cat", "chased", "mouse"} <= {word for pair in train for word in split_words(pair.source)}
    assert "The cat chased the mouse." not in {pair.source for pair in train}


def test_every_word_of_val_and_test_occurs_in_training(train, val, test):
    for side in ("source", "target"):
        known = {word for pair in train for word in split_words(getattr(pair, side))}
        unknown = {word for pair in (*val, *test) for word in split_words(getattr(pair, side))} - known
        assert not unknown


def test_every_entry_of_the_lexicon_occurs_in_training(train):
    english = {word for pair in train for word in split_words(pair.source.lower())}
    text = "\n".join(pair.source for pair in train)
    for noun in NOUNS.values():
        assert noun.english[0] in english
        assert not noun.pluralized or noun.english[1] in english, noun.english
    for verb in (*TRANSITIVE, *INTRANSITIVE, *DITRANSITIVE):
        assert {verb.base, verb.past} <= english | {"knew"}, verb.name
    for adjective in ADJECTIVES:
        assert adjective.english.lower() in english
    for phrase in (*TIMES, *NAMES, *SENSATIONS):
        assert phrase in text
    french = {word for pair in train for word in split_words(pair.target.lower())}
    uncountable = ("hot", "cold")  # soup, water: never in the plural
    for adjective in ADJECTIVES:
        for forms in adjective.french:
            assert set(forms[:1] if adjective.english in uncountable else forms) <= french, adjective.english
    assert {form for verb in VERBS.values() if verb.name not in ("die",) for form in verb.present} <= french


def test_alignment_is_valid_and_covers_every_word(train, val, test):
    for pair in (*train, *val, *test):
        source, target = split_words(pair.source), split_words(pair.target)
        assert all(0 <= s < len(source) and 0 <= t < len(target) for s, t in pair.alignment)
        assert {t for _, t in pair.alignment} == set(range(len(target))), pair
        assert {s for s, _ in pair.alignment} == set(range(len(source))), pair
        assert (len(source) - 1, len(target) - 1) in pair.alignment
        assert list(pair.alignment) == sorted(set(pair.alignment))


VOWEL = r"(?:[aeiouàâéèêîôœ]|h(?!ache|aricot|éros|ibou))"
FORBIDDEN = [
    rf"\b(?:je|me|se|le|la|de|ne|que|ce|ma|sa|beau|nouveau) {VOWEL}",
    r"\b(?:de|à) les?\b",
    r"\b[djlmnsq]u?'(?:hache|haricot|héros|hibou|[bcdfgjklmnpqrstvwxz])",
    r"\b(?:cet|bel|nouvel|vieil) (?!" + VOWEL + ")",
    r"\bdes (?:\w+ )?(?:belles?|beaux|nouveaux|nouvelles|petite?s|grande?s|vieux|vieilles|bons|bonnes)\b",
    r"\bpas (?:un|une|des|du) ",
    r"(?<!\w)y (?!a)",
    r"  | [.,]|\w\?",
]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_french_spelling(pattern, train, val, test):
    """Patterns that no correct French sentence contains."""
    bad = re.compile(pattern, re.IGNORECASE)
    allowed = re.compile(r"\b(?:jou|rev[ei]n|revi)")  # jouer de, revenir de: du and des with an article in them
    for pair in (*train, *val, *test):
        if bad.search(pair.target) and not allowed.search(pair.target):
            pytest.fail(f"{pattern}: {pair.target}")


def test_spelling_patterns_detect_mistakes():
    wrong = [
        "Il ne a pas.",
        "à les rois",
        "l'hibou",
        "cet chat",
        "des petites maisons",
        "pas un chien",
        "Il y est.",
        "Il dort .",
    ]
    for pattern, text in zip(FORBIDDEN, wrong, strict=True):
        assert re.search(pattern, text, re.IGNORECASE), (pattern, text)


def test_sentences_are_short(train):
    lengths = [len(split_words(pair.source)) - 1 for pair in train]
    assert max(lengths) <= 10
    assert 5 < sum(lengths) / len(lengths) < 8


def test_english_endings():
    assert [english_plural(word) for word in ("watch", "city", "key", "catch")] == [
        "watches",
        "cities",
        "keys",
        "catches",
    ]
    assert [english_past(word) for word in ("cry", "stay", "dance", "help")] == ["cried", "stayed", "danced", "helped"]


def test_unknown_split_is_an_error():
    with pytest.raises(RegardError, match="no split 'dev'"):
        phrasebook_pairs("dev", 3)  # type: ignore[arg-type]


def test_too_many_requested_sentences_is_an_error(monkeypatch):
    monkeypatch.setattr("tools.phrasebook.generator._SentenceSampler.sentence", lambda sampler: None)
    with pytest.raises(RegardError, match="only 0 different train sentences"):
        phrasebook_pairs("train", 3)
