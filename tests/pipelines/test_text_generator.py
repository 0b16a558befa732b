"""Text generation pipeline: generation, the text callback, scoring and evaluation."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.data import Tokenizer
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SpecialTokens
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import GPT, GPTConfig
from regard.pipelines import TextEncoder, TextGenerator, Translator, load

TEXT = "Un  café\tà Zürich,\n\n“où ça?” 猫と犬 🐈‍⬛🙂 e\u0301 — fin \n"
SIZES = GPTConfig(width=16, heads=2, layers=2, feedforward=32, dropout=0.3, max_len=24, tied=False)
GREEDY, SAMPLE = DecodeConfig(method="greedy"), DecodeConfig(method="sample", seed=3)


def make_tokenizer(kind: str, text: str = TEXT) -> Tokenizer:
    return Tokenizer.train([text], kind, vocab_size=300, exact=kind == "char")


def make_generator(
    kind: str = "char", seed: int = 1, special: SpecialTokens = CAUSAL_LM_TOKENS, **changes
) -> TextGenerator:
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(kind)
    model = GPT(dataclasses.replace(SIZES, vocab=tokenizer.vocab_size, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8  # peaked distributions that depend on all tokens
    return TextGenerator(model, tokenizer, {"step": 3}, special)


class Scripted(nn.Module):
    """Generates the given ids, then <eos>."""

    def __init__(self, ids: list[int], vocab: int, max_len: int = 10_000) -> None:
        super().__init__()
        self.ids, self.vocab = [*ids, CAUSAL_LM_TOKENS.eos], vocab
        self.config = SimpleNamespace(max_len=max_len, vocab=vocab)
        self.unused = nn.Parameter(torch.zeros(()))  # determines the device

    def start(self, source) -> int:
        assert len(source) == 1
        return 0

    def step(self, state: int, last: Tensor) -> tuple[Tensor, int]:
        return nn.functional.one_hot(torch.tensor(self.ids[state]), self.vocab)[None, None] * 100.0, state + 1


class TextLog:
    """An `on_text` callback that records the text of each prompt."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}

    def __call__(self, index: int, text: str) -> None:
        assert text
        self.pieces.setdefault(index, []).append(text)

    def text(self, index: int) -> str:
        return "".join(self.pieces.get(index, []))


# Generated text and the text callback


