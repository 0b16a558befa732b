"""Export of models with separate vocabularies to classes of transformers with a joint one."""

import json
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from regard.data import Tokenizer
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.interop.joint_vocabulary import join_tokenizers
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.pipelines import Translator
from tests.conftest import number_pairs

PAIRS = number_pairs(200, seed=3)
LINES = [source for source, _ in PAIRS[:30]] + ["seven", "one unknown ▁word", "\U0010fffdsix six"]
KINDS = [("word", "word"), ("bpe", "bpe"), ("char", "space"), ("bytes", "bytes"), ("space", "char")]
MAX_LEN = 12


def train_tokenizers(kinds: tuple[str, str]) -> tuple[Tokenizer, Tokenizer]:
    source, target = (Tokenizer.train([pair[side] for pair in PAIRS], kind, 300) for side, kind in enumerate(kinds))
    return source, target


def make_translator(kinds: tuple[str, str] = ("word", "word"), **choices: Any) -> Translator:
    """A translator with random weights, scaled so that translations differ, and with unused embedding rows."""
    torch.manual_seed(2)
    source, target = train_tokenizers(kinds)
    sizes = dict(width=32, heads=2, feedforward=48, encoder_layers=2, decoder_layers=2, dropout=0.0, max_len=64)
    vocabularies = dict(source_vocab=source.vocab_size + 2, target_vocab=target.vocab_size + 1)
    model = Transformer(TransformerConfig(**(sizes | vocabularies | choices))).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(2.0)
        model.output.weight[3] *= 2  # <eos>, so that texts end
        model.output.weight[:3] *= 2  # <pad>, <unk>, <sos>: only <unk> may be generated
        model.output.weight[target.vocab_size :] = 0
    return Translator(model, source, target)


@pytest.mark.parametrize("kinds", KINDS)
def test_joint_tokenizer_encodes_the_source_and_decodes_the_target(kinds):
    source, target = train_tokenizers(kinds)
    joint = join_tokenizers(source, target, offset=1000)
    assert [joint.encode(line) for line in LINES] == [source.encode(line) for line in LINES]
    for _, text in PAIRS[:9]:
        ids = [2, *target.encode(text), 3]
        decoded = joint.backend_tokenizer.decode([1000 + i for i in ids], skip_special_tokens=True)
        assert decoded == target.backend_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kinds", KINDS)
def test_transformers_translates_identically(transformers, tmp_path, kinds):
    translator = make_translator(kinds)
    assert export_huggingface(translator, tmp_path) == "PegasusForConditionalGeneration"
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    # Greedy search, because transformers ranks unfinished hypotheses of a beam differently.
    generated = model.generate(**inputs, num_beams=1, max_length=MAX_LEN + 1, forced_eos_token_id=None)
    config = DecodeConfig("greedy", max_len=MAX_LEN, max_extra=MAX_LEN)
    expected = [best.text for best, *_ in translator.translate(LINES, config)]
    assert tokenizer.batch_decode(generated, skip_special_tokens=True) == expected
    assert len(set(expected)) > 3
    imported = import_huggingface(tmp_path)
    assert [best.text for best, *_ in imported.translate(LINES, config)] == expected


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("PegasusForConditionalGeneration", {"tied": False}),
        ("PegasusForConditionalGeneration", {"output_bias": True, "activation": "gelu"}),
        ("MarianMTModel", {"norm": "post"}),
        ("BlenderbotForConditionalGeneration", {"positions": "learned", "tied": False, "output_bias": True}),
    ],
)
@torch.no_grad()
def test_logits_of_target_tokens_are_identical_and_source_tokens_are_excluded(transformers, tmp_path, name, choices):
    translator = make_translator(**choices)
    assert export_huggingface(translator, tmp_path) == name
    model = getattr(transformers, name).from_pretrained(tmp_path).eval()
    offset = translator.model.config.source_vocab
    source, target = translator.encode_source("one two three"), [2, *translator.encode_target("trois deux")]
    decoder_ids = torch.tensor([[offset + i for i in target]])
    logits = model(input_ids=torch.tensor([source]), decoder_input_ids=decoder_ids).logits[0]
    packed = translator.teacher_forced([(source, target[1:])])
    expected = translator.model(*packed)
    torch.testing.assert_close(logits[:, offset:], expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits.log_softmax(-1)[:, offset:], expected.log_softmax(-1), atol=1e-4, rtol=1e-5)
    assert (logits.softmax(-1)[:, :offset] == 0).all()


def test_pad_and_sos_are_never_generated(tmp_path):
    translator = make_translator()
    export_huggingface(translator, tmp_path)
    offset = translator.model.config.source_vocab
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["bad_words_ids"] == [[offset], [offset + 2]]
    assert generation["eos_token_id"] == offset + 3


def test_unsupported_models_are_an_error_and_nothing_is_written(tmp_path):
    translator = make_translator()
    translator.source_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    translator.source_tokenizer = Tokenizer(translator.source_tokenizer.backend_tokenizer, FOREIGN_KIND)
    relative = vars(t5_small(width=32, heads=2, feedforward=48)) | {"source_vocab": 20, "target_vocab": 20}
    for pipeline, message in (
        (translator, "different imported tokenizers"),
        (make_translator(positions="rotary"), "positions = 'rotary'"),
        (make_translator(**relative), "T5ForConditionalGeneration has one vocabulary"),
    ):
        with pytest.raises(RegardError, match=message):
            export_huggingface(pipeline, tmp_path / "out")
        assert not (tmp_path / "out").exists()
