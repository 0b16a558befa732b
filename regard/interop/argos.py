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
from regard.data.text.special_tokens import SPECIAL_TOKEN_NAMES
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.errors import RegardError
from regard.files import check_output_file, write_atomically
from regard.interop.ctranslate2 import export_ctranslate2
from regard.interop.sentencepiece_files import UNIGRAM, UNKNOWN, Piece, PieceModel, to_piece_model, write_pieces
from regard.pipelines import Translator, check_storable

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

    The model must have one language pair, and one tokenizer for both sides that sentencepiece can represent exactly, or
    word tokenizers. If not, an error is raised and nothing is written. With word tokenizers, a word that the vocabulary
    lacks may become several known ones instead of `<unk>`. Argos Translate uses a beam of 4 and a length penalty of
    0.2.

    >>> export_argos(translator, "en_de.argosmodel")  # doctest: +SKIP
    """
    path = Path(path)
    check_storable(translator)
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
    pieces = _make_pieces(translator, path)
    if translator.special.begin is not None or translator.special.forced is not None:
        raise RegardError(
            "Argos Translate does not add start tokens, which this model needs.", "Export to ctranslate2."
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pieces(pieces, folder / "sentencepiece.model")
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


def _make_pieces(translator: Translator, path: Path) -> PieceModel:
    """One vocabulary of sentencepiece for both sides of a translator."""
    source, target = tokenizers = translator.source_tokenizer, translator.target_tokenizer
    if source is target and source.kind in (FOREIGN_KIND, "sentencepiece"):
        return to_piece_model(source.backend_tokenizer, path)
    if all(_marks_words(tokenizer) for tokenizer in tokenizers):
        # Pieces of equal scores: the fewest win, so that words of the vocabulary are never divided.
        names = [tokenizer.backend_tokenizer.get_vocab() for tokenizer in tokenizers]
        words = sorted({*names[0], *names[1]} - {*SPECIAL_TOKEN_NAMES})
        return PieceModel([Piece("<unk>", kind=UNKNOWN), *(Piece(word, -1.0) for word in words)], UNIGRAM)
    problem = f"is of the kind {source.kind}" if source is target else "is not shared"
    raise RegardError(
        f"Argos Translate needs one sentencepiece tokenizer for both languages; that of this model {problem}.",
        "Train with --tokenizer.kind sentencepiece, or export to ctranslate2.",
    )


def _marks_words(tokenizer: Tokenizer) -> bool:
    """Whether the tokens are words as they stand in a text, with a mark for the space before them."""
    return tokenizer.kind == "word" and tokenizer.backend_tokenizer.normalizer.normalize_str("A b") == "A b"
