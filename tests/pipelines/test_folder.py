"""Model folders: saving and loading, errors of invalid folders, translating and scoring."""

import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.attention import Cosine
from regard.data import Tokenizer
from regard.data.text.languages import LanguagePair
from regard.data.text.special_tokens import EOS, SOS
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.decode import DecodeConfig
from regard.devices import find_device
from regard.errors import RegardError
from regard.interop import export_argos, export_ctranslate2, export_huggingface
from regard.interop.ctranslate2 import add_positions
from regard.layers import POSITIONS, PositionalEncoding, register_positions
from regard.layers.packed import pack
from regard.models import GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.config_checks import length_limit
from regard.pipelines import FORMAT, Translator, load, make_pipeline, save
from regard.pipelines import folder as model_folder
from regard.pipelines.folder import write_model
from tests.frozen import models as frozen

TEXTS = ["one two three four five", "six seven eight nine ten"]
SMALL: dict = {
    "transformer": TransformerConfig(
        width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.3, max_len=12
    ),
    "seq2seq": Seq2SeqConfig(width=16, dropout=0.3, max_len=12),
}
BEAM = DecodeConfig(beam=3, n_best=3)


def make_translator(family: str, seed: int = 0, shared: bool = True, **changes) -> Translator:
    torch.manual_seed(seed)
    source = Tokenizer.train(TEXTS, "word")
    target = source if shared else Tokenizer.train([text.upper() for text in TEXTS[:1]], "word")
    sizes = dict(source_vocab=source.vocab_size, target_vocab=target.vocab_size, shared_vocab=shared)
    model = make_model(dataclasses.replace(SMALL[family], **sizes, **changes))
    return Translator(model.eval(), source, target, {"step": 3, "note": "é"})


@pytest.fixture
def folder(tmp_path) -> Path:
    save(tmp_path / "model", make_translator("transformer"))
    return tmp_path / "model"


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def load_error(folder: Path) -> str:
    with pytest.raises(RegardError) as caught:
        load(folder, "cpu")
    return str(caught.value)


# Saving and loading


def test_languages_are_saved_and_loaded(tmp_path):
    translator = dataclasses.replace(make_translator("transformer"), language_pairs=(LanguagePair("en", "fr"),))
    save(tmp_path / "model", translator)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["languages"] == ["en", "fr"]
    assert load(tmp_path / "model", "cpu").languages == ("en", "fr")
    assert make_pipeline(translator.model, translator.tokenizers, {}).languages == ()
    recipe = {"recipe": {"data": {"languages": ["de", "en"]}}}
    assert make_pipeline(translator.model, translator.tokenizers, recipe).languages == ("de", "en")


@pytest.mark.parametrize("width", [16, 32, 64])
def test_loaded_tensors_are_aligned(tmp_path, width):
    """Independent of the length of parameter names: CPU kernels round differently on unaligned addresses."""
    save(tmp_path, make_translator("transformer", width=width))
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0
    assert all(parameter.data_ptr() % 16 == 0 for parameter in load(tmp_path, "cpu").model.parameters())


def test_invalid_languages_raise(folder):
    edit_config(folder, languages="en fr")
    assert "config.json: languages must be a list of codes (got 'en fr')." in load_error(folder)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", SMALL)
def test_loaded_translator_equals_the_saved_one(tmp_path, family, shared):
    saved = make_translator(family, shared=shared)
    saved.save(tmp_path / "deep" / "model")
    loaded = load(tmp_path / "deep" / "model", "cpu")
    assert loaded.model.config == saved.model.config
    assert loaded.training == saved.training
    assert (loaded.source_tokenizer, loaded.target_tokenizer) == (saved.source_tokenizer, saved.target_tokenizer)
    assert (loaded.source_tokenizer is loaded.target_tokenizer) == shared
    assert (tmp_path / "deep" / "model" / "target_tokenizer.json").exists() != shared
    batch = pack([[4, 5, 3], [6, 3]]), pack([[2, 5], [2]])
    assert torch.equal(saved.model(*batch), loaded.model(*batch))
    lines = ["one two", "three"]
    assert [[t.text for t in n] for n in saved.translate(lines, BEAM)] == [
        [t.text for t in n] for n in loaded.translate(lines, BEAM)
    ]


