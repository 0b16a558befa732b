"""Detection of writing systems without spaces between words, and the matching sacreBLEU tokenizer."""

from collections.abc import Iterable
from importlib.util import find_spec
from statistics import fmean

# Unicode blocks of scripts that are written without spaces: kana; Han; Thai and Lao, Burmese, Khmer.
_KANA = ((0x3040, 0x30FF),)
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3134F))
_OTHERS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))
UNSEGMENTED_BLOCKS = _KANA + _HAN + _OTHERS
# The mean word length is below this in every language that separates words by spaces.
MAX_MEAN_WORD_LENGTH = 15


def is_unsegmented(texts: Iterable[str]) -> bool:
    """Whether texts are written without spaces between words, like Chinese, Japanese and Thai.

    >>> is_unsegmented(["我喜欢猫。", "他在家。"]), is_unsegmented(["The cat sleeps."])
    (True, False)
    """
    texts = list(texts)
    words = [word for text in texts for word in text.split()]
    if _letter_share(texts, UNSEGMENTED_BLOCKS) > 0.3:
        return True
    return bool(words) and fmean(map(len, words)) > MAX_MEAN_WORD_LENGTH


def bleu_tokenizer_for(references: Iterable[str]) -> str:
    """The sacreBLEU tokenizer for these references: by words, or by characters if words are not separated.

    >>> bleu_tokenizer_for(["Le chat dort."]), bleu_tokenizer_for(["我喜欢猫。"])
    ('13a', 'zh')
    """
    references = list(references)
    if not is_unsegmented(references):
        return "13a"
    if _letter_share(references, _KANA) > 0.05:
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return "zh" if _letter_share(references, _HAN) > 0.3 else "char"


def _letter_share(texts: Iterable[str], blocks: tuple[tuple[int, int], ...]) -> float:
    """Share of the letters in these Unicode blocks."""
    letters = [ord(character) for text in texts for character in text if character.isalpha()]
    return sum(any(low <= code <= high for low, high in blocks) for code in letters) / max(1, len(letters))
