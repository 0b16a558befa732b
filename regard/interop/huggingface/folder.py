"""Import and export of model folders in Hugging Face format.

config.json                  the model's config; `architectures` names its class
generation_config.json       ids of the tokens that start and end generated text; default options of decoding
model.safetensors            the weights; also sharded, with an index
pytorch_model.bin            the weights as a pickle, opened only if it holds nothing but tensors
tokenizer.json               the tokenizer; or other files, listed in `tokenizer_files`
preprocessor_config.json     image models: resizing of images, normalization of pixels
modules.json                 sentence-transformers: pooling and other modules, see `sentence_modules`
README.md                    model card; written only

The config.json of a timm folder has other keys, among them `architecture`.
"""

import dataclasses
import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from safetensors.torch import save as weights_to_bytes
from tokenizers import normalizers
from torch import Tensor

from regard.config_reader import json_bytes
from regard.data.images.decoding import Resizing
from regard.data.text.languages import LanguagePair, LanguageTokens, format_language_pairs, parse_language_pairs
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.decode.protocol import continues_source
from regard.errors import RegardError
from regard.files import check_output_folder, write_atomically
from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.bart import M2M100
from regard.interop.huggingface.encoder_decoders import (
    ENCODER_DECODER_CLASSES,
    read_encoder_decoder,
    write_encoder_decoder,
)
from regard.interop.huggingface.generation_settings import read_chat_template, read_generation_settings
from regard.interop.huggingface.gpt import GPT_CLASSES, read_gpt_model, write_gpt_model
from regard.interop.huggingface.image_resizing import read_resizing, read_timm_resizing, write_resizing
from regard.interop.huggingface.lora import check_adapter, read_merged_tensors
from regard.interop.huggingface.model_card import make_model_card
from regard.interop.huggingface.sentence_modules import (
    MODULES_FILE,
    lowercase_normalizer,
    read_sentence_modules,
    transformer_folder,
    write_sentence_modules,
)
from regard.interop.huggingface.text_encoders import ENCODER_CLASSES, read_encoder_model, write_encoder_model
from regard.interop.huggingface.timm import read_timm_model
from regard.interop.huggingface.vit import VIT_CLASSES, read_vit_model, write_vit_model
from regard.interop.joint_vocabulary import join_config, join_special, join_tokenizers, join_weights
from regard.interop.language_tokenizers import M2M100_CODES, move_default_target
from regard.interop.sentencepiece_files import to_piece_model, write_pieces
from regard.interop.tensor_files import SAFETENSORS_FILE, read_json, read_tensor_file
from regard.interop.tokenizer_files import (
    ROLES,
    ImportedTokenizer,
    boundary_ids,
    read_tokenizer,
    separator_id,
    special_ids,
    write_marian_tokenizers,
    write_tokenizer,
)
from regard.models import ViTConfig, family_name
from regard.pipelines import (
    ImageModel,
    Pipeline,
    TextEncoder,
    TextGenerator,
    Translator,
    check_storable,
    make_pipeline,
    model_from_weights,
    pipeline_class,
    vocab_sizes,
)

logger = logging.getLogger("regard")
PREPROCESSOR_FILE = "preprocessor_config.json"
MODEL_CARD_FILE = "README.md"
# Keys of the two languages in tokenizer_config.json, as in Marian's.
_LANGUAGE_KEYS = ("source_lang", "target_lang")
# Key of the language pairs of a model of several.
_PAIRS_KEY = "language_pairs"


class Architecture(NamedTuple):
    """A class of transformers: the family that it is in Regard, and functions that convert in both directions.

    `read(class, config.json, special tokens, tensors, origin)` returns config, special ids and weights;
    `write(config, special, weights, preferred class)` returns config.json, generation_config.json and tensors of the
    matching class.
    """

    family: str
    read: Callable[..., tuple[Any, SpecialTokens, dict]]
    write: Callable[..., tuple[dict[str, Any], dict[str, Any], dict]]
    optional_roles: tuple[str, ...] = ()
    """roles of special tokens that a model need not have"""


ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(ENCODER_CLASSES, Architecture("bert", read_encoder_model, write_encoder_model)),
    **dict.fromkeys(GPT_CLASSES, Architecture("gpt", read_gpt_model, write_gpt_model, ("bos", "pad"))),
    **dict.fromkeys(ENCODER_DECODER_CLASSES, Architecture("transformer", read_encoder_decoder, write_encoder_decoder)),
}


