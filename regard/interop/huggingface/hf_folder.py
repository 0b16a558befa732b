"""The door to the Hugging Face world: its folders become models of ours, and models of ours its folders.

config.json                  what the model is; `architectures` names its class
generation_config.json       ids that begin and end what is written
model.safetensors            the weights; also in several files, with an index
pytorch_model.bin            the weights as a pickle, opened only if it holds nothing but tensors
tokenizer.json               the tokeniser; or other files, which `tokenizer_files` lists
preprocessor_config.json     of models of images: how pixels are normalised

Folders of timm have a config.json of their own kind, which names an `architecture`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save as weights_to_bytes
from torch import Tensor

from regard.config_reader import json_bytes
from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import FOREIGN, Tokenizer
from regard.errors import RegardError
from regard.files import write_whole
from regard.interop.foreign_config import Settings
from regard.interop.huggingface import bert_models, encoder_decoder_models, gpt_models, vit_models
from regard.interop.huggingface.bert_models import read_bert_like, write_bert_like
from regard.interop.huggingface.encoder_decoder_models import read_encoder_decoder, write_encoder_decoder
from regard.interop.huggingface.gpt_models import read_gpt_like, write_gpt_like
from regard.interop.huggingface.timm_models import read_timm
from regard.interop.huggingface.vit_models import read_vit_like, write_vit_like
from regard.interop.joint_vocabulary import join_config, join_special, join_tokenizers, join_weights
from regard.interop.tensor_files import SAFE, read_json, read_tensor_file, read_tensors
from regard.interop.tokenizer_files import (
    ROLES,
    FoundTokenizer,
    framing,
    read_tokenizer,
    separating,
    special_ids,
    write_tokenizer,
    write_two_tokenizers,
)
from regard.models import ViTConfig, family_of
from regard.pipelines import Bundle, ImageModel, Translator, bundle_of, model_of, vocabularies

PICTURES = "preprocessor_config.json"
# What tokenizer_config.json calls the two languages, as Marian's does.
_LANGUAGES = ("source_lang", "target_lang")


class Architecture(NamedTuple):
    """What a class of transformers is here: a family, and how to come from the one to the other and back.

    `read(class, config.json, special tokens, tensors, origin)` gives our config, special ids and weights;
    `write(config, special, weights)` gives config.json, generation_config.json and tensors of the class that fits.
    """

    family: str
    read: Callable[..., tuple[Any, Special, dict]]
    write: Callable[..., tuple[dict[str, Any], dict[str, Any], dict]]


ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(bert_models.CLASSES, Architecture("bert", read_bert_like, write_bert_like)),
    **dict.fromkeys(gpt_models.CLASSES, Architecture("gpt", read_gpt_like, write_gpt_like)),
    **dict.fromkeys(
        encoder_decoder_models.CLASSES, Architecture("transformer", read_encoder_decoder, write_encoder_decoder)
    ),
}


def import_folder(folder: str | Path, tokenizer: Tokenizer | None = None) -> Any:
    """A model in Hugging Face's format, as the kind of bundle that its family is. No code in the folder is run.

    A tokeniser that is given stands in for the folder's own. Of timm's Vision Transformers the weights alone will do.

    >>> import_folder("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no such folder. Name one that holds config.json.
    """
    folder = Path(folder)
    if folder.is_file() and folder.suffix == ".safetensors":
        return _of_timm(folder, {}, read_tensor_file(folder))
    if not folder.is_dir():
        raise RegardError(f"{folder}: there is no such folder.", "Name one that holds config.json.")
    path = folder / "config.json"
    table = read_json(path)
    if "architecture" in table or (not path.exists() and (folder / SAFE).exists()):
        return _of_timm(path if table else folder / SAFE, table, read_tensors(folder))
    name = _class_of(table, path)
    generation = read_json(folder / "generation_config.json")
    table |= {key: value for key, value in generation.items() if value is not None}  # which has the last word
    settings = Settings(table, str(path))
    # The weights are packed in some way; the model is another one than its class says.
    settings.must_be("quantization_config", None)
    settings.must_be("auto_map", None)
    if name in vit_models.CLASSES:
        pictures = Settings(read_json(folder / PICTURES), str(folder / PICTURES))
        return _of_images(*read_vit_like(name, table, pictures, read_tensors(folder), str(path)), name, folder)
    if tokenizer is None:
        found = read_tokenizer(folder)
    else:
        own = tokenizer.library
        found = FoundTokenizer(own, own, special_ids(own, folder))
    tokens = _special_tokens(folder, table, found)
    config, special, weights = ARCHITECTURES[name].read(name, table, tokens, read_tensors(folder), str(path))
    sizes = vocabularies(config)
    for library, size in zip((found.source, found.target), sizes):
        entries = max(library.get_vocab().values(), default=-1) + 1  # ids may have gaps
        if entries > size:
            raise RegardError(
                f"{folder}: a tokeniser of {entries} entries, but the model knows {size}.",
                "Was the folder mixed with another model's?",
            )
    size = min(sizes)
    beyond = {key: one for key, one in dataclasses.asdict(special).items() if one is not None and one >= size}
    if beyond:
        said = ", ".join(f"{key} = {one}" for key, one in beyond.items())
        raise RegardError(f"{folder}: special ids beyond the vocabulary of {size}: {said}.", "Fix config.json.")
    model = model_of(config, weights, folder)
    source = tokenizer if tokenizer is not None else Tokenizer(found.source, FOREIGN)
    target = source if found.target is found.source else Tokenizer(found.target, FOREIGN)
    bundle = bundle_of(model.eval(), (source, target), {"imported": {"class": name, "folder": folder.name}})
    if isinstance(bundle, Translator):
        stated = read_json(folder / "tokenizer_config.json")
        languages = [stated.get(name) for name in _LANGUAGES]
        bundle.languages = tuple(one for one in languages if isinstance(one, str)) if all(languages) else ()
    return dataclasses.replace(bundle, special=special)


def export_folder(bundle: Bundle, folder: str | Path) -> str:
    """Writes a model as a folder that transformers opens, and says as which class.

    Where no class computes what the model does, that is an error, and nothing is written.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise RegardError(f"{folder}: there is a model already.", "Name another folder.")
    config: Any = bundle.model.config
    special = bundle.special
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in bundle.model.named_parameters()}
    if isinstance(bundle, ImageModel):
        table, pictures, tensors = write_vit_like(bundle.model.config, weights)
        write_whole(folder / PICTURES, json_bytes(pictures))
        return _written(folder, table, tensors)
    source, target = bundle.tokenizers
    family = family_of(config)
    writers = {one.family: one.write for one in ARCHITECTURES.values()}
    if family not in writers:
        known = ", ".join([*writers, "vit"])
        raise RegardError(f"No class of transformers is a {family}.", f"Export one of {known}.")
    # Classes of transformers have one vocabulary; only Marian's can have two, which must be of sentencepiece.
    marian = source is not target and config.norm == "post" and source.kind == target.kind == FOREIGN
    if source is not target and not marian:
        source = target = join_tokenizers(source, target, config.source_vocab)
        special, weights = join_special(special, config.source_vocab), join_weights(config, weights)
        config = join_config(config)
    table, generation, tensors = writers[family](config, special, weights)
    if marian:
        write_two_tokenizers(source, target, folder, special, max_len=config.max_len)
    else:
        segments = getattr(config, "segments", 0) > 1 and special.between is None
        write_tokenizer(source, folder, special, segments=segments, max_len=config.max_len)
    if isinstance(bundle, Translator) and bundle.languages:
        settings = folder / "tokenizer_config.json"
        write_whole(settings, json_bytes({**read_json(settings), **dict(zip(_LANGUAGES, bundle.languages))}))
    if generation:
        write_whole(folder / "generation_config.json", json_bytes(generation))
    return _written(folder, table, tensors)


