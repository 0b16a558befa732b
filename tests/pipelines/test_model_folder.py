"""Model folders: what is saved comes back, and what is wrong with one is said."""

import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.data import EOS, SOS, Tokenizer
from regard.data.text.tokenizer import FOREIGN
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Seq2SeqConfig, TransformerConfig, make_model
from regard.pipelines import FORMAT, Translator, bundle_of, find_device, load, save

TEXTS = ["one two three four five", "six seven eight nine ten"]
SMALL: dict = {
    "transformer": TransformerConfig(
        width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.3, max_len=12
    ),
    "seq2seq": Seq2SeqConfig(width=16, dropout=0.3, max_len=12),
}
BEAM = DecodeConfig(beam=3, n_best=3)


def translator_of(family: str, seed: int = 0, shared: bool = True, **changes) -> Translator:
    torch.manual_seed(seed)
    source = Tokenizer.train(TEXTS, "word")
    target = source if shared else Tokenizer.train([text.upper() for text in TEXTS[:1]], "word")
    sizes = dict(source_vocab=source.vocab_size, target_vocab=target.vocab_size, shared_vocab=shared)
    model = make_model(dataclasses.replace(SMALL[family], **sizes, **changes))
    return Translator(model.eval(), source, target, {"step": 3, "note": "é"})


@pytest.fixture
def folder(tmp_path) -> Path:
    save(tmp_path / "model", translator_of("transformer"))
    return tmp_path / "model"


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def refusal(folder: Path) -> str:
    with pytest.raises(RegardError) as caught:
        load(folder, "cpu")
    return str(caught.value)


# What comes back


def test_languages_are_kept(tmp_path):
    translator = dataclasses.replace(translator_of("transformer"), languages=("en", "fr"))
    save(tmp_path / "model", translator)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["languages"] == ["en", "fr"]
    assert load(tmp_path / "model", "cpu").languages == ("en", "fr")
    assert bundle_of(translator.model, translator.tokenizers, {}).languages == ()
    recipe = {"recipe": {"data": {"languages": ["de", "en"]}}}
    assert bundle_of(translator.model, translator.tokenizers, recipe).languages == ("de", "en")


@pytest.mark.parametrize("width", [16, 32, 64])
def test_loaded_tensors_are_aligned(tmp_path, width):
    """Independent of the length of parameter names: CPU kernels round differently on addresses that are not aligned."""
    save(tmp_path, translator_of("transformer", width=width))
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0
    assert all(parameter.data_ptr() % 16 == 0 for parameter in load(tmp_path, "cpu").model.parameters())


def test_languages_that_are_no_codes(folder):
    edit(folder, languages="en fr")
    assert "config.json: languages = 'en fr'; expected a list of codes." in refusal(folder)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", SMALL)
def test_what_is_loaded_is_what_was_saved(tmp_path, family, shared):
    one = translator_of(family, shared=shared)
    one.save(tmp_path / "deep" / "model")
    other = load(tmp_path / "deep" / "model", "cpu")
    assert other.model.config == one.model.config
    assert other.training == one.training
    assert (other.source_tokenizer, other.target_tokenizer) == (one.source_tokenizer, one.target_tokenizer)
    assert (other.source_tokenizer is other.target_tokenizer) == shared
    assert (tmp_path / "deep" / "model" / "target_tokenizer.json").exists() != shared
    batch = pack([[4, 5, 3], [6, 3]]), pack([[2, 5], [2]])
    assert torch.equal(one.model(*batch), other.model(*batch))
    lines = ["one two", "three"]
    assert [[t.text for t in n] for n in one.translate(lines, BEAM)] == [
        [t.text for t in n] for n in other.translate(lines, BEAM)
    ]


def test_tied_weights_are_saved_once_and_tied_again(folder):
    names = load_file(folder / "model.safetensors").keys()
    assert "source_embedding.tokens.weight" in names
    assert "output.weight" not in names
    model = load(folder, "cpu").model
    assert model.output.weight is model.source_embedding.tokens.weight is model.target_embedding.tokens.weight


def test_the_config_states_format_and_family(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["format"], config["family"], config["shared_tokenizer"]) == (FORMAT, "transformer", True)
    assert config["width"] == 16


def test_a_shared_tokeniser_over_two(tmp_path):
    save(tmp_path, translator_of("transformer", shared=False))
    save(tmp_path, translator_of("transformer", shared=True))
    again = load(tmp_path, "cpu")
    assert again.source_tokenizer is again.target_tokenizer


