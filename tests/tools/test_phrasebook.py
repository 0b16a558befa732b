"""The generator of the phrasebook: correct French, gold alignments, held-out combinations outside of training."""

import gzip
import re
from collections import defaultdict
from pathlib import Path

import pytest

import regard
from regard.data.text.readers import read_aligned_pairs
from regard.errors import RegardError
from tools.phrasebook.generator import FILES, format_line, held_out, phrasebook_pairs
from tools.phrasebook.grammar import AlignedPair
from tools.phrasebook.lexicon import (
    ADJECTIVES,
    DETERMINERS,
    DITRANSITIVE,
    INTRANSITIVE,
    NAMES,
    NOUNS,
    SENSATIONS,
    TIMES,
    TRANSITIVE,
    count_lemmas,
)
from tools.phrasebook.morphology import split_words

VERBS = {verb.name: verb for verb in (*INTRANSITIVE, *DITRANSITIVE, *TRANSITIVE)}
ADJECTIVE = {adjective.english: adjective for adjective in ADJECTIVES}


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


def test_unknown_split_is_an_error():
    with pytest.raises(RegardError, match="no split 'dev'"):
        phrasebook_pairs("dev", 3)  # type: ignore[arg-type]


def test_too_many_requested_sentences_is_an_error(monkeypatch):
    monkeypatch.setattr("tools.phrasebook.generator._SentenceSampler.sentence", lambda sampler: None)
    with pytest.raises(RegardError, match="only 0 different train sentences"):
        phrasebook_pairs("train", 3)