def import_huggingface(folder: str | Path, tokenizer: Tokenizer | None = None) -> Any:
    """Import a model folder in Hugging Face or timm format. No code in the folder is executed.

    `tokenizer` replaces the tokenizer of the folder. For Vision Transformers of timm, the .safetensors file is enough.

    >>> import_huggingface("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: the folder does not exist. Pass a folder with config.json.
    """
    folder = Path(folder)
    if folder.is_file() and folder.suffix == ".safetensors":
        return _import_timm(folder, {}, read_tensor_file(folder))
    if not folder.is_dir():
        raise RegardError(f"{folder}: the folder does not exist.", "Pass a folder with config.json.")
    top_folder, folder = folder, transformer_folder(folder)
    path = folder / "config.json"
    table = read_json(path)
    check_adapter(folder)
    if "architecture" in table or (not path.exists() and (folder / SAFETENSORS_FILE).exists()):
        return _import_timm(path if table else folder / SAFETENSORS_FILE, table, read_merged_tensors(folder))
    name = _read_class_name(table, path)
    generation = read_json(folder / "generation_config.json")
    table |= {key: value for key, value in generation.items() if value is not None}  # takes precedence
    checked = ForeignConfig(table, str(path))
    # Quantized weights, and models with custom code instead of their class, are not supported.
    checked.require("quantization_config", None)
    checked.require("auto_map", None)
    if name in VIT_CLASSES:
        preprocessor = ForeignConfig(read_json(folder / PREPROCESSOR_FILE), str(folder / PREPROCESSOR_FILE))
        config, weights = read_vit_model(name, table, preprocessor, read_merged_tensors(folder), str(path))
        return _make_image_model(config, weights, name, folder, read_resizing(preprocessor, config, name))
    if tokenizer is None:
        imported = read_tokenizer(folder)
        if (top_folder / MODULES_FILE).exists():
            _add_normalizer(imported.source, lowercase_normalizer(folder))
    else:
        library = tokenizer.backend_tokenizer
        imported = ImportedTokenizer(library, library, special_ids(library, folder))
    tokens, other_eos = read_special_tokens(table, imported)
    config, special, weights = ARCHITECTURES[name].read(name, table, tokens, read_merged_tensors(folder), str(path))
    # The default options of decoding, if the model decodes.
    base = getattr(pipeline_class(config), "decoding", None)
    if base is not None:
        special = dataclasses.replace(special, other_eos=other_eos)
    languages = imported.languages
    if languages is not None:
        special, languages = move_default_target(special, languages)
    elif name == M2M100 and special.forced is None:
        raise RegardError(
            f"{path}: forced_bos_token_id is missing, and the tokenizer has no language codes.",
            "Add forced_bos_token_id, the token of the target language, to generation_config.json.",
        )
    check_vocabulary(config, special, (imported.source, imported.target), str(folder))
    model = model_from_weights(config, weights, folder)
    source = tokenizer if tokenizer is not None else Tokenizer(imported.source, FOREIGN_KIND)
    target = source if imported.target is imported.source else Tokenizer(imported.target, FOREIGN_KIND)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    provenance: dict[str, Any] = {
        **{"class": name, "folder": folder.name},
        **describe_special_tokens(imported.source, imported.special, tokens),
        "split_special_tokens": tokenizer_config.get("split_special_tokens") is True,
    }
    if (template := read_chat_template(folder)) is not None:
        provenance["chat_template"] = template
    settings = None
    if base is not None:
        settings = read_generation_settings(
            table, special, vocab_sizes(config)[-1], path, base=base, continues_source=continues_source(model)
        )
        provenance["generation"] = settings.stored
    pipeline = make_pipeline(model.eval(), (source, target), {"imported": provenance})
    read_own_settings(pipeline, top_folder, languages)
    if settings is not None:
        pipeline.decoding = settings.decoding
    return dataclasses.replace(pipeline, special=special)


@singledispatch
def read_own_settings(pipeline: Any, folder: Path, languages: LanguageTokens | None) -> None:
    """Set what a folder contains for this class of pipelines beside model, tokenizers and settings of generation."""


