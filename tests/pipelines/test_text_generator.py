"""A language model with its tokeniser: what it writes, what it tells while it writes, and what it thinks of texts."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.data import Tokenizer
from regard.data.text.special_tokens import WRITING, Special
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import GPT, GPTConfig
from regard.pipelines import LanguageModel, TextEncoder, Translator, load

TEXT = "Un  café\tà Zürich,\n\n“où ça?” 猫と犬 🐈‍⬛🙂 e\u0301 — fin \n"
SIZES = GPTConfig(width=16, heads=2, layers=2, feedforward=32, dropout=0.3, max_len=24, tied=False)
GREEDY, SAMPLE = DecodeConfig(method="greedy"), DecodeConfig(method="sample", seed=3)


def tokenizer_of(kind: str, text: str = TEXT) -> Tokenizer:
    return Tokenizer.train([text], kind, vocab_size=300, exact=kind == "char")


def writer_of(kind: str = "char", seed: int = 1, special: Special = WRITING, **changes) -> LanguageModel:
    torch.manual_seed(seed)
    tokenizer = tokenizer_of(kind)
    model = GPT(dataclasses.replace(SIZES, vocab=tokenizer.vocab_size, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8  # opinions, and not of the last token alone
    return LanguageModel(model, tokenizer, {"step": 3}, special)


class Scripted(nn.Module):
    """Says what it was told to say, and then the end."""

    def __init__(self, ids: list[int], vocab: int, max_len: int = 10_000) -> None:
        super().__init__()
        self.ids, self.vocab, self.config = [*ids, WRITING.eos], vocab, SimpleNamespace(max_len=max_len)
        self.nothing = nn.Parameter(torch.zeros(()))  # which has a device

    def start(self, source) -> int:
        assert len(source) == 1
        return 0

    def step(self, state: int, last: Tensor) -> tuple[Tensor, int]:
        return nn.functional.one_hot(torch.tensor(self.ids[state]), self.vocab)[None, None] * 100.0, state + 1


class Ear:
    """Hears what is written, prompt by prompt."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}

    def __call__(self, number: int, text: str) -> None:
        assert text
        self.pieces.setdefault(number, []).append(text)

    def heard(self, number: int) -> str:
        return "".join(self.pieces.get(number, []))


# Letter for letter