def check_generated_text(kind: str, prompt: str, rest: str) -> None:
    """A model scripted to generate `rest`: its output and the callback return exactly that text."""
    tokenizer = make_tokenizer(kind, prompt + rest or " ")
    ids = tokenizer.encode(rest)
    generator = TextGenerator(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
    log = TextLog()
    [[result]] = generator.generate([prompt], dataclasses.replace(GREEDY, max_len=len(ids) + 1), on_text=log)
    assert result.text == rest
    assert result.hypothesis.ids == ids
    assert log.text(0) == rest


@pytest.mark.parametrize("kind", ["char", "bytes"])
@pytest.mark.parametrize("split", range(0, len(TEXT) + 1, 3))
def test_generated_text_is_exact(kind, split):
    check_generated_text(kind, TEXT[:split], TEXT[split:])


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(["char", "bytes"]), prompt=st.text(max_size=12), rest=st.text(max_size=12))
def test_arbitrary_generated_text_is_exact(kind, prompt, rest):
    check_generated_text(kind, prompt, rest)


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_generated_words_keep_their_leading_space(kind):
    tokenizer = make_tokenizer(kind, "the cat sees the dog, l'homme aussi.")
    for prompt, rest in (("the cat", " sees the dog"), ("the cat sees the", " dog, l'homme"), ("", "the cat")):
        ids = tokenizer.encode(rest)
        log = TextLog()
        generator = TextGenerator(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
        assert generator.generate([prompt], GREEDY, on_text=log)[0][0].text == log.text(0) == rest


def test_on_text_receives_complete_characters():
    """Each of the four bytes of 🙂 is a token: on_text is called only after the last one."""
    tokenizer = make_tokenizer("bytes", "abc")
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    log = TextLog()
    TextGenerator(Scripted(ids, tokenizer.vocab_size), tokenizer).generate(["c"], GREEDY, on_text=log)  # type: ignore[arg-type]
    assert log.pieces == {0: ["a", "🙂", "b"]}


def test_on_text_receives_an_incomplete_character_at_the_end():
    tokenizer = make_tokenizer("bytes", "abc")
    ids = tokenizer.encode("a🙂")[:-1]
    log = TextLog()
    generator = TextGenerator(Scripted(ids, tokenizer.vocab_size), tokenizer)  # type: ignore[arg-type]
    [[result]] = generator.generate(["c"], GREEDY, on_text=log)
    assert result.text == "a\ufffd"
    assert log.pieces == {0: ["a", "\ufffd"]}


# Generating


PROMPTS = ["Un café", "", "où", "🙂", TEXT[:20], "fin \n", "café"]


@pytest.mark.parametrize("kind", ["char", "bytes", "word", "bpe"])
@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
def test_on_text_receives_the_generated_text(kind, config):
    """With a random model, which also generates incomplete characters."""
    log = TextLog()
    result = make_generator(kind).generate(PROMPTS, config, truncate=True, on_text=log)
    assert [one[0].text for one in result] == [log.text(index) for index in range(len(PROMPTS))]
    assert max(len(one[0].text) for one in result) > 5


def test_on_text_receives_the_first_of_several_samples():
    log, generator = TextLog(), make_generator()
    several = generator.generate(PROMPTS, dataclasses.replace(SAMPLE, n_best=3), on_text=log)
    for index, n_best in enumerate(several):
        assert log.text(index) in [one.text for one in n_best]
        assert len(n_best) == 3
        assert [one.score for one in n_best] == sorted((one.score for one in n_best), reverse=True)
    assert any(len({one.text for one in n_best}) == 3 for n_best in several)


def test_on_text_is_not_called_in_beam_search():
    log = TextLog()
    result = make_generator().generate(["où"], DecodeConfig(method="beam", beam=3, n_best=2), on_text=log)
    assert len(result[0]) == 2
    assert not log.pieces


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_batched_prompts_match_single_prompts(kind):
    generator = make_generator(kind)
    together = [one[0].text for one in generator.generate(PROMPTS, GREEDY, truncate=True)]
    assert together == [generator.generate([prompt], GREEDY, truncate=True)[0][0].text for prompt in PROMPTS]
    assert len(set(together)) > 3


def test_greedy_generates_the_most_probable_token():
    generator = make_generator()
    config = dataclasses.replace(GREEDY, max_len=12)
    for prompt, [result] in zip(PROMPTS, generator.generate(PROMPTS, config)):
        ids = generator.encode_prompt(prompt)
        begin = len(ids)
        while len(ids) < begin + config.max_len:
            row = generator.model(pack([ids]))[-1]
            row[[CAUSAL_LM_TOKENS.pad, CAUSAL_LM_TOKENS.sos]] = -torch.inf
            if int(row.argmax()) == CAUSAL_LM_TOKENS.eos:
                break
            ids.append(int(row.argmax()))
        assert result.hypothesis.ids == ids[begin:]
        assert result.text == generator.tokenizer.decode(ids[begin:])


def test_samples_depend_only_on_seed_and_prompt_index():
    generator = make_generator()
    first = generator.generate(PROMPTS, SAMPLE)
    assert first == generator.generate(PROMPTS, SAMPLE)
    assert first != generator.generate(PROMPTS, dataclasses.replace(SAMPLE, seed=4))
    # other prompts in the batch
    loaded = generator.generate([*PROMPTS[:3], TEXT[:12], "a", *PROMPTS[5:], *PROMPTS], SAMPLE)
    assert [first[i][0].text for i in (0, 1, 2, 5, 6)] == [loaded[i][0].text for i in (0, 1, 2, 5, 6)]
    # the same prompt twice gives independent samples
    twice = generator.generate(["où"] * 2, SAMPLE)
    assert twice[0][0].text != twice[1][0].text


def test_sampling_is_the_default():
    generator = make_generator()
    assert generator("où") == generator.generate(["où"], DecodeConfig(method="sample"))[0][0].text
    assert generator.generate([]) == []


def test_scores_of_generated_text_match_the_forward_pass():
    generator = make_generator()
    for config in (SAMPLE, DecodeConfig(method="beam", beam=3, max_len=5)):
        for prompt, [result] in zip(PROMPTS, generator.generate(PROMPTS, config)):
            before = generator.encode_prompt(prompt)
            ids = [*before, *result.hypothesis.ids]
            if len(result.hypothesis.ids) < config.max_len:  # at the maximum length, texts have no <eos>
                ids.append(CAUSAL_LM_TOKENS.eos)
            rows = generator.model(pack([ids[:-1]])).double().log_softmax(-1)[len(before) - 1 :]
            expected = rows.gather(1, torch.tensor(ids[len(before) :])[:, None]).sum().item()
            assert result.hypothesis.logprob == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_outputs_end_at_max_len_or_at_the_length_limit():
    # <sos> and at most 23 tokens
    generator = make_generator(positions="learned")
    with torch.no_grad():
        generator.model.output.weight[CAUSAL_LM_TOKENS.eos] = 0.0
        generator.model.output.weight[4:] += 1.0
    never = dataclasses.replace(GREEDY, min_len=100)
    result = generator.generate(["", "ou", TEXT[:22], TEXT[:23]], never)
    assert [len(one[0].hypothesis.ids) for one in result] == [23, 21, 1, 0]
    short = generator.generate(["", "ou", TEXT[:22], TEXT[:23]], dataclasses.replace(never, min_len=4, max_len=4))
    assert [len(one[0].hypothesis.ids) for one in short] == [4, 4, 1, 0]
    for one, other in zip(result, short):
        assert one[0].text.startswith(other[0].text)


def test_prompt_beyond_the_length_limit_raises_with_its_number():
    generator = make_generator(positions="learned")
    with pytest.raises(RegardError) as caught:
        generator.generate(["ou", TEXT[:24]])
    assert str(caught.value) == (
        "prompt 2 has 24 tokens; the model supports at most 23. Shorten it, or use --truncate to drop its beginning."
    )
    with pytest.raises(RegardError, match="text 1 has 24 tokens"):
        generator.score([TEXT[:24]])


def test_truncate_drops_the_beginning():
    generator = make_generator()
    ids = generator.encode_prompt(TEXT, truncate=True)
    assert ids == [CAUSAL_LM_TOKENS.sos, *generator.tokenizer.encode(TEXT[-23:])]
    cut, short = generator.score([TEXT, TEXT[-23:]], truncate=True)
    assert cut == short
    # a model with room for the start token only
    assert make_generator(max_len=1).encode_prompt(TEXT, truncate=True) == [CAUSAL_LM_TOKENS.sos]


def test_empty_prompt_without_start_token_raises():
    """Imported models may have no start token; they need at least one token of text."""
    generator = make_generator(special=SpecialTokens())
    assert generator.encode_prompt("où") == generator.tokenizer.encode("où")
    assert isinstance(generator("où"), str)
    for call in (generator.generate, generator.score):
        with pytest.raises(
            RegardError, match=r" 2 is empty, and this model has no start token\. Write at least one token"
        ):
            call(["où", ""])


@pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(begin=7, sos=7, eos=7),
        SpecialTokens(begin=7, sos=7, eos=7, pad=7),
        SpecialTokens(begin=2, eos=7, pad=7),
    ],
    ids=["sos", "sos and pad", "pad"],
)
def test_special_tokens_that_share_an_id(special):
    """GPT-2 uses one id for start, end and padding."""
    generator = make_generator(special=special)
    log = TextLog()
    config = dataclasses.replace(GREEDY, max_len=12)
    result = generator.generate(PROMPTS[2:], config, on_text=log)
    for index, (prompt, [one]) in enumerate(zip(PROMPTS[2:], result)):
        ids = generator.encode_prompt(prompt)
        begin = len(ids)
        while len(ids) < begin + config.max_len:
            row = generator.model(pack([ids]))[-1]
            row[[token for token in (special.pad, special.sos) if token != special.eos]] = -torch.inf
            if int(row.argmax()) == special.eos:
                break
            ids.append(int(row.argmax()))
        assert one.hypothesis.ids == ids[begin:]
        assert log.text(index) == one.text
    lengths = {len(one[0].hypothesis.ids) for one in result}
    assert min(lengths) < 5 < max(lengths)  # some end with <eos>, others at the limit


