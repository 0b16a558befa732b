import pytest

from regard.data.text.sentence_splitter import join_sentences, split_sentences

TEXTS = {
    "English": [
        "Mr. Brown met Dr. J. Smith at 9.30 a.m. in the U.S. capital.",
        "“Really?”",
        "He said so (twice).",
        "No!",
    ],
    "numbers": ["See fig. 3 and No. 5 of vol. 200.", "Pi is 3.14 or so.", "In 1984.", "And later."],
    "French": ["M. Dupont et Mme. Durand sont là…", "« Déjà ? »", "L'été arrive !", "À demain."],
    "German": ["Am 3. Mai kam z.B. Hr. Müller.", "Ärger gab es nicht!", "„Gut.“", "Über alles wurde geredet."],
    "Spanish": ["La Sra. López llegó.", "¿Cuándo?", "¡Hoy mismo!", "Él no."],
    "Russian": ["Он ушёл.", "Правда?", "Да!"],
    "Hindi": ["वह गया।", "क्या सच?"],
    "Arabic": ["ذهب الرجل.", "هل هذا صحيح؟", "نعم."],
    "lower case": ["Yahoo! is a name, and e.g. this is not an end.", "Next…", "Done."],
}
UNSPACED = {
    "Chinese": ["他走了。", "真的吗？", "“是的！”", "他说。"],
    "Japanese": ["猫が寝ています。", "「本当に？」", "はい。"],
}


@pytest.mark.parametrize("language", TEXTS)
def test_sentences_of_spaced_text(language):
    assert split_sentences(" ".join(TEXTS[language])) == TEXTS[language]
    assert split_sentences("  " + "\n ".join(TEXTS[language]) + " ") == TEXTS[language]
    assert join_sentences(TEXTS[language]) == " ".join(TEXTS[language])


@pytest.mark.parametrize("language", UNSPACED)
def test_sentences_of_unspaced_text(language):
    assert split_sentences("".join(UNSPACED[language])) == UNSPACED[language]


def test_no_text_is_lost():
    for sentences in (*TEXTS.values(), *UNSPACED.values()):
        text = " ".join(sentences)
        assert "".join(split_sentences(text)).replace(" ", "") == text.replace(" ", "")
    assert split_sentences("no end mark at all") == ["no end mark at all"]
    assert split_sentences(" ") == split_sentences("") == []
    assert split_sentences("...") == ["..."]


def test_long_text_is_split_in_linear_time():
    text = "A sentence with e.g. some words. " * 20_000
    assert len(split_sentences(text)) == 20_000


def test_join_sentences():
    assert join_sentences(["他走了。", "真的？", "Yes."]) == "他走了。真的？Yes."
    assert join_sentences(["One.", "", "Two."]) == "One. Two."
    assert join_sentences([]) == ""