@read_own_settings.register
def read_languages(translator: Translator, folder: Path, languages: LanguageTokens | None) -> None:
    translator.language_tokens = languages
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    source_language, target_language = (config.get(key) for key in _LANGUAGE_KEYS)
    if isinstance(source_language, str) and isinstance(target_language, str) and source_language:
        translator.language_pairs = (LanguagePair(source_language, target_language),)
    if isinstance(pairs := config.get(_PAIRS_KEY), list):
        translator.language_pairs = parse_language_pairs(list(map(str, pairs)), f"{path}: {_PAIRS_KEY}")


@read_own_settings.register
def read_sentence_embedding(encoder: TextEncoder, folder: Path, languages: LanguageTokens | None) -> None:
    config = encoder.model.config
    encoder.sentence = read_sentence_modules(folder, config.width, config.max_len) or encoder.sentence


def describe_special_tokens(
    library: tokenizers.Tokenizer, roles: Mapping[str, int], tokens: Mapping[str, int]
) -> dict[str, Any]:
    """The special tokens that the files of a model define, for training.json: names by role, and ids by role.

    Every role has an id in Regard; an export writes only the roles that were defined.
    """
    names = {f"{role}_token": library.id_to_token(index) for role, index in roles.items()}
    return {
        "special_tokens": {key: name for key, name in names.items() if name is not None},
        "token_ids": {role: index for role, index in tokens.items() if role in ROLES},
    }


def check_vocabulary(
    config: Any, special: SpecialTokens, libraries: Sequence[tokenizers.Tokenizer], origin: str
) -> None:
    """Raise an error if tokenizers or special ids are outside the vocabulary of a model."""
    sizes = vocab_sizes(config)
    for library, size in zip(libraries, sizes):
        entries = Tokenizer(library, FOREIGN_KIND).largest_id + 1
        if entries > size:
            raise RegardError(
                f"{origin}: the tokenizer has {entries} entries, but the model has a vocabulary of {size}.",
                "Check that tokenizer and weights belong to the same model.",
            )
    size = min(sizes)
    roles: dict[str, Any] = dataclasses.asdict(special) | {"other_eos": None}
    named = [*roles.items(), *(("eos", index) for index in special.other_eos)]
    invalid = [(key, index) for key, index in named if index is not None and index >= size]
    if invalid:
        ids = ", ".join(f"{key} = {index}" for key, index in invalid)
        raise RegardError(
            f"{origin}: special ids outside the vocabulary of {size}: {ids}.", "Fix the special ids of the model."
        )


def export_huggingface(pipeline: Pipeline, folder: str | Path) -> str:
    """Write a model as a folder that transformers can load, and return the name of its class.

    If no class of transformers computes the same, an error is raised and nothing is written.
    """
    folder = Path(folder)
    check_storable(pipeline)
    check_output_folder(folder)
    return _write_pipeline(pipeline, folder)


@singledispatch
def _write_pipeline(pipeline: Any, folder: Path) -> str:
    """Write a model and return the name of its class; most text models are written in the same way."""
    return _write_text_model(pipeline, folder)


@_write_pipeline.register
def _write_translator(translator: Translator, folder: Path) -> str:
    return _write_text_model(with_default_languages(translator), folder)


