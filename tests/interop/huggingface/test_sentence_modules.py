"""Sentence embeddings of sentence-transformers folders, compared with pooled outputs of transformers."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.pipelines import load, save
from tests.interop.huggingface.test_bert import make_hf_model

TEXTS = ["w5 w9 w17 w33 w8", "w7 w21", "w30 w31 w32 w6 w10 w11 w12 w13 w14 w15"]
MAX_LEN = 8
MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write_modules(folder, pooling, *, layers=(), settings=None, prompts=None, subfolder=""):
    """Writes the files of sentence-transformers beside a model of width 30."""
    modules = [("Transformer", subfolder), ("Pooling", "1_Pooling")]
    modules += [(name, f"{i}_{name}") for i, (name, _) in enumerate(layers, 2)]
    for name, (kind, content) in zip((path for _, path in modules[2:]), layers):
        (folder / name).mkdir()
        if kind == "Dense":
            (folder / name / "config.json").write_text(json.dumps(content[0]))
            save_file(content[1], folder / name / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / subfolder / "sentence_bert_config.json").write_text(json.dumps(settings or {"max_seq_length": MAX_LEN}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))


def dense(in_features, out_features, activation, *, bias=True):
    tensors = {"linear.weight": torch.randn(out_features, in_features) / 4}
    if bias:
        tensors["linear.bias"] = torch.randn(out_features)
    table = {"in_features": in_features, "out_features": out_features, "bias": bias}
    return "Dense", (table | {"activation_function": f"torch.nn.modules.{activation}"}, tensors)


def hidden_states(hf_model, text, max_len=MAX_LEN):
    """The token vectors of transformers for a text of the test tokenizer, cut to a length."""
    ids = [2, *[int(word[1:]) for word in text.split()][: max_len - 2], 3]
    with torch.no_grad():
        return hf_model(torch.tensor([ids])).last_hidden_state[0].numpy()


def pool(x, mode):
    weights = np.arange(1, len(x) + 1)[:, None]
    return {
        "cls": x[0],
        "max": x.max(0),
        "mean": x.mean(0),
        "mean_sqrt_len_tokens": x.sum(0) / np.sqrt(len(x)),
        "weightedmean": (weights * x).sum(0) / weights.sum(),
        "lasttoken": x[-1],
    }[mode]


@pytest.fixture(scope="module")
def bert(transformers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return make_hf_model(transformers, "Bert", 0, "Model", folder), folder


@pytest.fixture
def folder(bert, tmp_path):
    for file in bert[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def assert_embeddings(pipeline, expected, tmp_path):
    """Compares embeddings, also after saving and after an export and import."""
    save(tmp_path / "saved", pipeline)
    export_huggingface(pipeline, tmp_path / "exported")
    for one in (pipeline, load(tmp_path / "saved", "cpu"), import_huggingface(tmp_path / "exported")):
        assert one.embedding_width == len(expected[0])
        np.testing.assert_allclose(one.embed(TEXTS), expected, atol=1e-5)
    assert pipeline.fingerprint() == load(tmp_path / "saved", "cpu").fingerprint()


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_matches_transformers(bert, folder, tmp_path, mode):
    write_modules(folder, {"word_embedding_dimension": 30} | {key: m == mode for m, key in MODES.items()})
    expected = [pool(hidden_states(bert[0], text), mode) for text in TEXTS]
    assert_embeddings(import_huggingface(folder), expected, tmp_path)


def test_layers_after_concatenated_pooling_match_transformers(bert, folder, tmp_path):
    torch.manual_seed(0)
    first, second = dense(60, 12, "activation.Tanh"), dense(12, 9, "linear.Identity", bias=False)
    layers = [first, ("Normalize", None), second]
    write_modules(folder, {"embedding_dimension": 30, "pooling_mode": ["lasttoken", "cls"]}, layers=layers)
    pipeline = import_huggingface(folder)
    expected = []
    for text in TEXTS:
        x = hidden_states(bert[0], text)
        x = np.tanh(
            first[1][1]["linear.weight"].numpy() @ np.concatenate([x[-1], x[0]]) + first[1][1]["linear.bias"].numpy()
        )
        expected.append(second[1][1]["linear.weight"].numpy() @ (x / np.linalg.norm(x)))
    assert_embeddings(pipeline, expected, tmp_path)
    exported = load_file(tmp_path / "exported/2_Dense/model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in first[1][1].items())
    assert pipeline.fingerprint() != import_huggingface(bert[1]).fingerprint()


def test_prompt_dimensions_and_lower_case(bert, folder, tmp_path):
    prompts = {"prompts": {"query": "w40 ", "document": ""}, "default_prompt_name": "query", "truncate_dim": 5}
    write_modules(
        folder, {"pooling_mode": "mean"}, prompts=prompts, settings={"max_seq_length": None, "do_lower_case": True}
    )
    pipeline = import_huggingface(folder)
    assert pipeline.sentence.config.max_len == 13
    expected = [hidden_states(bert[0], f"w40 {text}", 13).mean(0)[:5] for text in TEXTS]
    np.testing.assert_allclose(pipeline.embed([text.upper() for text in TEXTS]), expected, atol=1e-5)
    assert_embeddings(pipeline, expected, tmp_path)


def test_named_prompts_are_reported(folder, caplog):
    write_modules(folder, {"pooling_mode": "mean"}, prompts={"prompts": {"query": "query: "}})
    with caplog.at_level(logging.WARNING, "regard"):
        import_huggingface(folder)
    assert "query = 'query: '" in caplog.text


def test_model_in_a_folder_of_its_own(bert, tmp_path):
    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    for file in bert[1].iterdir():
        (inner / file.name).write_bytes(file.read_bytes())
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, subfolder="0_Transformer")
    expected = [hidden_states(bert[0], text)[0] for text in TEXTS]
    np.testing.assert_allclose(import_huggingface(tmp_path).embed(TEXTS), expected, atol=1e-5)


def test_cut_texts_are_reported_once(folder, caplog):
    write_modules(folder, {"pooling_mode": "mean"})
    pipeline = import_huggingface(folder)
    with caplog.at_level(logging.WARNING, "regard"):
        vectors = pipeline.embed([TEXTS[2], TEXTS[2]])
    assert caplog.text.count("text 1 has more tokens than the model embeds (8)") == 1
    np.testing.assert_array_equal(vectors, pipeline.embed([TEXTS[2], TEXTS[2]], truncate=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": {"pooling_mode": "attention"}}, "pooling_mode = 'attention' is unsupported"),
        ({"pooling": {"word_embedding_dimension": 31}}, "word_embedding_dimension = 31"),
        ({"pooling": {"include_prompt": False}}, "include_prompt"),
        ({"layers": [dense(29, 4, "activation.Tanh")]}, "expected 30 columns"),
        ({"layers": [dense(30, 4, "activation.Hardtanh")]}, "activation_function"),
        ({"layers": [("LSTM", None)]}, "unsupported module 'sentence_transformers.models.LSTM'"),
    ],
)
def test_unsupported_modules_are_errors(folder, change, message):
    write_modules(folder, **{"pooling": {"pooling_mode": "mean"}} | change)
    with pytest.raises(RegardError, match=message.replace("(", r"\(")):
        import_huggingface(folder)


def test_encoders_trained_here_export_their_embedding(folder, tmp_path):
    pipeline = import_huggingface(folder)  # without modules.json
    assert pipeline.sentence.is_default
    expected = pipeline.embed(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)
    assert_embeddings(pipeline, expected, tmp_path)
    assert json.loads((tmp_path / "exported/modules.json").read_text())[-1]["type"].endswith(".Normalize")
