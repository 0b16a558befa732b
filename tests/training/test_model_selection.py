"""Model selection: the metric for the targets, ties broken by the loss."""

import random

import pytest

from regard.data.text.languages import bleu_tokenizer_for, is_unsegmented
from regard.errors import RegardError
from regard.evaluation import text_scores
from regard.training import Dataset, loop, run_recipe, suggest_recipe
from regard.training.log import read_metrics
from regard.training.plan import metric_name
from regard.training.recipe import TrainConfig, recipe_from_dict
from regard.training.suggest import profile_pairs
from tests.training.helpers import small_dataset, small_recipe

SENTENCES = [("The cat chased the mouse.", "Le chat a chassé la souris.")]
CHINESE = [("I like small cats very much.", "我非常喜欢那些小猫。"), ("He is at home.", "他现在在家里看书。")]
JAPANESE = [("I like cats.", "私は小さな猫がとても好きです。")]
THAI = [("I like cats.", "ฉันชอบแมวตัวเล็กมาก")]
GENERATED = [("the red cat sees a dog", "katoredovidahundonlamalgrandan")]
INFLECTION = [("mouse", "mice"), ("cat", "cats")]
PHONEMES = [("cat", "k æ t"), ("mouse", "m aʊ s")]
PHRASES = [("Good day", "Guten Tag")]


@pytest.mark.parametrize(
    ("pairs", "metric"),
    [
        (SENTENCES, "bleu"),
        (CHINESE, "chrf"),
        (JAPANESE, "chrf"),
        (THAI, "chrf"),
        (GENERATED, "chrf"),
        (INFLECTION, "exact_match"),
        (PHONEMES, "exact_match"),
        (PHRASES, "chrf"),
    ],
)
def test_metric_depends_on_the_targets(pairs, metric):
    assert profile_pairs(pairs).metric == metric
    assert suggest_recipe("translate", Dataset(pairs * 5, pairs)).train.validate_by == metric


def test_targets_without_spaces_are_tokenized_by_character():
    assert suggest_recipe("translate", Dataset(CHINESE * 5, CHINESE)).tokenizer.target_kind == "char"
    assert suggest_recipe("translate", Dataset(SENTENCES * 5, SENTENCES)).tokenizer.target_kind is None


@pytest.mark.parametrize(
    ("pairs", "tokenizer"), [(SENTENCES, "13a"), (CHINESE, "zh"), (JAPANESE, "char"), (THAI, "char")]
)
def test_bleu_tokenizer_depends_on_the_script(pairs, tokenizer):
    references = [target for _, target in pairs]
    assert bleu_tokenizer_for(references) == tokenizer
    perfect = text_scores(references * 4, references * 4)
    assert perfect.bleu == pytest.approx(100.0)
    assert f"tok:{tokenizer}" in perfect.signature


def test_explicit_bleu_tokenizer_is_used():
    assert "tok:char" in text_scores(["a b c d"], ["a b c d"], bleu_tokenizer="char").signature
    with pytest.raises(RegardError, match="cannot use the tokenizer 'klingon'"):
        text_scores(["a"], ["a"], bleu_tokenizer="klingon")


def test_no_outputs_score_zero():
    assert text_scores([], []).bleu == 0.0
    with pytest.raises(RegardError, match="1 outputs and 0 references"):
        text_scores(["a"], [])


def test_long_words_are_not_unsegmented_text():
    assert not is_unsegmented(["Donaudampfschifffahrtsgesellschaft und Rindfleischetikettierung sind lange Wörter"])
    assert not is_unsegmented([])


def test_ties_are_broken_by_the_loss(tmp_path, monkeypatch):
    """BLEU is 0 in every validation: the model with the smallest loss is saved, not the first one."""
    losses = iter([3.0, 2.0, 2.5])
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_: {"nll": next(losses)})
    monkeypatch.setattr(loop.TASKS["translate"], "validation_scores", lambda *_: {"bleu": 0.0}, raising=False)
    recipe = small_recipe(train={"validate_every": 4, "validate_by": "bleu"})
    translator = run_recipe(recipe, tmp_path, dataset=small_dataset(), quiet=True)
    assert translator.training["step"] == 8
    assert translator.training["selected_by"] == "bleu"


def test_metric_has_priority_over_the_loss(tmp_path, monkeypatch):
    losses, scores = iter([1.0, 2.0, 3.0]), iter([10.0, 30.0, 20.0])
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_: {"nll": next(losses)})
    monkeypatch.setattr(loop.TASKS["translate"], "validation_scores", lambda *_: {"chrf": next(scores)}, raising=False)
    recipe = small_recipe(train={"validate_every": 4, "validate_by": "chrf"})
    assert run_recipe(recipe, tmp_path, dataset=small_dataset(), quiet=True).training["step"] == 8


def test_an_earlier_model_is_kept_only_if_it_is_better_beyond_noise(tmp_path, monkeypatch):
    """The best of many noisy validations is a lottery: of equal ones the last is saved, which has the most training."""

    def saved_step(name, *bleu):
        scores = iter(bleu)
        monkeypatch.setattr(
            loop.TASKS["translate"], "validation_scores", lambda *_: {"bleu": next(scores), "bleu_margin": 2.0}
        )
        recipe = small_recipe(train={"validate_every": 4, "validate_by": "bleu"})
        return run_recipe(recipe, tmp_path / name, dataset=small_dataset(), quiet=True).training["step"]

    assert saved_step("noise", 20.0, 19.0, 18.5) == 12
    assert saved_step("worse", 20.0, 19.0, 17.5) == 8
    assert saved_step("drift", 20.0, 18.5, 17.0) == 8  # compared with the best, not with the saved one


def test_only_chosen_settings_have_reasons():
    profile, recipe = profile_pairs(INFLECTION), suggest_recipe("translate", Dataset(INFLECTION * 5, INFLECTION))
    assert profile.reasons(recipe) == [
        "tokenizer char: sources are single words, targets are single words",
        "model selection by exact match: targets are single words",
    ]
    assert (
        profile.reasons(recipe_from_dict({"tokenizer": {"kind": "bpe"}, "train": {"validate_by": "loss"}}, recipe))
        == []
    )


def test_metrics_have_display_names():
    assert metric_name(TrainConfig(validate_by="exact_match")) == "exact match"


@pytest.mark.slow
def test_one_word_targets_select_the_model_by_exact_match(tmp_path):
    """Inflection with the suggested recipe: BLEU is always 0; the model with the most exact matches is saved."""
    rng = random.Random(0)
    stems = {"".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in range(400)}
    pairs = [(stem, stem + ("n" if stem[-1] in "ae" else "ri")) for stem in sorted(stems)]
    dataset = Dataset(pairs[:-40], pairs[-40:])
    recipe = suggest_recipe("translate", dataset)
    assert recipe.train.validate_by == "exact_match"
    small = {"width": 32, "heads": 2, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
    short = {"steps": 80, "validate_every": 20, "warmup": 10, "workers": 1}
    recipe = recipe_from_dict({"model": small, "train": short}, recipe)
    translator = run_recipe(recipe, tmp_path, dataset=dataset, quiet=True)
    scores = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "validation"}
    best = max(scores, key=lambda step: (scores[step]["exact_match"], -scores[step]["nll"]))
    assert all(line["bleu"] == 0 for line in scores.values())
    assert translator.training["step"] == best > 20