def check_word_for_word(kind: str, prompt: str, rest: str) -> None:
    """A model that knows how the text goes on: what it writes, and what is heard of it, is that text."""
    tokenizer = tokenizer_of(kind, prompt + rest or " ")
    ids = tokenizer.encode(rest)
    writer = LanguageModel(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
    ear = Ear()
    [[found]] = writer.generate([prompt], dataclasses.replace(GREEDY, max_len=len(ids) + 1), hear=ear)
    assert found.text == rest
    assert found.hypothesis.ids == ids
    assert ear.heard(0) == rest


@pytest.mark.parametrize("kind", ["char", "bytes"])
@pytest.mark.parametrize("place", range(0, len(TEXT) + 1, 3))
def test_a_text_comes_back_letter_for_letter(kind, place):
    check_word_for_word(kind, TEXT[:place], TEXT[place:])


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(["char", "bytes"]), prompt=st.text(max_size=12), rest=st.text(max_size=12))
def test_any_text_comes_back_letter_for_letter(kind, prompt, rest):
    check_word_for_word(kind, prompt, rest)


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_words_are_joined_to_the_prompt_by_their_space(kind):
    tokenizer = tokenizer_of(kind, "the cat sees the dog, l'homme aussi.")
    for prompt, rest in (("the cat", " sees the dog"), ("the cat sees the", " dog, l'homme"), ("", "the cat")):
        ids = tokenizer.encode(rest)
        ear = Ear()
        writer = LanguageModel(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
        assert writer.generate([prompt], GREEDY, hear=ear)[0][0].text == ear.heard(0) == rest


def test_what_is_heard_comes_in_whole_letters():
    """Each of 🙂's four bytes is a token: nothing is heard before the last of them."""
    tokenizer = tokenizer_of("bytes", "abc")
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    ear = Ear()
    LanguageModel(Scripted(ids, tokenizer.vocab_size), tokenizer).generate(["c"], GREEDY, hear=ear)  # type: ignore[arg-type]
    assert ear.pieces == {0: ["a", "🙂", "b"]}


def test_a_letter_that_is_never_completed_is_heard_in_the_end():
    tokenizer = tokenizer_of("bytes", "abc")
    ids = tokenizer.encode("a🙂")[:-1]
    ear = Ear()
    writer = LanguageModel(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
    [[found]] = writer.generate(["c"], GREEDY, hear=ear)
    assert found.text == "a\ufffd"
    assert ear.pieces == {0: ["a", "\ufffd"]}


# Generating


PROMPTS = ["Un café", "", "où", "🙂", TEXT[:20], "fin \n", "café"]


@pytest.mark.parametrize("kind", ["char", "bytes", "word", "bpe"])
@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
def test_what_is_heard_is_what_is_found(kind, config):
    """By a model that writes nonsense, half letters too."""
    ear = Ear()
    found = writer_of(kind).generate(PROMPTS, config, truncate=True, hear=ear)
    assert [one[0].text for one in found] == [ear.heard(number) for number in range(len(PROMPTS))]
    assert max(len(one[0].text) for one in found) > 5


def test_of_several_samples_the_first_drawn_is_heard():
    ear, writer = Ear(), writer_of()
    several = writer.generate(PROMPTS, dataclasses.replace(SAMPLE, n_best=3), hear=ear)
    for number, n_best in enumerate(several):
        assert ear.heard(number) in [one.text for one in n_best]
        assert len(n_best) == 3
        assert [one.score for one in n_best] == sorted((one.score for one in n_best), reverse=True)
    assert any(len({one.text for one in n_best}) == 3 for n_best in several)


def test_nothing_is_heard_of_a_beam():
    ear = Ear()
    found = writer_of().generate(["où"], DecodeConfig(method="beam", beam=3, n_best=2), hear=ear)
    assert len(found[0]) == 2
    assert not ear.pieces


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_many_prompts_at_once_are_answered_as_one_by_one(kind):
    writer = writer_of(kind)
    together = [one[0].text for one in writer.generate(PROMPTS, GREEDY, truncate=True)]
    assert together == [writer.generate([prompt], GREEDY, truncate=True)[0][0].text for prompt in PROMPTS]
    assert len(set(together)) > 3


def test_greedy_writes_the_likeliest_token_each_time():
    writer = writer_of()
    config = dataclasses.replace(GREEDY, max_len=12)
    for prompt, [found] in zip(PROMPTS, writer.generate(PROMPTS, config)):
        ids = writer.prompt_ids(prompt)
        begin = len(ids)
        while len(ids) < begin + config.max_len:
            row = writer.model(pack([ids]))[-1]
            row[[WRITING.pad, WRITING.sos]] = -torch.inf
            if int(row.argmax()) == WRITING.eos:
                break
            ids.append(int(row.argmax()))
        assert found.hypothesis.ids == ids[begin:]
        assert found.text == writer.tokenizer.decode(ids[begin:])


def test_samples_depend_on_the_seed_and_the_prompts_place_alone():
    writer = writer_of()
    first = writer.generate(PROMPTS, SAMPLE)
    assert first == writer.generate(PROMPTS, SAMPLE)
    assert first != writer.generate(PROMPTS, dataclasses.replace(SAMPLE, seed=4))
    # other neighbours
    again = writer.generate([*PROMPTS[:3], TEXT[:12], "a", *PROMPTS[5:], *PROMPTS], SAMPLE)
    assert [first[i][0].text for i in (0, 1, 2, 5, 6)] == [again[i][0].text for i in (0, 1, 2, 5, 6)]
    # one prompt twice is drawn for twice
    twice = writer.generate(["où"] * 2, SAMPLE)
    assert twice[0][0].text != twice[1][0].text


def test_the_default_draws_at_random():
    writer = writer_of()
    assert writer("où") == writer.generate(["où"], DecodeConfig(method="sample"))[0][0].text
    assert writer.generate([]) == []


def test_scores_of_what_is_written_are_those_of_reading():
    writer = writer_of()
    for config in (SAMPLE, DecodeConfig(method="beam", beam=3, max_len=5)):
        for prompt, [found] in zip(PROMPTS, writer.generate(PROMPTS, config)):
            before = writer.prompt_ids(prompt)
            ids = [*before, *found.hypothesis.ids, WRITING.eos]
            rows = writer.model(pack([ids[:-1]])).double().log_softmax(-1)[len(before) - 1 :]
            by_hand = rows.gather(1, torch.tensor(ids[len(before) :])[:, None]).sum().item()
            assert found.hypothesis.logprob == pytest.approx(by_hand, rel=1e-5, abs=1e-4)


def test_texts_end_at_the_limit_or_where_the_model_is_full():
    # <sos> and 23 tokens are all that it takes
    writer = writer_of(positions="learned")
    with torch.no_grad():
        writer.model.output.weight[WRITING.eos] = 0.0
        writer.model.output.weight[4:] += 1.0
    never = dataclasses.replace(GREEDY, min_len=100)
    found = writer.generate(["", "ou", TEXT[:22], TEXT[:23]], never)
    assert [len(one[0].hypothesis.ids) for one in found] == [23, 21, 1, 0]
    short = writer.generate(["", "ou", TEXT[:22], TEXT[:23]], dataclasses.replace(never, min_len=4, max_len=4))
    assert [len(one[0].hypothesis.ids) for one in short] == [4, 4, 1, 0]
    for one, other in zip(found, short):
        assert one[0].text.startswith(other[0].text)


def test_too_long_a_prompt_is_an_error_that_names_it():
    writer = writer_of(positions="learned")
    with pytest.raises(RegardError) as caught:
        writer.generate(["ou", TEXT[:24]])
    assert str(caught.value) == (
        "prompt 2 has 24 tokens, and the model takes at most 23. "
        "Shorten it, or use --truncate to leave its beginning out."
    )
    with pytest.raises(RegardError, match="text 1 has 24 tokens"):
        writer.score([TEXT[:24]])


def test_truncate_leaves_the_beginning_out():
    writer = writer_of()
    ids = writer.prompt_ids(TEXT, truncate=True)
    assert ids == [WRITING.sos, *writer.tokenizer.encode(TEXT[-23:])]
    cut, short = writer.score([TEXT, TEXT[-23:]], truncate=True)
    assert cut == short
    # of a model that has room for nothing but the beginning
    assert writer_of(max_len=1).prompt_ids(TEXT, truncate=True) == [WRITING.sos]


def test_a_model_without_a_beginning():
    """As imported ones are: it cannot write before it has read something."""
    writer = writer_of(special=Special())
    assert writer.prompt_ids("où") == writer.tokenizer.encode("où")
    assert isinstance(writer("où"), str)
    for call in (writer.generate, writer.score):
        with pytest.raises(RegardError, match=r" 2 is empty, and this model cannot begin by itself\. Give it some"):
            call(["où", ""])


@pytest.mark.parametrize(
    "special",
    [Special(begin=7, sos=7, eos=7), Special(begin=7, sos=7, eos=7, pad=7), Special(begin=2, eos=7, pad=7)],
    ids=["sos", "sos and pad", "pad"],
)
def test_one_id_for_several_ends(special):
    """GPT-2's end of text is its beginning too, and fills batches up."""
    writer = writer_of(special=special)
    ear = Ear()
    config = dataclasses.replace(GREEDY, max_len=12)
    found = writer.generate(PROMPTS[2:], config, hear=ear)
    for number, (prompt, [one]) in enumerate(zip(PROMPTS[2:], found)):
        ids = writer.prompt_ids(prompt)
        begin = len(ids)
        while len(ids) < begin + config.max_len:
            row = writer.model(pack([ids]))[-1]
            row[[token for token in (special.pad, special.sos) if token != special.eos]] = -torch.inf
            if int(row.argmax()) == special.eos:
                break
            ids.append(int(row.argmax()))
        assert one.hypothesis.ids == ids[begin:]
        assert ear.heard(number) == one.text
    lengths = {len(one[0].hypothesis.ids) for one in found}
    assert min(lengths) < 5 < max(lengths)  # some ended by themselves, others did not


def test_progress():
    told: list[tuple[int, int]] = []
    writer_of().generate(PROMPTS, GREEDY, progress=lambda *now: told.append(now))
    assert told[-1] == (len(PROMPTS), len(PROMPTS))


# Scoring


@pytest.mark.parametrize("special", [WRITING, Special(begin=7, sos=7, eos=7)], ids=["own", "other"])
@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_score_is_the_sum_of_the_log_probabilities(kind, special):
    writer = writer_of(kind, special=special)
    texts = ["où", "", "café à", "🙂"]
    for text, score in zip(texts, writer.score(texts)):
        ids = [special.sos, *writer.tokenizer.encode(text)]
        by_hand = 0.0
        for place, wanted in enumerate([*ids[1:], special.eos], 1):
            by_hand += writer.model(pack([ids[:place]]))[-1].double().log_softmax(-1)[wanted].item()
        assert score.logprob == pytest.approx(by_hand, abs=1e-4)
        assert score.tokens == len(ids)
        assert score.mean == pytest.approx(by_hand / len(ids), abs=1e-4)


def test_without_a_beginning_the_first_token_has_no_price():
    writer = writer_of(special=Special())
    [score] = writer.score(["où"])
    rows = writer.model(pack([writer.tokenizer.encode("où")])).double().log_softmax(-1)
    wanted = [writer.tokenizer.encode("ù")[0], WRITING.eos]
    assert score.tokens == 2
    assert score.logprob == pytest.approx(sum(rows[i, token].item() for i, token in enumerate(wanted)), abs=1e-4)


def test_scores_do_not_depend_on_the_batch():
    writer = writer_of()
    texts = [TEXT[:n] for n in range(1, 24, 3)]
    whole = writer.score(texts)
    for batch_tokens in (1, 30, 60):
        for one, other in zip(whole, writer.score(texts, batch_tokens=batch_tokens)):
            assert one.tokens == other.tokens
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert writer.score([]) == []
    assert all(math.isfinite(one.logprob) for one in whole)


@torch.no_grad()
def test_the_loss_over_documents_of_any_length():
    """Every token once: of the first 24 from all before it, of later ones from 12 to 23 before."""
    writer = writer_of()
    documents = [TEXT * 2, "où", TEXT]
    found = writer.evaluate(documents, batch_tokens=50)
    ids = [token for text in documents for token in [WRITING.sos, *writer.tokenizer.encode(text), WRITING.eos]]
    nats = 0.0
    for place in range(1, len(ids)):
        first = 0 if place <= 24 else (place - 13) // 12 * 12
        assert place <= 24 or 12 < place - first <= 24
        row = writer.model(pack([ids[first:place]]))[-1]
        nats -= row.double().log_softmax(-1)[ids[place]].item()
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.tokens == len(ids) - 1
    assert found.loss == pytest.approx(nats / found.tokens, rel=1e-5)
    assert found.bytes == len("".join(documents).encode())
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes, rel=1e-5)
    lines = "".join(documents).count("\n")
    assert found.words == sum(len(text.split()) for text in documents) + lines
    assert found.word_perplexity == pytest.approx(math.exp(min(50, nats / found.words)), rel=1e-4)


# The folder


@pytest.mark.parametrize("special", [WRITING, Special(begin=3, sos=3)], ids=["own", "other"])
def test_what_is_loaded_is_what_was_saved(tmp_path, special):
    writer = writer_of("bytes", special=special)
    writer.save(tmp_path)
    again = load(tmp_path, "cpu")
    assert isinstance(again, LanguageModel)
    assert (again.special, again.training, again.model.config) == (special, {"step": 3}, writer.model.config)
    assert again.tokenizer == writer.tokenizer
    assert again.generate(PROMPTS, SAMPLE, truncate=True) == writer.generate(PROMPTS, SAMPLE, truncate=True)
    assert again.score(PROMPTS[:3]) == writer.score(PROMPTS[:3])


def test_dropout_is_off_whatever_was_on_before():
    writer = writer_of()
    before = writer.generate(PROMPTS, GREEDY), writer.score(["où"])
    writer.model.train()
    assert writer.generate(PROMPTS, GREEDY) == before[0]
    writer.model.train()
    assert writer.score(["où"]) == before[1]


def test_a_language_model_is_not_a_translator(tmp_path):
    writer_of().save(tmp_path)
    for kind, name in ((Translator, "a translator"), (TextEncoder, "an encoder of texts")):
        with pytest.raises(RegardError, match=rf"holds a language model, not {name}\. Use it with: regard generate"):
            load(tmp_path, "cpu", expect=kind)