class Ramp(PositionalEncoding):
    def __init__(self, width):
        super().__init__()
        self.direction = torch.nn.Parameter(torch.randn(width))

    def forward(self, positions):
        return positions[..., None] * self.direction


def test_registered_positions_are_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(POSITIONS, "ramp", Ramp)
    saved = make_translator("transformer", positions="ramp")
    saved.save(tmp_path / "model")
    loaded = load(tmp_path / "model", "cpu")
    lines, long_line = ["one two", "three"], " ".join(["one"] * 40)  # beyond max_len
    texts = [[hypothesis.text for hypothesis in n] for n in loaded.translate([*lines, long_line], BEAM)]
    assert texts == [[hypothesis.text for hypothesis in n] for n in saved.translate([*lines, long_line], BEAM)]
    reference = load(tmp_path / "model", "cpu")
    with torch.no_grad():
        reference.model.source_embedding.positions.direction.zero_()
    batch = pack([[4, 5, 3], [6, 3]]), pack([[2, 5], [2]])
    assert not torch.equal(loaded.model(*batch), reference.model(*batch))
    assert torch.equal(loaded.model(*batch), saved.model(*batch))
    monkeypatch.setattr(Ramp, "extrapolates", False)
    assert (length_limit(saved.model.config), length_limit(GPTConfig(positions="ramp"))) == (12, 256)
    with pytest.raises(RegardError, match="CTranslate2 does not support the positions ramp"):
        add_positions(saved.model.config, {}, "encoder")
    with pytest.raises(
        RegardError, match=r"positions must be one of sinusoidal, learned, rotary, none, ramp \(got 'rel"
    ):
        GPTConfig(positions="relative")


def test_components_that_are_not_registered_are_named(folder, monkeypatch):
    for key, name in (("positions", "ramp"), ("cross_score", "my_score"), ("family", "my_family")):
        edit_config(folder, **{key: name})
        assert f"If '{name}' is your own, import the module that registers it first." in load_error(folder)
        edit_config(folder, positions="sinusoidal", cross_score="scaled_dot")
    monkeypatch.setitem(POSITIONS, "offset", type("Offset", (Ramp,), {"__init__": lambda self, width, start: None}))
    with pytest.raises(RegardError, match=r"Offset cannot be built for a model.*'start'.*class method build"):
        make_translator("transformer", positions="offset")
    with pytest.raises(RegardError, match="positional encoding 'rotary' is already registered"):
        register_positions("rotary")(Ramp)


def test_tied_weights_are_saved_once_and_tied_when_loaded(folder):
    names = load_file(folder / "model.safetensors").keys()
    assert "source_embedding.tokens.weight" in names
    assert "output.weight" not in names
    model = load(folder, "cpu").model
    assert model.output.weight is model.source_embedding.tokens.weight is model.target_embedding.tokens.weight


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_changed_weights_or_sizes_are_noticed(folder, caplog, precision):
    load(folder, "cpu").save(folder, precision=precision)
    load(folder, "cpu")
    assert not caplog.records
    weights, config = (folder / "model.safetensors", folder / "config.json")
    before = weights.read_bytes(), config.read_bytes()
    content = bytearray(before[0])
    content[-5] ^= 1  # a single bit
    weights.write_bytes(content)
    changed = load(folder, "cpu")
    assert "weights or sizes are not those that were saved" in caplog.text
    caplog.clear()
    changed.save(folder, precision=precision)  # on purpose
    load(folder, "cpu")
    assert not caplog.records
    weights.write_bytes(before[0])
    config.write_bytes(before[1])
    edit_config(folder, heads=4)
    load(folder, "cpu")
    assert "weights or sizes are not those that were saved" in caplog.text
    caplog.clear()
    config.write_bytes(before[1])
    edit_config(folder, languages=["en", "fr"])  # does not change the model
    load(folder, "cpu")
    assert not caplog.records


