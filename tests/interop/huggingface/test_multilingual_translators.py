"""NLLB, M2M100, mBART and mBART-50 with a choice of languages, compared with transformers."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import regard
from regard.attention import record
from regard.cli import main
from regard.data.text.languages import LanguageTokens
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation import align
from regard.interop import export_argos, export_ctranslate2, export_huggingface, export_onnx, import_huggingface
from regard.interop.onnx_runner import load_onnx
from regard.interop.tokenizer_files import read_tokenizer
from regard.layers.packed import pack
from regard.pipelines import Translator, load
from regard.viewer import look
from tests.interop.model_comparison import assert_same_tensors
from tests.interop.sentencepiece_models import PLAIN_TEXTS, load_sentencepiece, phrases, train_sentencepiece

SIZES: dict[str, Any] = dict(
    **dict(d_model=24, encoder_layers=2, decoder_layers=2, max_position_embeddings=60, init_std=0.4),
    **dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37),
)
NLLB_PAIRS = [("eng_Latn", "fra_Latn"), ("fra_Latn", "zho_Hans"), ("deu_Latn", "eng_Latn"), ("eng_Latn", "deu_Latn")]
MBART_PAIRS = [("en_XX", "ro_RO"), ("ro_RO", "en_XX"), ("fr_XX", "de_DE")]
PAIRS = {
    "nllb": NLLB_PAIRS,
    "nllb legacy": NLLB_PAIRS,
    "m2m100": [("en", "fr"), ("fr", "zh"), ("ast", "en")],
    "mbart": MBART_PAIRS,
    "mbart50": MBART_PAIRS,
}
KINDS = list(PAIRS)
TEXTS = phrases("phrasebook:test", 6)
# The vocabulary of M2M100 lacks some characters.
SOURCE_TEXTS = [text for text in PLAIN_TEXTS if text.strip()]


class Case(NamedTuple):
    """A model of transformers with its tokenizer, and the folder that both are saved in."""

    folder: Path
    model: Any
    tokenizer: Any


def make_tokenizer(transformers: Any, kind: str, folder: Path) -> Any:
    folder.mkdir(parents=True)
    path = folder / "sentencepiece.bpe.model"
    path.write_bytes(train_sentencepiece(model_type="unigram" if kind.startswith("mbart") else "bpe", vocab_size=300))
    if kind == "m2m100":
        pieces = load_sentencepiece(path.read_bytes())
        names = sorted(pieces.id_to_piece(i) for i in range(3, len(pieces)))  # another order than in the file
        table = {name: index for index, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *names])}
        (folder / "vocab.json").write_text(json.dumps(table))
        return transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(path))
    if kind.startswith("mbart"):
        name = "MBartTokenizer" if kind == "mbart" else "MBart50Tokenizer"
        return getattr(transformers, name).from_pretrained(folder)
    transformers.NllbTokenizer.from_pretrained(folder).save_pretrained(folder)  # without its languages
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return transformers.NllbTokenizer(model["vocab"], merges, legacy_behaviour=kind == "nllb legacy")


@pytest.fixture(scope="module")
def cases(transformers, tmp_path_factory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("languages")
    return {kind: make_case(transformers, kind, folder / kind) for kind in KINDS}


def make_case(transformers: Any, kind: str, folder: Path) -> Case:
    tokenizer = make_tokenizer(transformers, kind, folder / "files")
    family = "MBart" if kind.startswith("mbart") else "M2M100"
    # Language tokens of M2M100 are not counted; a few rows of the embedding are unused.
    vocab = len(tokenizer) + (108 if kind == "m2m100" else 0)
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab, **SIZES)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                tensor.add_(0.3 * torch.randn_like(tensor))
        if family == "MBart":
            model.final_logits_bias.normal_()
            model.final_logits_bias[0, 2] += 9  # so that texts end
        else:
            direction = torch.nn.functional.normalize(model.lm_head.weight[2], dim=0)
            model.model.decoder.layer_norm.bias += 4 * direction
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model.set_attn_implementation("eager")
    return Case(folder / "model", model.eval(), tokenizer)


@pytest.fixture(scope="module")
def translators(cases) -> dict[str, Translator]:
    return {kind: import_huggingface(case.folder) for kind, case in cases.items()}


def language_id(tokenizer: Any, code: str) -> int:
    return tokenizer.get_lang_id(code) if hasattr(tokenizer, "get_lang_id") else tokenizer.convert_tokens_to_ids(code)


def generate(case: Case, kind: str, texts: list[str], pair: tuple[str, str], **options: Any) -> list[list[int]]:
    """Generated ids between the start of the decoder and the end of the text; None for a text that does not end."""
    source, target = pair
    case.tokenizer.src_lang = source
    inputs = case.tokenizer(texts, padding=True, return_tensors="pt")
    index = language_id(case.tokenizer, target)
    start = {"decoder_start_token_id": index if kind == "mbart" else 2}
    excluded = [[1], [index]] if kind == "mbart" else [[1]]  # as in Regard
    forced = {} if kind == "mbart" else {"forced_bos_token_id": index}
    rows = case.model.generate(
        **inputs, **start, **forced, **options, bad_words_ids=excluded, min_new_tokens=4, max_new_tokens=24,
        forced_eos_token_id=None,
    )  # fmt: skip
    return [row[1:].tolist() for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_source_ids_match_transformers_for_every_language(cases, translators, kind):
    tokenizer, translator = cases[kind].tokenizer, translators[kind]
    assert len(translator.languages) in (25, 52, 100, 202)
    target = PAIRS[kind][0][1]
    for source in translator.languages:
        tokenizer.src_lang = source
        assert translator.with_target(target, source).encode_source(TEXTS[0]) == tokenizer(TEXTS[0])["input_ids"]
    bound = translator.with_target(target, source)
    assert [bound.encode_source(text) for text in SOURCE_TEXTS] == tokenizer(SOURCE_TEXTS)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_and_attention_match_transformers(cases, translators, kind):
    case = cases[kind]
    for source, target in PAIRS[kind][:2]:
        bound = translators[kind].with_target(target, source)
        source_ids, decoder_ids = bound.encode_source(TEXTS[0]), bound.special.make_decoder_input([9, 31, 17, 5])
        index = language_id(case.tokenizer, target)
        assert decoder_ids == [*([index] if kind == "mbart" else [2, index]), 9, 31, 17, 5]
        expected = case.model(
            input_ids=torch.tensor([source_ids]), decoder_input_ids=torch.tensor([decoder_ids]), output_attentions=True
        )
        with record(bound.model) as recording:
            logits = bound.model(pack([source_ids]), pack([decoder_ids]))
        torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-5)
        names = {
            "encoder.{}.attention": expected.encoder_attentions,
            "decoder.{}.attention": expected.decoder_attentions,
        }
        names |= {"decoder.{}.cross": expected.cross_attentions}
        maps = {name.format(i): weights for name, layers in names.items() for i, weights in enumerate(layers)}
        assert maps.keys() == recording.keys()
        for name, weights in maps.items():
            torch.testing.assert_close(recording[name].weights(), weights, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_translations_match_generate(cases, translators, kind):
    case, translator, outputs = cases[kind], translators[kind], set()
    for pair in PAIRS[kind]:
        for method, options in (
            ("greedy", dict(num_beams=1)),
            # Regard scores forced tokens, transformers does not: without length penalty the ranking is the same.
            ("beam", dict(num_beams=3, early_stopping=True, length_penalty=0.0)),
        ):
            config = DecodeConfig(method, beam=3, min_len=4, max_len=24, length_penalty=0.0)
            found = translator.translate(TEXTS, config, to=pair[1], source_language=pair[0])
            for (best, *_), row in zip(found, generate(case, kind, TEXTS, pair, **options)):
                has_end = 2 in row[1:]
                if method == "beam" and not has_end:  # at the maximum length, the two rank beams differently
                    continue
                ids = row[: row.index(2, 1)] if has_end else row[:20]
                assert best.hypothesis.ids[: None if has_end else 20] == ids
                pieces = [i for i in ids if i < 303 and i > 3]
                assert translator.target_tokenizer.decode(pieces) == case.tokenizer.decode(pieces)
                outputs.add((pair, best.text))
    assert len({pair for pair, _ in outputs}) == len(PAIRS[kind])
    assert len({text for _, text in outputs}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_model_folder_keeps_the_languages(translators, kind, tmp_path):
    translator, (source, target) = translators[kind], PAIRS[kind][0]
    translator.with_target(target, source).save(tmp_path)
    loaded = load(tmp_path, "cpu")
    assert (loaded.language_tokens, loaded.special) == (translator.language_tokens, translator.special)
    for source, target in PAIRS[kind]:
        assert loaded(TEXTS[0], target, source) == translator(TEXTS[0], target, source)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_folder_gives_the_same_in_transformers(transformers, cases, translators, kind, tmp_path):
    case = cases[kind]
    name = export_huggingface(translators[kind], tmp_path)
    assert name == type(case.model).__name__
    assert_same_tensors(case.folder, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is type(case.tokenizer)
    model = getattr(transformers, name).from_pretrained(tmp_path).eval()
    for pair in PAIRS[kind]:
        tokenizer.src_lang = case.tokenizer.src_lang = pair[0]
        assert tokenizer(SOURCE_TEXTS)["input_ids"] == case.tokenizer(SOURCE_TEXTS)["input_ids"]
        exported = Case(tmp_path, model, tokenizer)
        assert generate(exported, kind, TEXTS, pair, num_beams=2) == generate(case, kind, TEXTS, pair, num_beams=2)
    again = import_huggingface(tmp_path)
    assert (again.language_tokens, again.special) == (translators[kind].language_tokens, translators[kind].special)


def test_nllb_with_trained_positions_keeps_its_tokenizer(transformers, cases, tmp_path):
    """Positions of NLLB are trained in fine-tuning; another class computes the same."""
    translator = import_huggingface(cases["nllb"].folder)
    with torch.no_grad():
        translator.model.source_embedding.positions.weight[3] += 1
    assert export_huggingface(translator, tmp_path) == "BlenderbotForConditionalGeneration"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, src_lang="deu_Latn")
    assert type(tokenizer).__name__ == "NllbTokenizer"
    again = import_huggingface(tmp_path)
    assert again.with_target("fra_Latn", "deu_Latn").encode_source(TEXTS[0]) == tokenizer(TEXTS[0])["input_ids"]
    assert again(TEXTS[0], "fra_Latn", "deu_Latn") == translator(TEXTS[0], "fra_Latn", "deu_Latn")


@pytest.mark.parametrize("kind", KINDS)
def test_languages_of_the_folder_are_the_defaults(cases, kind, tmp_path):
    shutil.copytree(cases[kind].folder, tmp_path / "in")
    source, target = PAIRS[kind][1]
    key = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    edit(tmp_path / "in" / "generation_config.json", **{key: language_id(cases[kind].tokenizer, target)})
    edit(tmp_path / "in" / "tokenizer_config.json", src_lang=source)
    translator = import_huggingface(tmp_path / "in")
    assert (translator.language_tokens.default_source, translator.language_tokens.default_target) == (source, target)
    expected = translators_output(translator, PAIRS[kind][1])
    assert translator(TEXTS[0]) == expected
    assert translator.score((TEXTS[0], TEXTS[1])) == translator.score((TEXTS[0], TEXTS[1]), to=target)
    export_huggingface(translator, tmp_path / "out")
    again = import_huggingface(tmp_path / "out")
    assert again.language_tokens == translator.language_tokens
    assert again(TEXTS[0]) == expected
    translator.save(tmp_path / "saved")
    assert load(tmp_path / "saved", "cpu")(TEXTS[0]) == expected
    # Another choice replaces both defaults.
    assert translator(TEXTS[0], *reversed(PAIRS[kind][2])) == translators_output(translator, PAIRS[kind][2])


def translators_output(translator: Translator, pair: tuple[str, str]) -> str:
    return translator.with_target(pair[1], pair[0])(TEXTS[0])


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_unknown_and_missing_languages_name_what_to_pass(translators, tmp_path):
    translator = translators["nllb"]
    with pytest.raises(
        RegardError, match=r"Unknown target language 'fr'. The nearest of 202 languages: fra_Latn, .*"
    ) as e:
        translator(TEXTS[0], to="fr")
    assert len(str(e.value)) < 150
    with pytest.raises(RegardError, match=r"Unknown source language 'en_Latn'\. .*: eng_Latn"):
        translator(TEXTS[0], to="fra_Latn", source_language="en_Latn")
    with pytest.raises(RegardError, match=r"No target language is given, and the model has 202.*\(--to, to=…\)"):
        translator(TEXTS[0])
    tokens = dataclasses.replace(translator.language_tokens, default_source=None)
    no_source = dataclasses.replace(translator, language_tokens=tokens)
    with pytest.raises(RegardError, match=r"No source language is given.*\(--from, source_language=…\)"):
        no_source(TEXTS[0], to="fra_Latn")
    export_huggingface(no_source, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["src_lang"] is None


def test_scores_depend_on_both_languages(cases, translators):
    """The score is the log-probability of the target's tokens, with the forced language, in transformers."""
    case, translator = cases["nllb"], translators["nllb"]
    scores = set()
    for source, target in NLLB_PAIRS:
        bound = translator.with_target(target, source)
        labels = [language_id(case.tokenizer, target), *translator.target_tokenizer.encode(TEXTS[1]), 2]
        inputs = torch.tensor([bound.encode_source(TEXTS[0])]), torch.tensor([[2, *labels[:-1]]])
        with torch.no_grad():
            logits = case.model(input_ids=inputs[0], decoder_input_ids=inputs[1]).logits[0].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None]).sum().item()
        found = translator.score((TEXTS[0], TEXTS[1]), to=target, source_language=source).logprob
        assert found == pytest.approx(expected, abs=1e-3)
        scores.add(round(found, 2))
    assert len(scores) == len(NLLB_PAIRS)


