"""The task `classify`: texts and pairs of texts, from scratch and by fine-tuning."""

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from regard.data.text.labeled_texts import LabeledText
from regard.data.text.special_tokens import ENCODER_TOKENS
from regard.data.text.tokenizer import FOREIGN_KIND, SPECIAL_TOKEN_NAMES, Tokenizer
from regard.models import Bert, make_model
from regard.pipelines import Classification, TextEncoder, load, load_weights
from regard.training import DataConfig, TrainConfig, recipe_from_dict, run_recipe
from regard.training.datasets import Dataset
from regard.training.fine_tuning import HEAD_PARAMETERS
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape
from regard.viewer import build_trace, look
from tests.training.toy_tasks import ANIMALS, sentences, toy, write_text

CLASSIFY = TASKS["classify"]
LEARN = {"steps": 60, "lr": 1e-2, "validate_every": 60, "save_every": 100}
STILL = {"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}}


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """The model folder of a masked language model."""
    folder = tmp_path_factory.mktemp("mask")
    run_recipe(toy("mask", folder), folder / "out", quiet=True)
    return folder / "out"


def test_classification_rule_is_learned(tmp_path):
    recipe = toy("classify", tmp_path, train=LEARN | {"validate_by": "accuracy"})
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    assert model.model.config.labels == ("birds", "others")
    assert model.training["validation"]["accuracy"] == 100
    texts = sentences(50, seed=9)
    expected = ["birds" if "hen" in text or "owl" in text else "others" for text in texts]
    assert [prediction.label for prediction in model.classify(texts)] == expected
    assert len(set(expected)) == 2


def test_query_pooling_learns_and_is_shown(tmp_path):
    recipe = toy("classify", tmp_path, model={"pooling": "query"}, train=LEARN | {"validate_by": "accuracy"})
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    assert model.training["validation"]["accuracy"] == 100
    assert (model.model.config.pooling, model.model.config.pooler) == ("query", "none")
    opened = load(tmp_path / "out", "cpu")
    assert opened.classify("the hen") == model.classify("the hen")
    assert opened.embed(["the hen", "the cat"]).shape == (2, opened.model.config.width)
    seen = look(opened, "the hen")
    attention = seen.maps["query_pool.attention"]
    assert (attention.kind, attention.rows, attention.columns) == ("cross", ["query"], ["<sos>", "the", "hen", "<eos>"])
    assert attention.head_weights().sum() == pytest.approx(1)
    assert seen.alignment is attention
    for name in ("page.html", "map.png"):
        seen.save(tmp_path / name)
    assert max(step["differs"] or 0.0 for step in build_trace(seen).steps) < 1e-5


def test_fine_tuning_with_query_pooling(tmp_path, masked):
    recipe = toy("classify", tmp_path, model={"pooling": "query"}, **STILL)
    model = run_recipe(recipe, tmp_path / "out", start_from=masked, quiet=True)
    assert model.model.query_pool is not None
    # A fine-tuned classifier keeps its query pooling, even if the recipe has another pooling.
    again = run_recipe(toy("classify", tmp_path, **STILL), tmp_path / "again", start_from=tmp_path / "out", quiet=True)
    assert again.model.config.pooling == "query"
    torch.testing.assert_close(again.model.query_pool.question, model.model.query_pool.question)
    masks = run_recipe(toy("mask", tmp_path, **STILL), tmp_path / "masks", start_from=tmp_path / "out", quiet=True)
    assert masks.model.config.pooling == "first"


def test_order_of_two_texts_is_learned(tmp_path):
    """The label is which of the texts has the bird, so a bag of words is not enough."""
    birds, others = ("hen", "owl"), ("cat", "dog", "cow", "fox")
    lines = [line for a in birds for b in others for line in (f"the {a}\tthe {b}\tfirst", f"the {b}\tthe {a}\tsecond")]
    named = write_text(tmp_path / "validation.tsv", lines)
    recipe = toy("classify", tmp_path, data={"validation": [named]}, model={"dropout": 0.0}, train=LEARN)
    write_text(tmp_path / "labeled.tsv", lines * 8)
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    assert model.training["validation"]["accuracy"] == 100
    assert [prediction.label for prediction in model.classify([("the owl", "the fox"), ("the fox", "the owl")])] == [
        "first",
        "second",
    ]


def test_accuracy_is_the_share_of_correct_labels(tmp_path):
    named = write_text(tmp_path / "validation.tsv", ["the hen\tbirds", "the cat\tothers", "the dog\tbirds", "a\tbirds"])
    recipe = toy("classify", tmp_path, data={"validation": [named]})
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    labels = [prediction.label for prediction in model.classify(["the hen", "the cat", "the dog", "a"])]
    correct = sum(one == other for one, other in zip(labels, ["birds", "others", "birds", "birds"]))
    assert model.training["validation"]["accuracy"] == 25 * correct


def test_validation_classifies_both_texts_and_truncates():
    dataset = Dataset(
        [], [LabeledText(("a", "b"), "yes"), LabeledText(("c",), "no"), LabeledText(("d",), "yes")], "labeled texts"
    )

    class AlwaysYes:
        def classify(self, texts, truncate):
            assert truncate
            assert texts == [("a", "b"), ("c",), ("d",)]
            return [Classification("yes", 1.0, {"yes": 1.0, "no": 0.0})] * 3

    assert CLASSIFY.validation_scores(AlwaysYes(), dataset)["accuracy"] == pytest.approx(200 / 3)


def test_label_smoothing_only_applies_in_training(tmp_path):
    recipe = toy("classify", tmp_path, model={"dropout": 0.0})
    dataset = CLASSIFY.read(recipe.data)
    tokenizers = CLASSIFY.make_tokenizers(dataset, recipe.tokenizer)
    config = CLASSIFY.complete_config(recipe.model, dataset, tokenizers)
    encoded = CLASSIFY.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, True))
    batch = next(encoded.batches.epoch(0))
    torch.manual_seed(0)
    model = make_model(config)
    log_p = model(*batch.inputs)[: batch.sentences].log_softmax(-1)
    targets = batch.targets[: batch.sentences]
    nll = -log_p.gather(1, targets[:, None]).sum()
    trained = CLASSIFY.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2))
    torch.testing.assert_close(trained.loss, 0.8 * nll - 0.2 * log_p.mean(1).sum())
    with torch.no_grad():
        validated = CLASSIFY.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2))
    torch.testing.assert_close(validated.loss, nll)
    assert validated.tokens == batch.sentences