def test_progress_is_reported():
    reports: list[tuple[int, int]] = []
    make_generator().generate(PROMPTS, GREEDY, progress=lambda *now: reports.append(now))
    assert reports[-1] == (len(PROMPTS), len(PROMPTS))


# Scoring


@pytest.mark.parametrize("special", [CAUSAL_LM_TOKENS, SpecialTokens(begin=7, sos=7, eos=7)], ids=["default", "other"])
@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_score_is_the_sum_of_log_probabilities(kind, special):
    generator = make_generator(kind, special=special)
    texts = ["où", "", "café à", "🙂"]
    for text, score in zip(texts, generator.score(texts)):
        ids = [special.sos, *generator.tokenizer.encode(text)]
        expected = 0.0
        for position, label in enumerate([*ids[1:], special.eos], 1):
            expected += generator.model(pack([ids[:position]]))[-1].double().log_softmax(-1)[label].item()
        assert score.logprob == pytest.approx(expected, abs=1e-4)
        assert score.tokens == len(ids)
        assert score.mean == pytest.approx(expected / len(ids), abs=1e-4)


def test_without_start_token_the_first_token_is_not_scored():
    generator = make_generator(special=SpecialTokens())
    [score] = generator.score(["où"])
    rows = generator.model(pack([generator.tokenizer.encode("où")])).double().log_softmax(-1)
    labels = [generator.tokenizer.encode("ù")[0], CAUSAL_LM_TOKENS.eos]
    assert score.tokens == 2
    assert score.logprob == pytest.approx(sum(rows[i, token].item() for i, token in enumerate(labels)), abs=1e-4)


