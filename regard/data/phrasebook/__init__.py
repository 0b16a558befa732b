"""The built-in phrasebook: English sentences and their French, from a grammar, with the gold alignment of their words.

The English determines the French: each English sentence has exactly one translation. Where English leaves a choice
open, these conventions settle it:

- The present is the présent, the past the passé composé; "be" and "have" alone go to the imperfect in the past
  (was: était, had: avait). A sentence whose tense cannot be seen ("I read the book") is never drawn.
- "you" are several people: vous, with plural agreement. "I" speaks as a man, "we" and "they" are men or mixed: je suis
  parti, nous sommes partis, ils sont partis. A trade that French splits by gender is masculine (student: étudiant), but
  a nurse is an infirmière.
- "him", "her", "them" are people; "them" is masculine for the participle (je les ai vus). There is no "it".
- Questions are asked with "est-ce que"; "?" has a space before it, as French typography wants.
- Negation is "ne … pas", never "ne … jamais"; the indefinite direct object of a negated verb has "de".
- "some" is partitive with bread or water (du, de la, de l') and "des" in the plural, "de" before an adjective.
- The participle agrees with the subject after être, and with a direct object that stands before it after avoir.

>>> pair = phrasebook_pairs("test", 1)[0]
>>> all(words(pair.source)[s] and words(pair.target)[t] for s, t in pair.alignment)
True
"""

from regard.data.phrasebook.generator import held_out, phrasebook_pairs
from regard.data.phrasebook.grammar import Pair
from regard.data.phrasebook.lexicon import lemmas
from regard.data.phrasebook.morphology import words

__all__ = ["Pair", "held_out", "lemmas", "phrasebook_pairs", "words"]
