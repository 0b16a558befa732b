"""The public names of each package: a new or removed name is listed here."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

import regard

PUBLIC = {
    "regard": [
        "DecodeConfig",
        "ImageModel",
        "Recipe",
        "RegardError",
        "TextEncoder",
        "TextGenerator",
        "Translator",
        "attend",
        "causal",
        "compare",
        "connect",
        "evaluate",
        "export_model",
        "import_model",
        "load",
        "local",
        "look",
        "padding",
        "prepare",
        "record",
        "save",
        "scores",
        "train",
        "weights",
        "window",
    ],
    "regard.attention": [
        "Bias",
        "Choice",
        "Concat",
        "Cosine",
        "Disentangled",
        "Dot",
        "DotLike",
        "General",
        "Location",
        "Mask",
        "Offsets",
        "Recorded",
        "Recording",
        "SCORES",
        "ScaledDot",
        "Score",
        "SoftCap",
        "attend",
        "causal",
        "explain",
        "local",
        "make_score",
        "padding",
        "record",
        "register_score",
        "use",
        "weights",
        "window",
    ],
    "regard.data": [
        "AugmentConfig",
        "ImageSet",
        "PairBatches",
        "Question",
        "RaggedImages",
        "SpecialTokens",
        "Tokenizer",
        "augment",
        "clean",
        "encode_documents",
        "encode_pairs",
        "encode_texts",
        "one_hot_targets",
        "read_documents",
        "read_image",
        "read_images",
        "read_labeled_texts",
        "read_lines",
        "read_pairs",
        "read_ragged_images",
        "read_squad",
        "split_documents",
        "split_validation",
    ],
    "regard.decode": [
        "Decodable",
        "DecodeConfig",
        "EngineChoice",
        "Ensemble",
        "Hypothesis",
        "LexicalConstraints",
        "NBest",
        "RefusedToken",
        "Request",
        "SPECIAL",
        "SearchHistory",
        "SearchStep",
        "Shortlist",
        "SourceBatch",
        "SpecialTokens",
        "TokenTexts",
        "decode_all",
        "explain",
    ],
    "regard.evaluation": [
        "TextScores",
        "align",
        "alignment_error_rate",
        "attention_names",
        "evaluate",
        "format_links",
        "squad_scores",
        "text_scores",
    ],
    "regard.interop": [
        "export_argos",
        "export_ctranslate2",
        "export_huggingface",
        "export_model",
        "export_onnx",
        "import_gguf",
        "import_huggingface",
        "import_llama2c",
        "import_model",
        "load_onnx",
        "read_sentencepiece",
        "write_sentencepiece",
    ],
    "regard.layers": [
        "BlockConfig",
        "Embedding",
        "FeedForward",
        "MultiHeadAttention",
        "POSITIONS",
        "Packed",
        "Padded",
        "PositionalEncoding",
        "PostNormBlock",
        "PreNormBlock",
        "RMSNorm",
        "Recurrent",
        "TimeMajorLayout",
        "make_norm",
        "pack",
        "register_positions",
    ],
    "regard.pipelines": [
        "Classification",
        "Continuation",
        "FORMAT",
        "ImageModel",
        "ModelFolder",
        "Pipeline",
        "SequenceScore",
        "TaggedWord",
        "TextEncoder",
        "TextGenerator",
        "TextLoss",
        "Translation",
        "Translator",
        "check_storable",
        "load",
        "load_weights",
        "make_pipeline",
        "model_from_weights",
        "pipeline_class",
        "read_tokenizers",
        "save",
        "vocab_sizes",
        "write_config",
        "write_tokenizers",
    ],
    "regard.training": [
        "DataConfig",
        "Dataset",
        "Recipe",
        "TASKS",
        "Task",
        "TokenizerConfig",
        "TrainConfig",
        "TranslateTask",
        "list_step_folders",
        "read_dataset",
        "read_toml",
        "recipe_from_dict",
        "register_task",
        "run_recipe",
        "split_dataset",
        "suggest_recipe",
        "train",
    ],
    "regard.viewer": [
        "AblateHead",
        "AblateLayer",
        "AttentionMap",
        "Comparison",
        "ImageLook",
        "Look",
        "RemoveMask",
        "RemovePositions",
        "RemoveScale",
        "SearchTree",
        "SetAttentionRow",
        "apply_interventions",
        "attention_rollout",
        "build_trace",
        "compare",
        "look",
        "record_search",
        "run_experiment",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert getattr(package, name) is not None


def test_no_module_has_the_name_of_a_public_function_of_its_package():
    """Otherwise `from regard.data import …` would depend on the order of imports."""
    found = modules_of_the_package()
    # Modules of commands have the name of the command and export nothing.
    modules = [name for name in found if not name.startswith("regard.cli.")]
    packages = [importlib.import_module(name) for name in ["regard", *modules]]
    functions = {
        f"{package.__name__}.{name}"
        for package in packages
        for name in getattr(package, "__all__", ())
        if inspect.isfunction(getattr(package, name))
    }
    assert {"regard.attention.attend", "regard.look", "regard.data.read_pairs", "regard.train"} <= functions
    assert functions.isdisjoint(modules)


def test_dir_lists_the_public_names_and_nothing_else():
    program = "import regard; regard.viewer.look; print(*(name for name in dir(regard) if not name.startswith('__')))"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert names.split() == PUBLIC["regard"]


def test_packages_need_no_import_of_their_own():
    program = "import regard; regard.attention.record, regard.viewer.look, regard.models.GPT"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_help_names_ten_things_with_examples_that_can_be_called():
    headings = [line for line in regard.__doc__.splitlines()[1:] if line and not line.startswith(" ")]
    assert len(headings) == 10
    examples = ast.parse("\n".join(line[4:] for line in regard.__doc__.splitlines() if line.startswith("    ")))
    calls = [node for node in ast.walk(examples) if isinstance(node, ast.Call)]
    found = {ast.unparse(call.func): call for call in calls if ast.unparse(call.func).startswith("regard.")}
    names = {name for name in found if not name.endswith(".save") or name == "regard.save"}
    assert {"regard.train", "regard.load", "regard.look", "regard.record"} <= names
    for name in names:
        function = functools.reduce(getattr, name.split(".")[1:], regard)
        keywords = {one.arg: one.value for one in found[name].keywords}
        inspect.signature(function).bind(*found[name].args, **keywords)


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


def modules_of_the_package() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]
    has_server = importlib.util.find_spec("fastapi") is not None
    return [name for name in found if has_server or not name.startswith("regard.serve.")]


def test_names_of_public_classes_are_unique():
    classes = set()
    for name in modules_of_the_package():
        if not name.startswith("regard.cli.") and "triton" not in name and not name.endswith("__main__"):
            for one in vars(importlib.import_module(name)).values():
                if inspect.isclass(one) and one.__module__.startswith("regard.") and not one.__name__.startswith("_"):
                    classes.add((one.__name__, one.__module__))
    assert [name for name, count in Counter(name for name, _ in classes).items() if count > 1] == []
