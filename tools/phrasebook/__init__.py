"""Generator of the built-in phrasebook: English-French sentence pairs from a grammar, with gold word alignments.

`python -m tools.phrasebook.generator` writes the files of the package.

Each English sentence has exactly one French translation. Where English is ambiguous, these conventions apply:

- Present tense becomes présent, past tense becomes passé composé; only "be" and "have" use the imperfect in the past
  (was: était, had: avait). Sentences with ambiguous tense ("I read the book") are never sampled.
- "you" is plural: vous, with plural agreement. "I", "we" and "they" have masculine agreement: je suis parti, nous
  sommes partis, ils sont partis. Professions are masculine in French (student: étudiant), except that a nurse is an
  infirmière.
- "him", "her", "them" are people; "them" is masculine for the participle (je les ai vus). There is no "it".
- Questions use "est-ce que"; "?" has a space before it, as in French typography.
- "not" is "ne … pas", "never" is "ne … jamais"; the indefinite direct object of a negated verb has "de".
- "some" is partitive with bread or water (du, de la, de l') and "des" in the plural, "de" before an adjective.
- The participle agrees with the subject after être, and with a preceding direct object after avoir.
"""