@pytest.mark.parametrize("kind", ["m2m100", "mbart"])
def test_look_and_alignment_leave_out_language_tokens(translators, kind):
    source, target = PAIRS[kind][0]
    seen = look(translators[kind], TEXTS[0], to=target, source_language=source)
    cross = seen.maps["decoder.0.cross"]
    if kind == "mbart":
        assert cross.columns[-2:] == ["</s>", "en_XX"]
    else:
        assert (cross.columns[0], cross.rows[0]) == ("__en__", "__fr__")
    bound = translators[kind].with_target(target, source)
    (links,) = align(bound, [(TEXTS[0], TEXTS[1])], "decoder.0.cross")
    assert links
    assert max(column for column, _ in links) < len(TEXTS[0].split())


@pytest.mark.parametrize("kind", ["nllb", "mbart"])
def test_onnx_folder_has_all_languages(translators, kind, tmp_path):
    pytest.importorskip("onnxruntime")
    export_onnx(translators[kind], tmp_path)
    graphs = load_onnx(tmp_path)
    for source, target in PAIRS[kind]:
        assert graphs(TEXTS[0], target, source) == translators[kind](TEXTS[0], target, source)


@pytest.mark.parametrize("kind", ["nllb", "mbart"])
def test_ctranslate2_takes_languages_as_pieces(translators, kind, tmp_path):
    library = pytest.importorskip("ctranslate2")
    translator = translators[kind]
    export_ctranslate2(translator, tmp_path)
    runner = library.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    names, (source, target) = translator.source_tokenizer.backend_tokenizer, PAIRS[kind][0]
    pieces = names.encode(TEXTS[0], add_special_tokens=False).tokens
    pieces = [*pieces, "</s>", source] if kind == "mbart" else [source, *pieces]
    options = dict(beam_size=1, max_decoding_length=20, suppress_sequences=[["<pad>"], ["<unk>"], [target]])
    (result,) = runner.translate_batch([pieces], target_prefix=[[target]], **options)
    found = [names.token_to_id(piece) for piece in result.hypotheses[0]]
    best = translator.translate(TEXTS[0], DecodeConfig("greedy", max_len=20), to=target, source_language=source)[0]
    expected = best.hypothesis.ids
    count = min(len(found), len(expected), 10)
    assert count > 3
    assert found[:count] == expected[:count]


