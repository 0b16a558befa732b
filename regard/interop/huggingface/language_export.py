"""Multilingual translators in Hugging Face format: their tokenizer classes and default languages."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from regard.config_reader import json_bytes
from regard.data.text.languages import LanguageTokens
from regard.errors import RegardError
from regard.files import write_atomically
from regard.interop.language_tokenizers import M2M100_CODES
from regard.interop.sentencepiece_files import to_piece_model, write_pieces
from regard.interop.tensor_files import read_json
from regard.interop.tokenizer_files import write_tokenizer
from regard.pipelines import Translator


def with_default_languages(translator: Translator) -> Translator:
    """The translator with its chosen or default languages, which the exported folder states; as it is without them."""
    tokens = translator.language_tokens
    target = None if tokens is None else translator.target_language or tokens.default_target
    if tokens is None or target is None:
        return translator
    source = translator.source_language or tokens.default_source
    special = tokens.select(translator.special, target, source)
    return dataclasses.replace(translator, special=special, source_language=source, target_language=target)


def write_language_tokenizer(translator: Translator, folder: Path, tokens: LanguageTokens) -> None:
    """Write the tokenizer for its class in transformers, whose `src_lang` selects the source language.

    The names of the language tokens determine the class: a fine-tuned NLLB may be exported as another model class.
    A tokenizer that the files of M2M100Tokenizer cannot express is written for the class of any tokenizer.json.
    """
    source = translator.source_language or tokens.default_source
    languages: dict[str, Any] = {"src_lang": source, "tgt_lang": translator.target_language or tokens.default_target}
    tokenizer, max_len = translator.source_tokenizer, translator.model.config.max_len
    names = [tokenizer.entry(index) for index in tokens.ids.values()]
    has_m2m100_names = names == [f"__{code}__" for code in tokens.ids]
    if has_m2m100_names and _write_m2m100_files(translator, folder, tokens, languages | {"model_max_length": max_len}):
        return
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