# Fine-tuning


def encoder_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD_PARAMETERS)}


def test_fine_tuning_keeps_the_encoder_of_a_masked_language_model(masked, tmp_path):
    before = encoder_weights(load_file(masked / "model.safetensors"))
    model = run_recipe(toy("classify", tmp_path, **STILL), tmp_path / "out", start_from=masked, quiet=True)
    after = encoder_weights(load_file(tmp_path / "out" / "model.safetensors"))
    assert "embedding.tokens.weight" in before
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.model.config.head == "classify"
    assert model.model.config.pooler == "tanh"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (masked / "tokenizer.json").read_bytes()


def test_fine_tuning_of_an_imported_model_whose_special_ids_are_those_of_regard(masked, tmp_path):
    """As in ALBERT, whose <pad>, <unk>, [CLS], [SEP] and [MASK] have the ids 0 to 4."""
    origin = load(masked, "cpu")
    names = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted(set(origin.tokenizer.backend_tokenizer.get_vocab()) - {*SPECIAL_TOKEN_NAMES, "<mask>"})
    vocabulary = {name: i for i, name in enumerate([*names, *words])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(names)
    imported = TextEncoder(origin.model, Tokenizer(library, FOREIGN_KIND), special=origin.special)
    imported.save(tmp_path / "imported")
    recipe, out = toy("classify", tmp_path, **STILL), tmp_path / "out"
    model = run_recipe(recipe, out, start_from=tmp_path / "imported", quiet=True)
    assert load(out, "cpu").tokenizer.encode("[MASK]") == model.tokenizer.encode("[MASK]")
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "imported/tokenizer.json").read_bytes()


def test_fill_weights_leaves_heads_at_their_initial_values(masked):
    origin = load(masked, "cpu").model
    config = CLASSIFY.complete_config(
        origin.config, CLASSIFY.read(labeled_data(masked)), load(masked, "cpu").tokenizers
    )
    torch.manual_seed(5)
    model = make_model(config)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = dict(origin.named_parameters())
    load_weights(model, weights, masked, allow_mismatch=HEAD_PARAMETERS)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial[name] if name.startswith(HEAD_PARAMETERS) else weights[name]), name
    assert {name.split(".")[0] for name in weights.keys() ^ initial.keys()} == {"mask_head", "output", "pooler"}


def labeled_data(folder) -> DataConfig:
    return DataConfig((write_text(folder.parent / "few.tsv", [f"{a}\t{a[0]}" for a in ANIMALS * 3]),))


