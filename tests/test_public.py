"""The public names of each package: a new or removed name is listed here."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch

import regard

PUBLIC = {
    "regard": ["DecodeConfig", "Recipe", "RegardError", "Translator", "compare", "load", "look", "save", "train"],
    "regard.attention": [
        *("SCORES", "Bias", "Choice", "Concat", "Cosine", "Dot", "DotLike", "General", "Location", "Mask", "Offsets"),
        *(
            "Recorded",
            "Recording",
            "ScaledDot",
            "Score",
            "attend",
            "causal",
            "explain",
            "make_score",
            "padding",
            "record",
            "use",
        ),
        *("weights", "window"),
    ],
    "regard.bench": [
        *(
            "Ceilings",
            "DecodingShape",
            "RecordingShape",
            "BenchReport",
            "Measurement",
            "ScoreReport",
            "ScoreMeasurement",
            "AttentionShape",
            "TrainingShape",
            "bench_attention",
        ),
        *("bench_decoding", "bench_growth", "bench_recording", "bench_scores", "bench_training"),
    ],
    "regard.data": [
        *(
            "EOS",
            "IGNORE_INDEX",
            "PAD",
            "SOS",
            "SPECIAL_TOKEN_NAMES",
            "TOKENIZER_KINDS",
            "UNK",
            "AnswerBatches",
            "AugmentConfig",
            "AugmentedBatch",
        ),
        *(
            "Batch",
            "PairBatches",
            "BpeDropout",
            "LengthGroupedBatches",
            "CleaningCounts",
            "ImageBatch",
            "ImageBatches",
            "ImageSet",
            "LabeledText",
        ),
        *(
            "LabeledTextBatches",
            "MaskedBatches",
            "Question",
            "QuestionWindows",
            "RaggedImageBatch",
            "RaggedImageBatches",
        ),
        *(
            "RaggedImages",
            "Sequences",
            "SpecialTokens",
            "TokenStreamBatches",
            "TextPair",
            "EncodedTexts",
            "Tokenizer",
            "pixels_to_float",
            "augment",
        ),
        *("clean", "encode_documents", "encode_pairs", "encode_texts", "label_ids", "label_names"),
        *("phrasebook_pairs", "prefetch"),
        *(
            "read_documents",
            "read_image",
            "read_images",
            "read_labeled_texts",
            "read_lines",
            "read_pairs",
            "read_ragged_images",
        ),
        *(
            "read_squad",
            "read_word_vectors",
            "one_hot_targets",
            "split_documents",
            "split_validation",
            "sliding_window_batches",
        ),
    ],
    "regard.decode": [
        *("SPECIAL", "SearchHistory", "SearchStep", "Decodable", "DecodeConfig", "Ensemble", "Hypothesis", "NBest"),
        *("Refused", "Source", "SpecialTokens", "beam", "decode_all", "decode_batch", "greedy", "sample"),
    ],
    "regard.interop": [
        *(
            "export_ctranslate2",
            "export_huggingface",
            "export_onnx",
            "import_huggingface",
            "import_llama2c",
            "load_onnx",
        ),
        *("read_sentencepiece", "write_sentencepiece"),
    ],
    "regard.training": [
        *(
            "TASKS",
            "Dataset",
            "DataConfig",
            "Recipe",
            "TextScores",
            "TokenizerConfig",
            "TrainConfig",
            "list_step_folders",
        ),
        *(
            "plan",
            "read_dataset",
            "read_toml",
            "recipe_from_dict",
            "squad_scores",
            "suggest_recipe",
            "text_scores",
            "train",
        ),
    ],
    "regard.viewer": [
        *(
            "Intervention",
            "AblateHead",
            "AblateLayer",
            "RemoveMask",
            "Outcome",
            "RemovePositions",
            "SetAttentionRow",
            "RemoveScale",
            "PredictionStep",
            "Experiment",
        ),
        *("Comparison", "compare", "apply_interventions", "run_experiment"),
        *("AttentionMap", "ImageLook", "Link", "Look", "PatchMap", "Rollout", "align", "alignment_error_rate"),
        *(
            "attention_names",
            "best_layer",
            "sharpest_layer",
            "record_teacher_forced",
            "format_links",
            "look",
            "require_attention",
        ),
        *("SearchNode", "SearchTree", "read_links", "attention_rollout", "record_search", "Walk", "build_walk"),
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert getattr(package, name) is not None


def test_no_module_has_the_name_of_a_public_function():
    """Otherwise `from regard.data import …` would depend on the order of imports."""
    found = [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]
    # Modules of commands have the name of the command and export nothing.
    modules = [name for name in found if not name.startswith("regard.cli.")]
    packages = [importlib.import_module(name) for name in ["regard", *modules]]
    functions = {
        name
        for package in packages
        for name in getattr(package, "__all__", ())
        if inspect.isfunction(getattr(package, name))
    }
    assert {"attend", "look", "phrasebook_pairs", "train"} <= functions
    assert [name for name in modules if name.rpartition(".")[2] in functions] == []


def test_dir_lists_the_public_names():
    program = "import sys, regard; sys.exit(not {*regard.__all__, '__version__'} <= set(dir(regard)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'lok'"):
        importlib.import_module("regard").lok  # noqa: B018


def test_importing_regard_is_quick():
    """Names are imported on first use: `regard --help` does not load torch."""
    program = "import sys, regard; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU torch's variable-length kernel imports it")
def test_training_does_not_import_the_compiler():
    program = "import sys, regard.training; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