def _write_text_model(pipeline: Any, folder: Path) -> str:
    config: Any = pipeline.model.config
    special = pipeline.special
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in pipeline.model.named_parameters()}
    source, target = pipeline.tokenizers
    imported = pipeline.training.get("imported")
    imported = imported if isinstance(imported, dict) else {}
    names = imported.get("special_tokens")
    family = family_name(config)
    architectures = {architecture.family: architecture for architecture in ARCHITECTURES.values()}
    if family not in architectures:
        supported = ", ".join([*architectures, "vit"])
        raise RegardError(
            f"transformers has no class for models of the family {family}.", f"Supported families: {supported}."
        )
    # Classes of transformers have one vocabulary; only Marian can have two, which must be sentencepiece.
    is_marian = source is not target and config.norm == "post" and source.kind == target.kind == FOREIGN_KIND
    if source is not target and not is_marian:
        source, names = join_tokenizers(source, target, config.source_vocab), None
        special, weights = join_special(special, config.source_vocab), join_weights(config, weights)
        config = join_config(config)
    # Of several classes that compute the same, a model keeps the one that it was imported from.
    architecture = architectures[family]
    table, generation, tensors = architecture.write(config, special, weights, imported.get("class", ""))
    if special.other_eos:
        for written in (table, generation):
            written["eos_token_id"] = list(special.ends)
    for role in architecture.optional_roles if "token_ids" in imported else ():
        if role not in imported["token_ids"]:
            table[f"{role}_token_id"] = generation[f"{role}_token_id"] = None
    settings = _tokenizer_settings(pipeline, _imported_settings(imported)) | {"model_max_length": config.max_len}
    if is_marian:
        write_marian_tokenizers(source, target, folder, special, settings)
    elif not write_language_tokenizer(pipeline, folder):
        has_segments = getattr(config, "segments", 0) > 1 and special.between is None
        write_tokenizer(source, folder, special, segments=has_segments, names=names, settings=settings)
    if "generation" in imported:  # as it was, instead of the defaults for models trained with Regard
        generation = {key: value for key, value in generation.items() if key.endswith("token_id")}
        generation |= imported["generation"]
    _write_own_files(pipeline, folder)
    if generation:
        write_atomically(folder / "generation_config.json", json_bytes(generation))
    return _write_model(pipeline, folder, table, tensors)


@_write_pipeline.register
def _write_image_model(pipeline: ImageModel, folder: Path) -> str:
    config = pipeline.model.config
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in pipeline.model.named_parameters()}
    table, preprocessor, tensors = write_vit_model(config, weights)
    preprocessor |= write_resizing(pipeline.resizing, config)
    write_atomically(folder / PREPROCESSOR_FILE, json_bytes(preprocessor))
    return _write_model(pipeline, folder, table, tensors)


