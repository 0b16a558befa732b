"""The public names. Whoever adds or removes one says so here."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch

import regard

PUBLIC = {
    "regard": ["DecodeConfig", "Recipe", "RegardError", "Translator", "compare", "load", "look", "save"],
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
def test_the_public_names_are_these(module):
    room = importlib.import_module(module)
    assert sorted(room.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert getattr(room, name) is not None


def test_no_module_bears_the_name_of_a_public_function():
    """`from regard.data import …` must not depend on which of the two was imported first."""
    found = [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]
    # A command's module has the command's name and exports nothing; the room of training is called as its function is.
    modules = [name for name in found if not name.startswith("regard.cli.") and name != "regard.training"]
    rooms = [importlib.import_module(name) for name in ["regard", *modules, "regard.training"]]
    functions = {
        name for room in rooms for name in getattr(room, "__all__", ()) if inspect.isfunction(getattr(room, name))
    }
    assert {"attend", "look", "phrasebook_pairs", "train"} <= functions
    assert [name for name in modules if name.rpartition(".")[2] in functions] == []


def test_dir_lists_the_public_names():
    program = "import sys, regard; sys.exit(not {*regard.__all__, '__version__'} <= set(dir(regard)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'lok'"):
        importlib.import_module("regard").lok  # noqa: B018


def test_importing_regard_is_quick():
    """Names are fetched when they are first used: `regard --help` must not wait for torch."""
    program = "import sys, regard; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch's kernel for packed sequences asks for it")
def test_nobody_waits_for_a_compiler_that_is_not_asked_for():
    program = "import sys, regard.training; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