def test_argos_refuses_models_without_language_pair(translators, tmp_path):
    with pytest.raises(RegardError, match="one language pair"):
        export_argos(translators["mbart"], tmp_path / "x.argosmodel")


def run(capsys, *words) -> tuple[int, list[str], str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_commands_take_both_languages(cases, translators, capsys, tmp_path):
    model, text = tmp_path / "nllb", TEXTS[0]
    assert run(capsys, "import", cases["nllb"].folder, "--out", model)[0] == 0
    languages = ["--from", "deu_Latn", "--to", "eng_Latn"]
    expected = translators["nllb"](text, "eng_Latn", "deu_Latn")
    assert run(capsys, "translate", model, text, *languages)[1] == [expected]
    (tmp_path / "in.txt").write_text(f"{text}\n")
    files = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt"]
    assert run(capsys, "translate", model, *files, *languages)[0] == 0
    assert (tmp_path / "out.txt").read_text() == f"{expected}\n"
    (tmp_path / "pairs.tsv").write_text(f"{text}\t{TEXTS[1]}\n")
    score = translators["nllb"].score((text, TEXTS[1]), to="eng_Latn", source_language="deu_Latn").logprob
    (line,) = run(capsys, "score", model, "--data", tmp_path / "pairs.tsv", *languages)[1]
    assert float(line.split("\t")[0]) == pytest.approx(score, abs=1e-3)
    page = ["--out", tmp_path / "p.html", "--no-with-model"]
    assert run(capsys, "look", model, text, *languages, *page)[1] == [expected]
    options = ["--data", tmp_path / "pairs.tsv", "--json", tmp_path / "r.json"]
    assert run(capsys, "evaluate", model, *options, "--languages", "deu_Latn-eng_Latn")[0] == 0
    metrics = json.loads((tmp_path / "r.json").read_text())
    tokens = len(translators["nllb"].target_tokenizer.encode(TEXTS[1])) + 2
    assert metrics["loss"] == pytest.approx(-score / tokens, rel=1e-3)
    code, _, error = run(capsys, "evaluate", model, *options)
    assert code == 2
    assert "202 languages" in error
    code, _, error = run(capsys, "translate", model, text, "--to", "english")
    assert code == 2
    assert "eng_Latn" in error
    assert any("default source  eng_Latn" in line for line in run(capsys, "info", model)[1])


def test_damaged_language_tokens_are_errors(translators, tmp_path):
    translators["mbart"].save(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"ids": {"en_XX": 9999}}, r"language_tokens.ids.en_XX must be an id of the vocabulary of \d+ \(got 9999\)"),
        ({"ids": []}, "language_tokens must be an object with the keys"),
        ({"target": "end"}, "language_tokens.target"),
        ({"source": 1}, "language_tokens.source"),
        ({"default_target": "xx"}, "language_tokens.default_target: unknown language 'xx'"),
        ({"more": 1}, "language_tokens must be an object with the keys"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps(table | {"language_tokens": table["language_tokens"] | change})
        )
        with pytest.raises(RegardError, match=message):
            load(tmp_path, "cpu")


