"""Import of language models from GGUF files, the format of llama.cpp."""

import dataclasses
from pathlib import Path
from typing import Any

from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.interop.gguf.file import read_gguf
from regard.interop.gguf.models import read_architecture, read_config, read_tensors
from regard.interop.gguf.tokenizer import read_gguf_tokenizer
from regard.interop.huggingface.folder import check_vocabulary, describe_special_tokens, read_special_tokens
from regard.interop.huggingface.gpt import read_gpt_model
from regard.interop.tokenizer_files import ROLES, ImportedTokenizer
from regard.pipelines import TextGenerator, model_from_weights


def import_gguf(path: str | Path) -> TextGenerator:
    """Import a language model from a GGUF file. Quantized weights become float32; nothing in the file is executed.

    >>> import_gguf("no-such.gguf")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.gguf: the file is missing. Pass a GGUF file.
    """
    file = read_gguf(path)
    name, architecture = read_architecture(file)
    table = read_config(file)
    library, ids = read_gguf_tokenizer(file)
    imported = ImportedTokenizer(library, library, {})
    tokens, other_eos = read_special_tokens(ids, imported)
    config, special, weights = read_gpt_model(
        architecture.class_name, table, tokens, read_tensors(file, table), str(file.path)
    )
    special = dataclasses.replace(special, other_eos=other_eos)
    check_vocabulary(config, special, [library], str(file.path))
    model = model_from_weights(config, weights, file.path)
    provenance: dict[str, Any] = {"class": architecture.class_name, "file": file.path.name, "architecture": name}
    provenance |= describe_special_tokens(library, {role: tokens[role] for role in ROLES if role in tokens}, tokens)
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        provenance["chat_template"] = template
    return TextGenerator(model.eval(), Tokenizer(library, FOREIGN_KIND), {"imported": provenance}, special)
