"""Built-in phrasebook: English-French sentence pairs from a grammar, with gold word alignments.

Each English sentence has exactly one French translation. Where several would be possible, these conventions apply:

- The present tense becomes the présent, the past tense the passé composé; only "be" and "have" become the imparfait
  (was: était, had: avait). Sentences with an ambiguous tense ("I read the book") are never generated.
- "you" is plural: vous, with plural agreement. "I", "we" and "they" are masculine: je suis parti, nous sommes partis,
  ils sont partis. Professions with two genders in French are masculine (student: étudiant), except the nurse
  (infirmière).
- "him", "her" and "them" are people; the participle agrees with "them" in the masculine (je les ai vus). There is no
  "it".
- Questions use "est-ce que"; "?" has a space before it, as in French typography.
- "not" is "ne … pas", "never" is "ne … jamais"; the indefinite direct object of a negated verb has "de".
- "some" is partitive for uncountable nouns (du, de la, de l'), "des" in the plural, and "de" before an adjective.
- The participle agrees with the subject after être, and with a preceding direct object after avoir.

>>> pair = phrasebook_pairs("test", 1)[0]
>>> all(words(pair.source)[s] and words(pair.target)[t] for s, t in pair.alignment)
True
"""

from regard.data.phrasebook.generator import is_held_out, phrasebook_pairs
from regard.data.phrasebook.grammar import AlignedPair
from regard.data.phrasebook.lexicon import count_lemmas
from regard.data.phrasebook.morphology import words

__all__ = ["AlignedPair", "count_lemmas", "is_held_out", "phrasebook_pairs", "words"]