def _imported_settings(imported: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of tokenizer_config.json that an imported model had."""
    settings: dict[str, Any] = {}
    if "split_special_tokens" in imported:
        settings["split_special_tokens"] = imported["split_special_tokens"]
    if "chat_template" in imported:  # it writes special tokens
        settings |= {"chat_template": imported["chat_template"], "split_special_tokens": False}
    return settings


@singledispatch
def _tokenizer_settings(pipeline: Any, imported: dict[str, Any]) -> dict[str, Any]:
    """Keys of tokenizer_config.json: those of the imported model, and others of this class of pipelines."""
    return imported


@_tokenizer_settings.register
def _generator_settings(generator: TextGenerator, imported: dict[str, Any]) -> dict[str, Any]:
    return {"padding_side": "left"} | imported  # padding on the right would be continued


@_tokenizer_settings.register
def _encoder_settings(encoder: TextEncoder, imported: dict[str, Any]) -> dict[str, Any]:
    if not encoder.head.shares_embedding:
        return imported
    return {"split_special_tokens": False} | imported  # texts contain the name of the mask


@_tokenizer_settings.register
def _translator_settings(translator: Translator, imported: dict[str, Any]) -> dict[str, Any]:
    if len(translator.language_pairs) == 1:
        return imported | dict(zip(_LANGUAGE_KEYS, translator.languages))
    if translator.language_pairs:
        # The tag of the target language is written before a text: <2fr> The cat sleeps.
        pairs = format_language_pairs(translator.language_pairs)
        return imported | {_PAIRS_KEY: pairs, "split_special_tokens": False}
    return imported


@singledispatch
def _write_own_files(pipeline: Any, folder: Path) -> None:
    """Write the files of this class of pipelines, if it has any."""


@_write_own_files.register
def _write_sentence_embedding(encoder: TextEncoder, folder: Path) -> None:
    config = encoder.model.config
    if config.head in ("none", "mask"):
        write_sentence_modules(folder, encoder.sentence, config.width, config.max_len)


def _write_model(pipeline: Pipeline, folder: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write the model card (unless there is one), the weights and, last, the config; return the class that it names."""
    card, [class_name] = folder / MODEL_CARD_FILE, table["architectures"]
    if not card.exists():
        write_atomically(card, make_model_card(pipeline, class_name, folder.resolve().name).encode())
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / SAFETENSORS_FILE, weights_to_bytes(contiguous, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", json_bytes({**table, "dtype": "float32"}))
    return class_name


def _import_timm(path: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ImageModel:
    """Import a Vision Transformer of timm; `path` is config.json or, if there is none, the file of the weights."""
    config, weights = read_timm_model(table, tensors, str(path))
    resizing = read_timm_resizing(table, config, str(path)) if table else None
    return _make_image_model(config, weights, table.get("architecture", "VisionTransformer"), path.parent, resizing)


def _make_image_model(
    config: ViTConfig, weights: Mapping[str, Tensor], name: str, folder: Path, resizing: Resizing | None
) -> ImageModel:
    model = model_from_weights(config, weights, folder)
    pipeline = make_pipeline(model.eval(), (), {"imported": {"class": name, "folder": folder.name}})
    pipeline.resizing = resizing
    return pipeline


def _read_class_name(table: Mapping[str, Any], path: Path) -> str:
    if not table:
        raise RegardError(f"{path}: the file does not exist.", "Pass a folder with config.json.")
    if "format" in table and "family" in table:
        raise RegardError(f"{path.parent}: already a model folder of Regard.", "Use it without importing it.")
    names, supported = table.get("architectures"), [*ARCHITECTURES, *VIT_CLASSES]
    if names is None and (bare := _bare_class(table.get("model_type"), supported)):
        logger.warning("%s: no class is named; the model is imported without a head, as %s.", path, bare)
        return bare
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise RegardError(
            f"{path}: architectures = {names!r}; expected a list of one class.", 'For example: ["BertModel"].'
        )
    name = names[0]
    if name not in supported:
        nearest = difflib.get_close_matches(name, supported, n=5, cutoff=0.0)
        raise RegardError(
            f"{path}: unsupported class {name}.",
            f"The nearest of {len(supported)} supported classes: {', '.join(nearest)}.",
        )
    # transformers builds the model of the type; the class is only a record of how it was saved.
    expected, model_type = _model_types(name), table.get("model_type")
    if model_type is not None and model_type not in expected:
        raise RegardError(
            f"{path}: model_type = {model_type!r} does not match the class {name} (expected {' or '.join(expected)}).",
            "Such a model cannot be imported. If model_type is wrong, fix the file.",
        )
    return name


def _bare_class(model_type: Any, supported: Sequence[str]) -> str | None:
    """The class without a head of a type of models.

    >>> _bare_class("deberta-v2", ["BertModel", "DebertaV2ForMaskedLM", "DebertaV2Model"])
    'DebertaV2Model'
    """
    bare = (name for name in supported if name.endswith("Model") and not name.endswith("HeadModel"))
    return next((name for name in bare if _model_types(name)[0] == model_type), None)


def _model_types(name: str) -> tuple[str, ...]:
    """The values of `model_type` that belong to a class.

    >>> _model_types("MBartForConditionalGeneration"), _model_types("XLMRobertaModel")
    (('mbart',), ('xlm-roberta', 'roberta', 'camembert'))
    """
    prefixes = {"XLMRoberta": "xlm-roberta", "Gemma3": "gemma3_text", "GPTNeoX": "gpt_neox", "M2M100": "m2m_100"}
    prefixes |= {"DebertaV2": "deberta-v2"}
    prefixes |= {"Dinov2WithRegisters": "dinov2_with_registers"}
    prefixes |= {"CLIPVision": "clip_vision_model", "SiglipVision": "siglip_vision_model"}
    family = re.split("Model|For|LMHead|MTModel", name)[0]
    model_type = prefixes.get(family, family.lower())
    same = ("xlm-roberta", "roberta", "camembert")  # only their tokenizers differ
    return (model_type, *(other for other in same if other != model_type)) if model_type in same else (model_type,)


def _add_normalizer(library: tokenizers.Tokenizer, first: normalizers.Normalizer | None) -> None:
    """Add a step in front of the normalizer of a tokenizer."""
    if first is not None:
        steps = [first] if library.normalizer is None else [first, library.normalizer]
        library.normalizer = normalizers.Sequence(steps)


def read_special_tokens(
    table: Mapping[str, Any], imported: ImportedTokenizer
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Special ids by role, and those of further tokens that end an output.

    `begin`, `end` and `between` are those that the tokenizer adds to texts.
    """
    tokens = dict(imported.special)
    other_eos: tuple[int, ...] = ()
    for role in ROLES:
        index = table.get(f"{role}_token_id")
        if isinstance(index, list):
            ids = list(dict.fromkeys(i for i in index if type(i) is int and i >= 0))
            index = tokens[role] if tokens.get(role) in ids else next(iter(ids), None)  # prefer the tokenizer's
            if role == "eos":
                other_eos = tuple(i for i in ids if i != index)
        if type(index) is int and index >= 0:
            tokens[role] = index
    begin, end = boundary_ids(imported.source)
    added = {"begin": begin, "end": end, "between": separator_id(imported.source)}
    return tokens | {key: index for key, index in added.items() if index is not None}, other_eos


def with_default_languages(translator: Translator) -> Translator:
    """The translator with its chosen or default languages, which the exported folder states; as it is without them."""
    tokens = translator.language_tokens
    target = None if tokens is None else translator.target_language or tokens.default_target
    if tokens is None or target is None:
        return translator
    source = translator.source_language or tokens.default_source
    special = tokens.select(translator.special, target, source)
    return dataclasses.replace(translator, special=special, source_language=source, target_language=target)


@singledispatch
def write_language_tokenizer(pipeline: Any, folder: Path) -> bool:
    """Write the tokenizer of a translator with language tokens; False for others."""
    return False


@write_language_tokenizer.register
def _write_language_tokenizer(translator: Translator, folder: Path) -> bool:
    """Write the tokenizer for its class in transformers, whose `src_lang` selects the source language.

    The names of the language tokens determine the class: a fine-tuned NLLB may be exported as another model class.
    A tokenizer that the files of M2M100Tokenizer cannot express is written for the class of any tokenizer.json.
    """
    tokens = translator.language_tokens
    if tokens is None:
        return False
    source = translator.source_language or tokens.default_source
    languages: dict[str, Any] = {"src_lang": source, "tgt_lang": translator.target_language or tokens.default_target}
    tokenizer, max_len = translator.source_tokenizer, translator.model.config.max_len
    names = [tokenizer.entry(index) for index in tokens.ids.values()]
    has_m2m100_names = names == [f"__{code}__" for code in tokens.ids]
    if has_m2m100_names and _write_m2m100_files(translator, folder, tokens, languages | {"model_max_length": max_len}):
        return True
    write_tokenizer(tokenizer, folder, translator.special, settings={"model_max_length": max_len})
    path = folder / "tokenizer_config.json"
    config = read_json(path) | languages | {"extra_special_tokens": names}
    if not has_m2m100_names:
        is_last = tokens.source == "after_end"
        # The class has other names for the roles that a translator does not have.
        config = {key: value for key, value in config.items() if key != "bos_token"}
        if all(re.fullmatch("[a-z]{2}_[A-Z]{2}", name) for name in names):
            config["tokenizer_class"] = "MBartTokenizer" if is_last else "MBart50Tokenizer"
        else:
            config |= {"tokenizer_class": "NllbTokenizer", "legacy_behaviour": is_last}
        (folder / "special_tokens_map.json").unlink()
    write_atomically(path, json_bytes(config))
    return True


def _write_m2m100_files(translator: Translator, folder: Path, tokens: LanguageTokens, settings: dict[str, Any]) -> bool:
    """Write vocab.json, sentencepiece.bpe.model and the settings; False if they cannot express the tokenizer."""
    library, path = translator.source_tokenizer.backend_tokenizer, folder / "sentencepiece.bpe.model"
    codes = next((name for name, codes in M2M100_CODES.items() if codes == " ".join(tokens.ids)), None)
    if codes is None or min(tokens.ids.values()) != library.get_vocab_size(with_added_tokens=False):
        return False
    try:
        model = to_piece_model(library, path)
    except RegardError:
        return False
    write_pieces(model, path)
    write_atomically(folder / "vocab.json", json_bytes({piece.text: i for i, piece in enumerate(model.pieces)}))
    config = {"tokenizer_class": "M2M100Tokenizer", "language_codes": codes, "split_special_tokens": True} | settings
    write_atomically(folder / "tokenizer_config.json", json_bytes(config))
    return True