@pytest.mark.parametrize("pooler", ["tanh", "relu"])
def test_fine_tuning_keeps_the_pooler_of_a_model_without_head(masked, tmp_path, pooler):
    """Imported models have an encoder and a pooler, but no head."""
    origin = load(masked, "cpu")
    config = type(origin.model.config)(**(vars(origin.model.config) | {"head": "none", "pooler": pooler}))
    torch.manual_seed(7)
    bare = TextEncoder(Bert(config), origin.tokenizer)
    bare.save(tmp_path / "bare")
    model = run_recipe(
        toy("classify", tmp_path, **STILL), tmp_path / "out", start_from=tmp_path / "bare", quiet=True
    ).model
    assert model.config.pooler == pooler
    assert torch.equal(model.pooler.weight, bare.model.pooler.weight)
    assert torch.equal(model.blocks[0].attention.out.weight, bare.model.blocks[0].attention.out.weight)
    assert model.output.weight.shape == (2, 16)


def test_fine_tuning_with_other_labels(masked, tmp_path):
    first = run_recipe(toy("classify", tmp_path), tmp_path / "first", start_from=masked, quiet=True)
    recipe = toy("classify", tmp_path, **STILL)
    write_text(tmp_path / "labeled.tsv", [f"{text}\t{text.split()[1]}" for text in sentences(100)])
    other = run_recipe(recipe, tmp_path / "other", start_from=tmp_path / "first", quiet=True)
    assert other.model.config.labels == tuple(sorted(ANIMALS))
    assert other.model.output.weight.shape == (8, 16)
    assert torch.equal(other.model.pooler.weight, first.model.pooler.weight)


def test_fine_tuning_preserves_accuracy(tmp_path):
    """After one step with a small learning rate, the model still has its accuracy."""
    run_recipe(toy("classify", tmp_path, train=LEARN), tmp_path / "first", quiet=True)
    recipe = toy("classify", tmp_path, train={"steps": 1, "validate_every": 1, "lr": 1e-6})
    model = run_recipe(recipe, tmp_path / "second", start_from=tmp_path / "first", quiet=True)
    assert model.training["validation"]["accuracy"] == 100


# The validation split


def test_rare_labels_are_in_the_training_split(tmp_path):
    """Whichever texts are in the validation split, every label is in the training split."""
    for rare in range(100):
        lines = [f"text {i}\t{'rare' if i == rare else 'often' if i % 2 else 'also'}" for i in range(100)]
        dataset = CLASSIFY.read(DataConfig((write_text(tmp_path / "labeled.tsv", lines),)))
        assert {example.label for example in dataset.training} == {"rare", "often", "also"}
        assert len(dataset.training) + len(dataset.validation) == 100
        assert 9 <= len(dataset.validation) <= 10


def test_text_with_two_labels_is_in_one_split(tmp_path):
    lines = [f"text {i // 2}\t{i % 2}" for i in range(200)]
    dataset = CLASSIFY.read(DataConfig((write_text(tmp_path / "labeled.tsv", lines),)))
    assert not {example.texts for example in dataset.training} & {example.texts for example in dataset.validation}


def test_texts_without_words_can_be_trained_on(tmp_path):
    recipe = toy("classify", tmp_path)
    write_text(tmp_path / "labeled.tsv", ["\ta", " \tb", "\ta", "  \tb", "   \tb"])
    dataset = CLASSIFY.read(recipe.data)
    assert CLASSIFY.suggest_recipe(dataset, False).train.steps >= 200
    named = str(tmp_path / "labeled.tsv")
    model = run_recipe(recipe_from_dict({"data": {"validation": [named]}}, recipe), tmp_path / "out", quiet=True)
    assert model.classify([""])[0].label in ("a", "b")


def test_long_texts_are_truncated_and_counted(tmp_path):
    recipe = toy("classify", tmp_path)
    lines = ["owl " * 40 + "\tbirds", "cat\tothers"]
    write_text(tmp_path / "labeled.tsv", lines * 10)
    data = recipe_from_dict({"data": {"validation": [str(tmp_path / "labeled.tsv")]}}, recipe).data
    dataset = CLASSIFY.read(data)
    tokenizers = CLASSIFY.make_tokenizers(dataset, recipe.tokenizer)
    config = CLASSIFY.complete_config(recipe.model, dataset, tokenizers)
    encoded = CLASSIFY.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, False))
    assert encoded.note == "labels: birds, others; truncated: 20 texts"
    assert max(batch.inputs[0].max_len for batch in encoded.validation) == 32