def test_checksum_covers_every_block(monkeypatch):
    monkeypatch.setattr(model_folder, "_CHECKSUM_BLOCK", 1000)
    weights = {"a": torch.arange(700.0), "b": torch.tensor(1.0)}
    expected = model_folder._checksum({"heads": 2}, weights)
    for name, position in (("a", 0), ("a", 249), ("a", 250), ("a", 699), ("b", 0)):
        changed = {key: tensor.clone() for key, tensor in weights.items()}
        changed[name].view(-1).view(torch.int32)[position] ^= 1
        assert model_folder._checksum({"heads": 2}, changed) != expected
    assert model_folder._checksum({"heads": 2}, {"a": weights["a"], "c": weights["b"]}) != expected


def replace_score(model):
    model.decoder[1].cross.score = Cosine(scale=4.0)


def replace_attention(model):
    model.encoder[0].attention = nn.MultiheadAttention(16, 2)


def untie(model):
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())


def replace_config(model):
    model.config = dataclasses.replace(model.config, norm="post")


CHANGES = {
    "decoder.1.cross.score is Cosine instead of ScaledDot": replace_score,
    "encoder.0.attention is MultiheadAttention instead of MultiHeadAttention": replace_attention,
    "the parameter output.weight is [14, 16] instead of tied or missing": untie,
    "source_embedding has low_precision = False instead of True": replace_config,
    "decoder.0.attention has mask = None instead of Causal()": lambda model: setattr(
        model.decoder[0].attention, "mask", None
    ),
    "encoder.1.feedforward has activation = 'gelu' instead of 'relu'": lambda model: setattr(
        model.encoder[1].feedforward, "activation", "gelu"
    ),
    "encoder.1 is missing": lambda model: model.encoder.__delitem__(1),
    "encoder_norm has a hook": lambda model: model.encoder_norm.register_forward_hook(lambda *_: None),
    "output has forward = ": lambda model: setattr(model.output, "forward", torch.zeros_like),
    "source_embedding.tokens is ParametrizedEmbedding instead of Embedding": lambda model: (
        nn.utils.parametrizations.weight_norm(model.source_embedding.tokens)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_a_folder_cannot_represent_is_refused(tmp_path, change):
    translator = make_translator("transformer", encoder_layers=2, decoder_layers=2)
    CHANGES[change](translator.model)
    message = re.escape(change) + ".*Undo the change; or describe it in the config"
    for store in (save, export_huggingface, export_ctranslate2, export_argos):
        arguments = (tmp_path / "out", translator) if store is save else (translator, tmp_path / "out")
        with pytest.raises(RegardError, match=message):
            store(*arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_changes_of_weights_and_modes_are_saved(tmp_path, dtype):
    translator = make_translator("transformer")
    translator.model.train().requires_grad_(False).to(dtype)
    translator.model.encoder_norm.weight.fill_(2.0)
    save(tmp_path, translator)
    assert load(tmp_path, "cpu").model.encoder_norm.weight.eq(2).all()
    assert {one.dtype for one in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_ensembles_and_other_objects_are_not_saved(tmp_path):
    translator = make_translator("transformer")
    ensemble = dataclasses.replace(translator, ensemble_members=[make_translator("seq2seq").model])
    with pytest.raises(RegardError, match="An ensemble of several models cannot be stored as one"):
        save(tmp_path / "a", ensemble)
    for other in (translator.model, "model", None):
        with pytest.raises(RegardError, match=f"^{type(other).__name__} cannot be stored as a model"):
            save(tmp_path / "a", other)
    with pytest.raises(RegardError, match=r"^Transformer cannot be stored as a model"):
        save(translator.model, tmp_path / "a")


def test_save_takes_its_arguments_in_either_order(tmp_path):
    translator = make_translator("transformer")
    save(translator, tmp_path / "a")
    regard.save(str(tmp_path / "b"), translator)
    assert load(tmp_path / "a", "cpu").fingerprint() == load(tmp_path / "b", "cpu").fingerprint()


def test_config_contains_format_and_family(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["format"], config["family"], config["shared_tokenizer"]) == (FORMAT, "transformer", True)
    assert config["width"] == 16


def test_saving_a_shared_tokenizer_replaces_separate_ones(tmp_path):
    write_model(tmp_path, make_translator("transformer", shared=False))
    write_model(tmp_path, make_translator("transformer", shared=True))
    loaded = load(tmp_path, "cpu")
    assert loaded.source_tokenizer is loaded.target_tokenizer


def test_folder_without_training_json_loads(folder):
    (folder / "training.json").unlink()
    assert load(folder, "cpu").training == {}


# Errors of invalid folders


def test_missing_files_raise(folder, tmp_path):
    assert load_error(tmp_path / "none").startswith(f"{tmp_path / 'none'}: model folder not found.")
    for name, message in (
        ("tokenizer.json", f"{folder / 'tokenizer.json'}: the file is missing"),
        ("model.safetensors", f"{folder / 'model.safetensors'}: file not found."),
        ("config.json", f"{folder} is not a model folder: config.json is missing"),
    ):
        (folder / name).unlink()
        assert load_error(folder).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": FORMAT + 2},
            "config.json: format 3 is newer than this version of Regard supports (2). Upgrade regard.",
        ),
        ({"format": "one"}, "config.json: not a Regard config (`format` is missing)."),
        (
            {"family": "oracle"},
            "config.json: family must be one of transformer, seq2seq, gpt, bert, vit (got 'orac",
        ),
        ({"family": None}, "config.json: family must be one of transformer, seq2seq, gpt, bert, vit (got None)."),
        (
            {"family": ["transformer"]},
            "config.json: family must be one of transformer, seq2seq, gpt, bert, vit (got [",
        ),
        ({"magic": 1}, "config.json: unknown key magic. Did you mean"),
        ({"width": "wide"}, "config.json: width must be an integer (got 'wide')."),
        ({"width": -1}, "config.json: width must be at least 1 (got -1)."),
        ({"norm": "inside"}, "config.json: norm must be one of pre, post (got 'inside')."),
        ({"positions": "lost"}, "config.json: positions must be one of sinusoidal, "),
        ({"cross_score": "own goal"}, "config.json: cross_score must be one of dot, "),
        ({"width": 32}, "model.safetensors: the weights do not match the config: "),
        ({"encoder_layers": 2}, "model.safetensors: the weights do not match the config: encoder.1."),
        ({"tied": False}, "model.safetensors: the weights do not match the config: "),
        ({"shared_tokenizer": False}, "target_tokenizer.json is missing."),
        ({"width": 0}, "config.json: width must be at least 1 (got 0)."),
        ({"heads": 0}, "config.json: heads must be at least 1 (got 0)."),
        ({"heads": 3}, "config.json: model.width is 16; it must be a multiple of model.heads (3)."),
        ({"heads": 16, "positions": "rotary"}, "config.json: A head is 1 wide; rotary positions need an even number."),
        ({"dropout": float("nan")}, "config.json: dropout must be at least 0 and below 1 (got nan)."),
        (
            {"width": 10**9},
            "model.safetensors: the weights do not match the config: width is 1,000,000,000, but no tensor",
        ),
        (
            {"head_width": 10**8},
            "the weights do not match the config: heads × head width is 200,000,000, but no tensor",
        ),
        ({"encoder_layers": 10**6}, "config.json: encoder_layers must be between 1 and 10,000 (got 1000000)."),
        ({"encoder_layers": 9999}, "the weights do not match the config: encoder_layers is 9,999, but there are only"),
        ({"format": True}, "config.json: not a Regard config (`format` is missing)."),
        ({"special": [1]}, "config.json: special must be an object (got [1])."),
        ({"special": {"pad": -1}}, "config.json: special.pad must be at least 0 (got -1)."),
        ({"special": {"pat": 1}}, "config.json: unknown key special.pat. Did you mean special.pad?"),
        ({"tokenizer_sha256": "abc"}, "config.json: tokenizer_sha256 must be an object (got 'abc')."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_config_raises(folder, changes, message):
    edit_config(folder, **changes)
    error = load_error(folder)
    assert error.startswith(str(folder))
    assert message in error


@pytest.mark.parametrize("name", ["config.json", "training.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "lists or tables are nested too deeply"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "lists or tables are nested too deeply"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is repeated"),
        (rb'{"family": "\ud800"}', "not JSON ('utf-8' codec can't encode"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_broken_json(folder, name, content, message, caplog):
    (folder / name).write_bytes(content)
    if name == "config.json":
        assert load_error(folder).startswith(f"{folder / name}: {message}")
    else:  # only provenance: the model translates without it
        assert load(folder, "cpu").training == {}
        assert f"{folder / name}: {message}" in caplog.text


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_damaged_weights_raise(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert load_error(folder).startswith(f"{path}: the file is damaged")


def test_weights_of_another_family_raise(folder, tmp_path):
    save(tmp_path / "other", make_translator("seq2seq"))
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert "the weights do not match the config" in load_error(folder)


def test_unexpected_weight_raises(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"surplus": torch.ones(1)}, folder / "model.safetensors")
    assert "the weights do not match the config: surplus" in load_error(folder)


def test_tokenizer_of_another_model_raises(folder):
    Tokenizer.train(["alpha beta"], "word").save(folder / "tokenizer.json")
    assert load_error(folder).startswith(f"{folder}: the tokenizer has 6 entries, but the model's vocabulary has 14.")


def test_swapped_tokenizer_of_equal_size_raises(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("▁seven", "▁sevens"), encoding="utf-8")
    message = load_error(folder)
    assert message.startswith(f"{path}: not the tokenizer that the model was saved with. Restore it.")
    assert "remove tokenizer_sha256 from config.json" in message
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["tokenizer_sha256"]  # as older versions wrote it
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    load(folder, "cpu")


def test_source_and_target_tokenizers_have_fingerprints(tmp_path):
    save(tmp_path, make_translator("transformer", shared=False))
    target = tmp_path / "target_tokenizer.json"
    target.write_bytes(target.read_bytes().replace(b"\n", b"\r\n"))  # as some tools convert text files
    load(tmp_path, "cpu")
    target.write_text(target.read_text(encoding="utf-8").replace("▁THREE", "▁DREI"), encoding="utf-8")
    assert load_error(tmp_path).startswith(f"{target}: not the tokenizer that the model was saved with.")


def test_foreign_tokenizers_have_fingerprints(tmp_path):
    translator = make_translator("transformer")
    translator.source_tokenizer.kind = FOREIGN_KIND
    save(tmp_path, translator)
    assert load(tmp_path, "cpu").source_tokenizer.kind == FOREIGN_KIND
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("▁seven", "▁sevens"), encoding="utf-8")
    assert load_error(tmp_path).startswith(f"{path}: not the tokenizer that the model was saved with.")


@pytest.mark.parametrize("path", [123, None, "", [], b"model", "a\0b", {"a": 1}, True], ids=repr)
def test_invalid_folder_name_raises(path):
    with pytest.raises(RegardError, match=r"model folder"):
        load(path)


@pytest.mark.parametrize("device", ["gpu", "", None, 0, ["cpu"]], ids=repr)
def test_unknown_device_raises_with_the_valid_ones(folder, device):
    with pytest.raises(RegardError, match=r"^device must be one of auto, cpu, cuda, mps \(got "):
        load(folder, device=device)


def test_directory_instead_of_a_file_raises(folder):
    for name, message in (("model.safetensors", "the file is damaged"), ("config.json", "cannot be read")):
        (folder / name).unlink()
        (folder / name).mkdir()
        assert load_error(folder).startswith(f"{folder / name}: {message}")


def test_loading_a_folder_initializes_no_weights(folder):
    """To initialize meta tensors, torch imports its compiler, which takes seconds at the start of every command."""
    program = (
        f"import sys; from regard.pipelines import load; load({str(folder)!r}); print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


class Trap:
    """A malicious pickle: sets `sprung` when unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_loading_a_folder_executes_no_code(folder):
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    load(folder, "cpu")
    for name in ("model.safetensors", "config.json", "training.json", "tokenizer.json"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Trap()))
        with nullcontext() if name == "training.json" else pytest.raises(RegardError):
            load(folder, "cpu")
        (folder / name).write_bytes(original)
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung  # the trap works


def test_failed_save_keeps_the_old_model(folder, monkeypatch):
    before = load(folder, "cpu").translate(["one two"], BEAM)[0][0].text
    monkeypatch.setattr("regard.pipelines.folder.weights_to_bytes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_model(folder, make_translator("transformer", seed=5))
    assert load(folder, "cpu").translate(["one two"], BEAM)[0][0].text == before


# Translating and scoring


@pytest.mark.parametrize("family", SMALL)
def test_score_is_the_sum_of_log_probabilities(family):
    translator = make_translator(family, shared=False)
    pairs = [("one two", "ONE TWO THREE"), ("three", ""), ("four five six", "FIVE"), ("seven", "never seen")]
    scores = translator.score(pairs)
    for (source, target), score in zip(pairs, scores):
        source_ids = [*translator.source_tokenizer.encode(source), EOS]
        target_ids = translator.target_tokenizer.encode(target)
        logits = translator.model(pack([source_ids]), pack([[SOS, *target_ids]])).double()
        labels = torch.tensor([*target_ids, EOS])
        expected = logits.log_softmax(-1)[torch.arange(len(labels)), labels].sum().item()
        assert score.logprob == pytest.approx(expected, abs=1e-5)
        assert score.tokens == len(target_ids) + 1
        assert score.mean == pytest.approx(expected / score.tokens, abs=1e-5)


def test_score_matches_beam_search(seq2seq, transformer):
    lines = ["one two three", "four five", "five six seven eight"]
    for translator in (seq2seq, transformer, dataclasses.replace(seq2seq, ensemble_members=[transformer.model])):
        for line, n_best in zip(lines, translator.translate(lines, BEAM)):
            for translation in n_best:
                [score] = translator.score([(line, translation.text)])
                assert score.logprob == pytest.approx(translation.hypothesis.logprob, abs=1e-4)


def test_scores_do_not_depend_on_batching():
    translator = make_translator("transformer")
    pairs = [("one " * n, "two " * (10 - n)) for n in range(1, 10)]
    one_batch = translator.score(pairs)
    for batch_tokens in (1, 7, 20):
        for one, other in zip(one_batch, translator.score(pairs, batch_tokens=batch_tokens)):
            assert one.tokens == other.tokens
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_scoring_an_empty_source_raises():
    with pytest.raises(RegardError, match="pair 2: the source is empty"):
        make_translator("transformer").score([("one", "two"), (" ", "two")])


def test_empty_lines_have_empty_translations():
    translations = make_translator("transformer").translate(["", "one two", "  \t"], BEAM)
    assert [len(n_best) for n_best in translations] == [1, 3, 1]
    assert translations[0][0].text == translations[2][0].text == ""
    assert make_translator("transformer").translate([]) == []


def test_line_beyond_the_length_limit_raises_with_its_number():
    translator = make_translator("transformer", positions="learned")  # at most 12 tokens, including <eos>
    translator.translate(["one " * 11])
    with pytest.raises(
        RegardError, match=r"line 2 has 12 tokens; the model supports at most 11\. Split it, or use --tr"
    ):
        translator.translate(["one", "one " * 12])
    with pytest.raises(RegardError, match="pair 1 has 12 tokens"):
        translator.score([("one", "one " * 12)])


def test_truncate_cuts_source_lines():
    translator = make_translator("transformer")
    cut, short = translator.translate(["one " * 30, "one " * 11], BEAM, truncate=True)
    assert [t.text for t in cut] == [t.text for t in short]
    [cut_score, short_score] = translator.score([("one " * 30, "two"), ("one " * 11, "two")], truncate=True)
    assert cut_score.logprob == pytest.approx(short_score.logprob, abs=1e-5)


def test_truncate_cuts_target_lines():
    [cut, short] = make_translator("transformer").score([("one", "two " * 30), ("one", "two " * 11)], truncate=True)
    assert cut.tokens == short.tokens == 12  # eleven tokens of text, and <eos>
    assert cut.logprob == pytest.approx(short.logprob, abs=1e-5)


# Ensembles


def test_ensemble_averages_probabilities(tmp_path):
    members = [make_translator("transformer", seed=1), make_translator("seq2seq", seed=2)]
    for i, member in enumerate(members):
        member.save(tmp_path / str(i))
    ensemble = load([tmp_path / "0", tmp_path / "1"], "cpu")
    [score] = ensemble.score([("one two", "two")])
    source, target = members[0].teacher_forced([(members[0].encode_source("one two"), members[0].encode_target("two"))])
    mean = torch.stack([member.model(source, target).double().softmax(-1) for member in members]).mean(0)
    labels = torch.tensor([*members[0].encode_target("two"), EOS])
    assert score.logprob == pytest.approx(mean[torch.arange(2), labels].log().sum().item(), abs=1e-5)


def test_ensemble_of_one_equals_the_model(folder):
    assert load([folder], "cpu")("one two") == load(folder, "cpu")("one two")


def test_ensemble_has_the_smallest_length_limit(tmp_path):
    save(tmp_path / "long", make_translator("transformer"))
    save(tmp_path / "short", make_translator("transformer", max_len=8, positions="learned"))
    with pytest.raises(RegardError, match="supports at most 7"):
        load([tmp_path / "long", tmp_path / "short"], "cpu").translate(["one " * 9])


def test_ensemble_with_different_tokenizers_raises(tmp_path):
    save(tmp_path / "a", make_translator("transformer"))
    save(tmp_path / "b", make_translator("transformer", shared=False))
    with pytest.raises(
        RegardError, match=r"b: its tokenizers differ from those of .*a\. The models of an ensemble must share"
    ):
        load([tmp_path / "a", tmp_path / "b"], "cpu")


def test_unavailable_device_raises():
    assert find_device("auto").type in ("cpu", "cuda", "mps")
    missing = [name for name, available in (("cuda", torch.cuda.is_available()), ("mps", False)) if not available]
    for name in missing:
        if name == "mps" and torch.backends.mps.is_available():
            continue
        with pytest.raises(RegardError, match=f"Device {name} is not available"):
            find_device(name)


def test_load_and_save_are_public():
    assert regard.load is load
    assert regard.save is save


def test_opening_a_model_does_not_import_dynamo(tmp_path):
    """torch._dynamo takes a second and 140 MiB; initializers on meta tensors would import it."""
    for name in ("transformer", "seq2seq, concat", "gpt", "bert, mask", "vit, classify", "vit, segment"):
        save(tmp_path / name, frozen.make_pipeline(name))
    script = (
        "import sys; from pathlib import Path; from regard.interop.weight_mapping import parameter_shapes; "
        "from regard.pipelines import load\n"
        "for folder in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    parameter_shapes(load(folder, 'cpu').model.config)\n"
        "    assert 'torch._dynamo' not in sys.modules, folder\n"
        "from regard.models import ViTConfig\n"
        "parameter_shapes(ViTConfig(image_height=224, image_width=224))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