def test_a_folder_without_training_json_is_a_folder(folder):
    (folder / "training.json").unlink()
    assert load(folder, "cpu").training == {}


# What is wrong with a folder


def test_no_folder(tmp_path):
    assert refusal(tmp_path / "none").startswith(f"{tmp_path / 'none'}: there is no such model folder.")


def test_another_folder(tmp_path):
    assert "not a model folder, for it has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1}, "config.json: format 2 is newer than this Regard knows. Upgrade regard."),
        ({"format": "one"}, "config.json: not a config of Regard (it states no format)."),
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
        ({"width": "wide"}, "config.json: width must be a whole number (got 'wide')."),
        ({"width": -1}, "config.json: width must be at least 1 (got -1)."),
        ({"norm": "inside"}, "config.json: norm must be one of pre, post (got 'inside')."),
        ({"positions": "lost"}, "config.json: positions must be one of sinusoidal, "),
        ({"cross_score": "own goal"}, "config.json: cross_score must be one of dot, "),
        ({"width": 32}, "model.safetensors: the weights do not fit the config: "),
        ({"encoder_layers": 2}, "model.safetensors: the weights do not fit the config: encoder.1."),
        ({"tied": False}, "model.safetensors: the weights do not fit the config: "),
        ({"shared_tokenizer": False}, "target_tokenizer.json is missing."),
        ({"width": 0}, "config.json: width must be at least 1 (got 0)."),
        ({"heads": 0}, "config.json: heads must be at least 1 (got 0)."),
        ({"heads": 3}, "config.json: model.width is 16; it must be a multiple of model.heads (3)."),
        ({"heads": 16, "positions": "rotary"}, "config.json: A head is 1 wide; rotary positions need an even number."),
        ({"dropout": float("nan")}, "config.json: dropout must be at least 0 and below 1 (got nan)."),
        (
            {"width": 10**9},
            "model.safetensors: the weights do not fit the config: width is 1,000,000,000, and no tensor",
        ),
        ({"head_width": 10**8}, "the weights do not fit the config: heads × head width is 200,000,000, and no tensor"),
        ({"encoder_layers": 10**6}, "config.json: encoder_layers must be between 1 and 10,000 (got 1000000)."),
        ({"encoder_layers": 9999}, "the weights do not fit the config: encoder_layers is 9,999, and there are"),
        ({"format": True}, "config.json: not a config of Regard (it states no format)."),
        ({"special": [1]}, "config.json: special must be a table (got [1])."),
        ({"special": {"pad": -1}}, "config.json: special.pad must be at least 0 (got -1)."),
        ({"special": {"pat": 1}}, "config.json: unknown key special.pat. Did you mean special.pad?"),
        ({"tokenizer_sha256": "abc"}, "config.json: tokenizer_sha256 must be a table (got 'abc')."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_that_cannot_be(folder, changes, says):
    edit(folder, **changes)
    message = refusal(folder)
    assert message.startswith(str(folder))
    assert says in message


@pytest.mark.parametrize("name", ["config.json", "training.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": ', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "lists or tables are nested too deeply"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "lists or tables are nested too deeply"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is stated twice"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_broken_json(folder, name, content, says):
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith(f"{folder / name}: {says}")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith(f"{folder / 'model.safetensors'}: the weights are missing.")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_damaged_weights(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(folder).startswith(f"{path}: damaged")


def test_the_weights_of_another_family(folder, tmp_path):
    save(tmp_path / "other", translator_of("seq2seq"))
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert "the weights do not fit the config" in refusal(folder)


def test_a_weight_too_many(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"surplus": torch.ones(1)}, folder / "model.safetensors")
    assert "the weights do not fit the config: surplus" in refusal(folder)


def test_a_missing_tokeniser(folder):
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json: the file is missing" in refusal(folder)


def test_the_tokeniser_of_another_model(folder):
    Tokenizer.train(["alpha beta"], "word").save(folder / "tokenizer.json")
    assert refusal(folder).startswith(f"{folder}: a tokeniser of 6 entries, but the model knows 14.")


def test_a_swapped_tokenizer_of_equal_size_is_noticed(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("▁seven", "▁sevens"), encoding="utf-8")
    message = refusal(folder)
    assert message.startswith(f"{path}: not the tokenizer that the model was saved with. Put that one back.")
    assert "remove tokenizer_sha256 from config.json" in message
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["tokenizer_sha256"]  # as older versions wrote it
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    load(folder, "cpu")


def test_the_tokenizers_of_both_sides_have_a_fingerprint(tmp_path):
    save(tmp_path, translator_of("transformer", shared=False))
    target = tmp_path / "target_tokenizer.json"
    target.write_bytes(target.read_bytes().replace(b"\n", b"\r\n"))  # as some programs copy text files
    load(tmp_path, "cpu")
    target.write_text(target.read_text(encoding="utf-8").replace("▁THREE", "▁DREI"), encoding="utf-8")
    assert refusal(tmp_path).startswith(f"{target}: not the tokenizer that the model was saved with.")


def test_tokenizers_of_another_program_have_a_fingerprint(tmp_path):
    one = translator_of("transformer")
    one.source_tokenizer.kind = FOREIGN
    save(tmp_path, one)
    assert load(tmp_path, "cpu").source_tokenizer.kind == FOREIGN
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("▁seven", "▁sevens"), encoding="utf-8")
    assert refusal(tmp_path).startswith(f"{path}: not the tokenizer that the model was saved with.")


@pytest.mark.parametrize("path", [123, None, "", [], b"model", "a\0b", {"a": 1}, True], ids=repr)
def test_what_is_not_the_name_of_a_folder(path):
    with pytest.raises(RegardError, match=r"model folder"):
        load(path)


@pytest.mark.parametrize("device", ["gpu", "", None, 0, ["cpu"]], ids=repr)
def test_an_unknown_device_is_refused_with_the_known_ones(folder, device):
    with pytest.raises(RegardError, match=r"^device must be one of auto, cpu, cuda, mps \(got "):
        load(folder, device=device)


def test_a_directory_in_the_place_of_a_file(folder):
    for name, says in (("model.safetensors", "damaged"), ("config.json", "cannot be read")):
        (folder / name).unlink()
        (folder / name).mkdir()
        assert refusal(folder).startswith(f"{folder / name}: {says}")


def test_opening_a_folder_draws_no_weights(folder):
    """torch imports its compiler to fill a tensor without memory: seconds, at the start of every command."""
    program = (
        f"import sys; from regard.pipelines import load; load({str(folder)!r}); print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


class Trap:
    """What a malicious file would do when unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_opening_a_folder_runs_no_code(folder):
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    load(folder, "cpu")
    for name in ("model.safetensors", "config.json", "training.json", "tokenizer.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Trap()))
        refusal(folder)
        (folder / name).write_bytes(kept)
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung  # the trap works


def test_a_save_that_fails_leaves_the_old_model_whole(folder, monkeypatch):
    before = load(folder, "cpu").translate(["one two"], BEAM)[0][0].text
    monkeypatch.setattr("regard.pipelines.model_folder.weights_to_bytes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(folder, translator_of("transformer", seed=5))
    assert load(folder, "cpu").translate(["one two"], BEAM)[0][0].text == before


# Translating and scoring


@pytest.mark.parametrize("family", SMALL)
def test_score_is_the_sum_of_the_log_probabilities(family):
    translator = translator_of(family, shared=False)
    pairs = [("one two", "ONE TWO THREE"), ("three", ""), ("four five six", "FIVE"), ("seven", "never seen")]
    scores = translator.score(pairs)
    for (source, target), score in zip(pairs, scores):
        source_ids = [*translator.source_tokenizer.encode(source), EOS]
        target_ids = translator.target_tokenizer.encode(target)
        logits = translator.model(pack([source_ids]), pack([[SOS, *target_ids]])).double()
        wanted = torch.tensor([*target_ids, EOS])
        by_hand = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted].sum().item()
        assert score.logprob == pytest.approx(by_hand, abs=1e-5)
        assert score.tokens == len(target_ids) + 1
        assert score.mean == pytest.approx(by_hand / score.tokens, abs=1e-5)


def test_score_is_what_the_beam_thought(seq2seq, transformer):
    lines = ["one two three", "four five", "five six seven eight"]
    for translator in (seq2seq, transformer, dataclasses.replace(seq2seq, partners=[transformer.model])):
        for line, n_best in zip(lines, translator.translate(lines, BEAM)):
            for translation in n_best:
                [score] = translator.score([(line, translation.text)])
                assert score.logprob == pytest.approx(translation.hypothesis.logprob, abs=1e-4)


def test_scores_do_not_depend_on_the_batch():
    translator = translator_of("transformer")
    pairs = [("one " * n, "two " * (10 - n)) for n in range(1, 10)]
    whole = translator.score(pairs)
    for batch_tokens in (1, 7, 20):
        for one, other in zip(whole, translator.score(pairs, batch_tokens=batch_tokens)):
            assert one.tokens == other.tokens
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_an_empty_source_cannot_be_scored():
    with pytest.raises(RegardError, match="pair 2: the source is empty"):
        translator_of("transformer").score([("one", "two"), (" ", "two")])


def test_empty_lines_are_answered_by_empty_ones():
    answers = translator_of("transformer").translate(["", "one two", "  \t"], BEAM)
    assert [len(answer) for answer in answers] == [1, 3, 1]
    assert answers[0][0].text == answers[2][0].text == ""
    assert translator_of("transformer").translate([]) == []


def test_too_long_a_line_is_an_error_that_names_it():
    translator = translator_of("transformer", positions="learned")  # takes 12 tokens, <eos> included
    translator.translate(["one " * 11])
    with pytest.raises(
        RegardError, match=r"line 2 has 12 tokens, and the model takes at most 11\. Split it, or use --tr"
    ):
        translator.translate(["one", "one " * 12])
    with pytest.raises(RegardError, match="pair 1 has 12 tokens"):
        translator.score([("one", "one " * 12)])


def test_truncate_cuts_a_line_short():
    translator = translator_of("transformer")
    cut, short = translator.translate(["one " * 30, "one " * 11], BEAM, truncate=True)
    assert [t.text for t in cut] == [t.text for t in short]
    [cut_score, short_score] = translator.score([("one " * 30, "two"), ("one " * 11, "two")], truncate=True)
    assert cut_score.logprob == pytest.approx(short_score.logprob, abs=1e-5)


def test_truncate_cuts_a_given_target_short():
    [cut, short] = translator_of("transformer").score([("one", "two " * 30), ("one", "two " * 11)], truncate=True)
    assert cut.tokens == short.tokens == 12  # eleven of the text, and <eos>
    assert cut.logprob == pytest.approx(short.logprob, abs=1e-5)


# Several folders


def test_an_ensemble_gives_the_mean_of_the_probabilities(tmp_path):
    members = [translator_of("transformer", seed=1), translator_of("seq2seq", seed=2)]
    for i, member in enumerate(members):
        member.save(tmp_path / str(i))
    together = load([tmp_path / "0", tmp_path / "1"], "cpu")
    [score] = together.score([("one two", "two")])
    source, target = members[0].teacher_forced([(members[0].source_ids("one two"), members[0].target_ids("two"))])
    mean = torch.stack([member.model(source, target).double().softmax(-1) for member in members]).mean(0)
    wanted = torch.tensor([*members[0].target_ids("two"), EOS])
    assert score.logprob == pytest.approx(mean[torch.arange(2), wanted].log().sum().item(), abs=1e-5)


def test_an_ensemble_of_one_is_that_one(folder):
    assert load([folder], "cpu")("one two") == load(folder, "cpu")("one two")


def test_the_shortest_limit_of_an_ensemble_counts(tmp_path):
    save(tmp_path / "long", translator_of("transformer"))
    save(tmp_path / "short", translator_of("transformer", max_len=8, positions="learned"))
    with pytest.raises(RegardError, match="takes at most 7"):
        load([tmp_path / "long", tmp_path / "short"], "cpu").translate(["one " * 9])


def test_models_with_other_tokenisers_cannot_vote(tmp_path):
    save(tmp_path / "a", translator_of("transformer"))
    save(tmp_path / "b", translator_of("transformer", shared=False))
    with pytest.raises(RegardError, match=r"b: its tokenizers are not those of .*a\. Models vote token by token"):
        load([tmp_path / "a", tmp_path / "b"], "cpu")


def test_devices():
    assert find_device("auto").type in ("cpu", "cuda", "mps")
    missing = [name for name, there in (("cuda", torch.cuda.is_available()), ("mps", False)) if not there]
    for name in missing:
        if name == "mps" and torch.backends.mps.is_available():
            continue
        with pytest.raises(RegardError, match=f"This machine has no {name} device"):
            find_device(name)


def test_the_public_door_is_the_same():
    assert regard.load is load
    assert regard.save is save
