"""Writing systems: which text puts no spaces between words, and which sacreBLEU tokenizer fits it."""

from collections.abc import Iterable
from importlib.util import find_spec
from statistics import fmean

# Blocks of Unicode whose languages are written without spaces: Thai and Lao, Burmese, Khmer, kana, Han.
_KANA = ((0x3040, 0x30FF),)
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3134F))
_OTHERS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))
# Words are shorter than this on average in every language that separates them.
LONGEST_MEAN_WORD = 15


def is_unsegmented(texts: Iterable[str]) -> bool:
    """Whether texts are written without spaces between words, as Chinese, Japanese and Thai are.

    >>> is_unsegmented(["我喜欢猫。", "他在家。"]), is_unsegmented(["The cat sleeps."])
    (True, False)
    """
    texts = list(texts)
    words = [word for text in texts for word in text.split()]
    if _share(texts, _KANA + _HAN + _OTHERS) > 0.3:
        return True
    return bool(words) and fmean(map(len, words)) > LONGEST_MEAN_WORD


def bleu_tokenizer_for(references: Iterable[str]) -> str:
    """The tokenizer of sacreBLEU for these references: words, or characters where words are not separated.

    >>> bleu_tokenizer_for(["Le chat dort."]), bleu_tokenizer_for(["我喜欢猫。"])
    ('13a', 'zh')
    """
    references = list(references)
    if not is_unsegmented(references):
        return "13a"
    if _share(references, _KANA) > 0.05:
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return "zh" if _share(references, _HAN) > 0.3 else "char"


def _share(texts: Iterable[str], blocks: tuple[tuple[int, int], ...]) -> float:
    """The share of the letters that lie in these blocks."""
    letters = [ord(sign) for text in texts for sign in text if sign.isalpha()]
    return sum(any(low <= code <= high for low, high in blocks) for code in letters) / max(1, len(letters))
