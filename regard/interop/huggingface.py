"""The door to the Hugging Face world: its folders become models of ours, and models of ours its folders.

config.json                  what the model is; `architectures` names its class
generation_config.json       ids that begin and end what is written
model.safetensors            the weights; also in several files, with an index
pytorch_model.bin            the weights as a pickle, opened only if it holds nothing but tensors
tokenizer.json               the tokeniser
tokenizer_config.json        what its special tokens are for; so does special_tokens_map.json
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from safetensors.torch import save as weights_to_bytes
from tokenizers.processors import TemplateProcessing

from regard.data.special import Special
from regard.data.tokenizer import FOREIGN, Tokenizer
from regard.errors import RegardError
from regard.files import write_whole
from regard.folder import Bundle, bundle_of, fill_weights, vocabularies
from regard.interop import bert_like, encoder_decoder, gpt_like
from regard.interop.bert_like import read_bert_like, write_bert_like
from regard.interop.encoder_decoder import read_encoder_decoder, write_encoder_decoder
from regard.interop.gpt_like import read_gpt_like, write_gpt_like
from regard.interop.settings import Settings
from regard.interop.tensors import SAFE, read_json, read_tensors
from regard.models import family_of, make_model


class Architecture(NamedTuple):
    """What a class of transformers is here: a family, and how to come from the one to the other and back.

    `read(class, config.json, special tokens, tensors, origin)` gives our config, special ids and weights;
    `write(config, special, weights)` gives config.json, generation_config.json and tensors of the class that fits.
    """

    family: str
    read: Callable[..., tuple[Any, Special, dict]]
    write: Callable[..., tuple[dict[str, Any], dict[str, Any], dict]]


ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(bert_like.CLASSES, Architecture("bert", read_bert_like, write_bert_like)),
    **dict.fromkeys(gpt_like.CLASSES, Architecture("gpt", read_gpt_like, write_gpt_like)),
    **dict.fromkeys(encoder_decoder.CLASSES, Architecture("transformer", read_encoder_decoder, write_encoder_decoder)),
    **dict.fromkeys(encoder_decoder.CLASSES, Architecture("transformer", read_encoder_decoder, write_encoder_decoder)),
}


def import_folder(folder: str | Path, tokenizer: Tokenizer | None = None) -> Any:
    """A model in Hugging Face's format, as the kind of bundle that its family is. No code in the folder is run.

    A tokeniser that is given stands in for the folder's own.

    >>> import_folder("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no such folder. Name one that holds config.json.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RegardError(f"{folder}: there is no such folder.", "Name one that holds config.json.")
    path = folder / "config.json"
    table = read_json(path)
    name = _class_of(table, path)
    generation = read_json(folder / "generation_config.json")
    table |= {key: value for key, value in generation.items() if value is not None}  # which has the last word
    settings = Settings(table, str(path))
    # The weights are packed in some way; the model is another one than its class says.
    settings.must_be("quantization_config", None)
    settings.must_be("auto_map", None)
    own = tokenizer if tokenizer is not None else _read_tokenizer(folder)
    tokens = _special_tokens(folder, table, own)
    config, special, weights = ARCHITECTURES[name].read(name, table, tokens, read_tensors(folder), str(path))
    size = min(vocabularies(config))
    entries = max(own.library.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if entries > size:
        raise RegardError(
            f"{folder}: a tokeniser of {entries} entries, but the model knows {size}.",
            "Was the folder mixed with another model's?",
        )
    beyond = {key: one for key, one in dataclasses.asdict(special).items() if one is not None and one >= size}
    if beyond:
        said = ", ".join(f"{key} = {one}" for key, one in beyond.items())
        raise RegardError(f"{folder}: special ids beyond the vocabulary of {size}: {said}.", "Mend config.json.")
    model = make_model(config)
    fill_weights(model, weights, folder)
    bundle = bundle_of(model.eval(), (own, own), {"imported": {"class": name, "folder": folder.name}})
    return dataclasses.replace(bundle, special=special)


def export_folder(bundle: Bundle, folder: str | Path) -> str:
    """Writes a model as a folder that transformers opens, and says as which class.

    Where no class computes what the model does, that is an error, and nothing is written.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise RegardError(f"{folder}: there is a model already.", "Name another folder.")
    config, special = bundle.model.config, bundle.special
    source, target = bundle.tokenizers
    if source is not target:
        raise RegardError("The two sides have a tokeniser each, and such a folder has one.", "Train with a shared one.")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in bundle.model.named_parameters()}
    family = family_of(config)
    writers = {one.family: one.write for one in ARCHITECTURES.values()}
    if family not in writers:
        raise RegardError(f"No class of transformers is a {family}.", f"Export one of {', '.join(writers)}.")
    table, generation, tensors = writers[family](config, special, weights)
    library, tokens = _written_tokenizer(source, special, segments=getattr(config, "segments", 0) > 1)
    write_whole(folder / "tokenizer.json", library.to_str(pretty=True).encode())
    write_whole(folder / "tokenizer_config.json", _json(tokens | {"model_max_length": config.max_len}))
    if generation:
        write_whole(folder / "generation_config.json", _json(generation))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_whole(folder / SAFE, weights_to_bytes(tensors, metadata={"format": "pt"}))
    write_whole(folder / "config.json", _json(table | {"dtype": "float32"}))
    return table["architectures"][0]


def _class_of(table: Mapping[str, Any], path: Path) -> str:
    if not table:
        raise RegardError(f"{path}: there is no such file.", "Name a folder that holds config.json.")
    if "format" in table and "family" in table:
        raise RegardError(f"{path.parent}: already a model folder of Regard.", "Use it as it is.")
    stated = table.get("architectures")
    if not isinstance(stated, list) or len(stated) != 1:
        raise RegardError(f"{path}: architectures = {stated!r} names no class.", f"Known: {', '.join(ARCHITECTURES)}.")
    if stated[0] not in ARCHITECTURES:
        raise RegardError(f"{path}: the class {stated[0]} is not known.", f"Known: {', '.join(ARCHITECTURES)}.")
    return stated[0]


# -- tokenisers ------------------------------------------------------------------------------------------------------

_PURPOSES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise RegardError(f"{folder}: there is no tokeniser.", "Put tokenizer.json beside the model.")
    tokenizer = Tokenizer.load(path, foreign=True)
    # Some files say that every text be cut or filled up to some length.
    tokenizer.library.no_truncation()
    tokenizer.library.no_padding()
    return tokenizer


def _special_tokens(folder: Path, table: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, int]:
    """Special ids by what they are for; `begin` and `end` are what the tokeniser puts around each text."""
    stated = read_json(folder / "tokenizer_config.json")
    names = read_json(folder / "special_tokens_map.json") | stated
    found: dict[str, int] = {}
    for purpose in _PURPOSES:
        token = names.get(f"{purpose}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = tokenizer.library.token_to_id(token) if isinstance(token, str) else None
        if index is not None:
            found[purpose] = index
    for purpose in _PURPOSES:
        index = table.get(f"{purpose}_token_id")
        if isinstance(index, list):  # several ends: the tokeniser's own if it is among them
            index = found[purpose] if found.get(purpose) in index else next(iter(index), None)
        if type(index) is int and index >= 0:
            found[purpose] = index
    begin, end = _frame(tokenizer, folder)
    if begin is None and stated.get("add_bos_token") is True:
        begin = found.get("bos")
    found |= {key: index for key, index in (("begin", begin), ("end", end)) if index is not None}
    return found


def _frame(tokenizer: Tokenizer, origin: str | Path) -> tuple[int | None, int | None]:
    """The ids that a tokeniser puts before and after each text."""
    encoding = tokenizer.library.encode("a")
    added = [bool(one) for one in encoding.special_tokens_mask]
    if all(added):  # nothing is known of the text: there is no telling before from after but by halves
        before = (len(added) + 1) // 2
    else:
        before = added.index(False)
    after = len(added) - before - added[before:].count(False)
    if before > 1 or after > 1:
        raise RegardError(f"{origin}: the tokeniser puts several tokens around each text.", "Regard knows one a side.")
    return encoding.ids[0] if before else None, encoding.ids[-1] if after else None


def _written_tokenizer(
    tokenizer: Tokenizer, special: Special, segments: bool
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokeniser, told what this model wants around each text, and what tokenizer_config.json says of it."""
    library = tokenizers.Tokenizer.from_str(tokenizer.library.to_str())
    if _frame(Tokenizer(library, FOREIGN), "The tokeniser") != (special.begin, special.end):
        begin, end = (None if one is None else library.id_to_token(one) for one in (special.begin, special.end))
        second = int(segments)
        library.post_processor = TemplateProcessing(
            single=[*_some(begin, ":0"), "$A:0", *_some(end, ":0")],
            pair=[*_some(begin, ":0"), "$A:0", *_some(end, ":0"), f"$B:{second}", *_some(end, f":{second}")],
            special_tokens=[(name, one) for name, one in ((begin, special.begin), (end, special.end)) if name],
        )
    purposes = {"bos": special.sos, "eos": special.eos, "pad": special.pad, "unk": special.unk, "mask": special.mask}
    if special.begin is not None and special.end is not None:
        purposes |= {"cls": special.begin, "sep": special.end}
    names = {f"{key}_token": library.id_to_token(one) for key, one in purposes.items() if one is not None}
    inputs = ["input_ids", *["token_type_ids"] * segments, "attention_mask"]
    # In Regard the names of special tokens inside a text are text.
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True, "model_input_names": inputs}
    return library, about | names


def _some(name: str | None, segment: str) -> list[str]:
    return [] if name is None else [name + segment]


def _json(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