def test_generic_tokenizer_class_gets_its_roles_from_the_template(cases, tmp_path):
    """A folder whose tokenizer class is that of any tokenizer.json."""
    for kind, roles in {
        "mbart": ("after_end", "sos"),
        "mbart50": ("begin", "forced"),
        "nllb": ("begin", "forced"),
    }.items():
        shutil.copytree(cases[kind].folder, tmp_path / kind)
        edit(tmp_path / kind / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", src_lang=None)
        tokens = import_huggingface(tmp_path / kind).language_tokens
        assert (tokens.source, tokens.target) == roles
        assert tokens.default_source in ("eng_Latn", "en_XX")  # in the template


def test_class_decides_over_the_template(cases, tmp_path):
    """Early files of NLLB have a template with the language after the text, which the class ignores."""
    shutil.copytree(cases["nllb legacy"].folder, tmp_path / "in")
    edit(tmp_path / "in" / "tokenizer_config.json", legacy_behaviour=False)
    assert import_huggingface(tmp_path / "in").language_tokens.source == "begin"


@pytest.mark.parametrize("kind", ["mbart", "nllb"])
def test_sentencepiece_file_with_listed_languages(cases, kind, tmp_path):
    original = read_tokenizer(cases[kind].folder)
    shutil.copy(cases[kind].folder.parent / "files" / "sentencepiece.bpe.model", tmp_path)
    codes = list(original.languages.ids)
    settings = {"tokenizer_class": "MBartTokenizer" if kind == "mbart" else "NllbTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"additional_special_tokens": codes}))
    imported = read_tokenizer(tmp_path)
    assert list(imported.languages.ids) == codes
    # In files of fairseq the languages follow the pieces, and <mask> follows the languages.
    pieces = len(load_sentencepiece((tmp_path / "sentencepiece.bpe.model").read_bytes())) + 1
    assert list(imported.languages.ids.values()) == list(range(pieces, pieces + len(codes)))
    for text in TEXTS:
        assert imported.source.encode(text).ids == original.source.encode(text).ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(RegardError, match="no file lists the languages"):
        read_tokenizer(tmp_path)


def test_names_of_languages_in_a_text_are_text(translators):
    for kind, name in (("mbart", "en_XX"), ("nllb", "eng_Latn"), ("m2m100", "__en__")):
        translator = translators[kind]
        assert not set(translator.language_tokens.ids.values()) & set(
            translator.source_tokenizer.encode(f"{name} a {name}")
        )


@pytest.mark.parametrize("kind", ["nllb", "mbart"])
def test_fine_tuning_on_one_pair(translators, kind, tmp_path):
    (source, target), other = PAIRS[kind][0], PAIRS[kind][2]
    translators[kind].save(tmp_path / "in")
    lines = phrases("phrasebook", 40)
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(lines[::2], lines[1::2])))
    options: dict[str, Any] = dict(start_from=tmp_path / "in", quiet=True)
    options["train"] = {"steps": 30, "warmup": 2, "workers": 1, "device": "cpu", "batch_tokens": 512, "lr": 1e-3}
    with pytest.raises(RegardError, match="fine-tuned on one language pair"):
        regard.train(
            [str(tmp_path / "pairs.tsv")] * 2,
            tmp_path / "no",
            languages=["-".join(p) for p in PAIRS[kind][:2]],
            **options,
        )
    tuned = regard.train(tmp_path / "pairs.tsv", tmp_path / "out", languages=[f"{source}-{target}"], **options)
    loaded = load(tmp_path / "out", "cpu")
    assert loaded.languages == translators[kind].languages
    assert loaded(TEXTS[0]) == tuned(TEXTS[0]) == loaded(TEXTS[0], target, source)
    loaded(TEXTS[0], other[1], other[0])
    pair = lines[0], lines[1]
    before, after = (one.score(pair, to=target, source_language=source).logprob for one in (translators[kind], loaded))
    assert after > before + 10


def test_code_of_a_token():
    tokens = LanguageTokens({"en": 5, "fr": 6}, "sos", "after_end")
    assert (tokens.code(6), tokens.code(7), tokens.code(None)) == ("fr", None, None)