def test_scores_do_not_depend_on_batching():
    generator = make_generator()
    texts = [TEXT[:n] for n in range(1, 24, 3)]
    one_batch = generator.score(texts)
    for batch_tokens in (1, 30, 60):
        for one, other in zip(one_batch, generator.score(texts, batch_tokens=batch_tokens)):
            assert one.tokens == other.tokens
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert generator.score([]) == []
    assert all(math.isfinite(one.logprob) for one in one_batch)


@torch.no_grad()
def test_loss_over_documents_of_any_length():
    """Every token is predicted once: the first 24 from all previous tokens, later ones from the last 13 to 24."""
    generator = make_generator()
    documents = [TEXT * 2, "où", TEXT]
    result = generator.evaluate(documents, batch_tokens=50)
    ids = [
        token
        for text in documents
        for token in [CAUSAL_LM_TOKENS.sos, *generator.tokenizer.encode(text), CAUSAL_LM_TOKENS.eos]
    ]
    nats = 0.0
    for position in range(1, len(ids)):
        first = 0 if position <= 24 else (position - 13) // 12 * 12
        assert position <= 24 or 12 < position - first <= 24
        row = generator.model(pack([ids[first:position]]))[-1]
        nats -= row.double().log_softmax(-1)[ids[position]].item()
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.tokens == len(ids) - 1
    assert result.loss == pytest.approx(nats / result.tokens, rel=1e-5)
    assert result.bytes == len("".join(documents).encode())
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / result.bytes, rel=1e-5)
    lines = "".join(documents).count("\n")
    assert result.words == sum(len(text.split()) for text in documents) + lines
    assert result.word_perplexity == pytest.approx(math.exp(min(50, nats / result.words)), rel=1e-4)


# Saving and loading


@pytest.mark.parametrize("special", [CAUSAL_LM_TOKENS, SpecialTokens(begin=3, sos=3)], ids=["default", "other"])
def test_loaded_pipeline_equals_the_saved_one(tmp_path, special):
    generator = make_generator("bytes", special=special)
    generator.save(tmp_path)
    loaded = load(tmp_path, "cpu")
    assert isinstance(loaded, TextGenerator)
    assert (loaded.special, loaded.training, loaded.model.config) == (special, {"step": 3}, generator.model.config)
    assert loaded.tokenizer == generator.tokenizer
    assert loaded.generate(PROMPTS, SAMPLE, truncate=True) == generator.generate(PROMPTS, SAMPLE, truncate=True)
    assert loaded.score(PROMPTS[:3]) == generator.score(PROMPTS[:3])


def test_dropout_is_off_after_training_mode():
    generator = make_generator()
    before = generator.generate(PROMPTS, GREEDY), generator.score(["où"])
    generator.model.train()
    assert generator.generate(PROMPTS, GREEDY) == before[0]
    generator.model.train()
    assert generator.score(["où"]) == before[1]


def test_loading_as_another_pipeline_raises(tmp_path):
    make_generator().save(tmp_path)
    for pipeline_class, name in ((Translator, "a translator"), (TextEncoder, "a text encoder")):
        with pytest.raises(RegardError, match=rf"contains a language model, not {name}\. Use it with: regard generate"):
            load(tmp_path, "cpu", expect=pipeline_class)
