"""Export to Argos Translate and LibreTranslate: a package that they install as it is.

The package (.argosmodel) is a zip archive of one folder:

metadata.json        languages and versions
model/               the model for CTranslate2
sentencepiece.model  the tokenizer of source and target
"""

import io
import tempfile
import zipfile
from pathlib import Path

from regard.config_reader import json_bytes
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.errors import RegardError
from regard.files import check_output_file, write_atomically
from regard.interop.ctranslate2_export import export_ctranslate2
from regard.interop.sentencepiece_files import write_sentencepiece
from regard.pipelines import Translator

# Version of Argos Translate whose format this is.
_ARGOS_VERSION = "1.9.0"
_PACKAGE_VERSION = "1.0"
# Names in the menus of Argos Translate; other languages are named by their code.
_NAMES = {
    **{
        "ar": "Arabic",
        "bg": "Bulgarian",
        "ca": "Catalan",
        "cs": "Czech",
        "da": "Danish",
        "de": "German",
        "el": "Greek",
    },
    **{"en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish"},
    **{"fr": "French", "ga": "Irish", "he": "Hebrew", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian"},
    **{"it": "Italian", "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "nl": "Dutch"},
    **{"no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak"},
    **{"sl": "Slovenian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese"},
    **{"zh": "Chinese"},
}


def export_argos(translator: Translator, path: str | Path) -> None:
    """Write a package (.argosmodel) for Argos Translate and LibreTranslate.

    The model must have one language pair, and one tokenizer for both sides that sentencepiece can represent exactly. If
    not, an error is raised and nothing is written. Argos Translate uses a beam of 4 and a length penalty of 0.2.

    >>> export_argos(translator, "en_de.argosmodel")  # doctest: +SKIP
    """
    path = Path(path)
    check_output_file(path)
    if path.exists():
        raise RegardError(f"{path}: the file already exists.", "Choose another name.")
    if len(translator.language_pairs) != 1:
        count = len(translator.language_pairs)
        raise RegardError(
            f"An Argos package has one language pair; this model names {count}.",
            "Train with --data.languages, such as: --data.languages en de",
        )
    source, target = translator.languages
    tokenizer = translator.source_tokenizer
    if tokenizer.kind not in (FOREIGN_KIND, "sentencepiece") or tokenizer is not translator.target_tokenizer:
        problem = f"is of the kind {tokenizer.kind}" if tokenizer is translator.target_tokenizer else "is not shared"
        raise RegardError(
            f"Argos Translate needs one sentencepiece tokenizer for both languages; that of this model {problem}.",
            "Train with --tokenizer.kind sentencepiece, or export to ctranslate2.",
        )
    if translator.special.begin is not None or translator.special.forced is not None:
        raise RegardError(
            "Argos Translate does not add start tokens, which this model needs.", "Export to ctranslate2."
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_sentencepiece(tokenizer.backend_tokenizer, folder / "sentencepiece.model")
        export_ctranslate2(translator, folder / "model")
        for name in ("tokenizer.json", "target_tokenizer.json"):
            (folder / "model" / name).unlink(missing_ok=True)
        metadata = {
            "package_version": _PACKAGE_VERSION,
            "argos_version": _ARGOS_VERSION,
            "from_code": source,
            "from_name": _NAMES.get(source, source),
            "to_code": target,
            "to_name": _NAMES.get(target, target),
        }
        write_atomically(folder / "metadata.json", json_bytes(metadata))
        top = f"translate-{source}_{target}-{_PACKAGE_VERSION.replace('.', '_')}"
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                archive.write(file, f"{top}/{file.relative_to(folder)}")
    write_atomically(path, content.getvalue())