def _written(folder: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The weights and, last, the config; the class that it names."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_whole(folder / SAFE, weights_to_bytes(whole, metadata={"format": "pt"}))
    write_whole(folder / "config.json", json_bytes({**table, "dtype": "float32"}))
    return table["architectures"][0]


def _of_timm(path: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ImageModel:
    """`path` is that of config.json or, where there is none, of the weights."""
    config, weights = read_timm(table, tensors, str(path))
    return _of_images(config, weights, table.get("architecture", "VisionTransformer"), path.parent)


def _of_images(config: ViTConfig, weights: Mapping[str, Tensor], name: str, folder: Path) -> ImageModel:
    model = model_of(config, weights, folder)
    return bundle_of(model.eval(), (), {"imported": {"class": name, "folder": folder.name}})


def _class_of(table: Mapping[str, Any], path: Path) -> str:
    if not table:
        raise RegardError(f"{path}: there is no such file.", "Name a folder that holds config.json.")
    if "format" in table and "family" in table:
        raise RegardError(f"{path.parent}: already a model folder of Regard.", "Use it as it is.")
    stated, known = table.get("architectures"), [*ARCHITECTURES, *vit_models.CLASSES]
    if not isinstance(stated, list) or len(stated) != 1:
        raise RegardError(f"{path}: architectures = {stated!r} names no class.", f"Known: {', '.join(known)}.")
    if stated[0] not in known:
        raise RegardError(f"{path}: the class {stated[0]} is not known.", f"Known: {', '.join(known)}.")
    return stated[0]


def _special_tokens(folder: Path, table: Mapping[str, Any], found: FoundTokenizer) -> dict[str, int]:
    """Special ids by what they are for; `begin`, `end` and `between` are what the tokeniser puts around texts."""
    tokens = dict(found.special)
    for role in ROLES:
        index = table.get(f"{role}_token_id")
        if isinstance(index, list):  # several ends: the tokeniser's own if it is among them
            index = tokens[role] if tokens.get(role) in index else next(iter(index), None)
        if type(index) is int and index >= 0:
            tokens[role] = index
    begin, end = framing(found.source)
    if begin is None and read_json(folder / "tokenizer_config.json").get("add_bos_token") is True:
        begin = tokens.get("bos")
    around = {"begin": begin, "end": end, "between": separating(found.source)}
    return tokens | {key: index for key, index in around.items() if index is not None}
