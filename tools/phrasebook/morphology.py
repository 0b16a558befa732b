"""Morphology: English and French inflection, elision, contraction, and word segmentation."""

import re

# Indices of the five present-tense forms of a French verb.
JE, IL, NOUS, VOUS, ILS = range(5)

_WORDS = re.compile(r"aujourd'hui|(?:qu|[cdjlmnst])'|'s\b|[\w-]+|[^\w\s]", re.IGNORECASE)

_VOWELS = frozenset("aeiouhàâéèêëîïôûœ")
# h aspiré: no elision before it (le héros, la hache).
_ASPIRATED = frozenset({"hache", "haches", "haricot", "haricots", "hérisson", "hérissons", "héros", "hibou", "hiboux"})

_ELIDED = {word: word[:-1] + "'" for word in ("de", "je", "la", "le", "me", "ne", "que", "se")}
_BEFORE_VOWEL = _ELIDED | {"ce": "cet", "ma": "mon", "sa": "son"}
_CONTRACTED = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}


def split_words(text: str) -> list[str]:
    """Split an English or French sentence into the words that alignments refer to. Punctuation, elided words ("l'",
    "qu'") and the English genitive "'s" are separate words; "est-ce" and "aujourd'hui" are one word each.

    >>> split_words("Est-ce qu'Anne a vu l'arbre ?")
    ['Est-ce', "qu'", 'Anne', 'a', 'vu', "l'", 'arbre', '?']
    """
    return _WORDS.findall(text)


def triggers_elision(word: str) -> bool:
    """Whether a French word causes elision of the word before it: it starts with a vowel or a mute h.

    >>> triggers_elision("histoire"), triggers_elision("héros")
    (True, False)
    """
    return word[0].lower() in _VOWELS and word not in _ASPIRATED


def elide(text: str, following: str) -> str:
    """The form of a French word before the following word: elided, or a special form before a vowel.

    >>> elide("la", "école"), elide("ma", "école"), elide("ce", "arbre"), elide("le", "hibou")
    ("l'", 'mon', 'cet', 'le')
    """
    return _BEFORE_VOWEL[text] if text in _BEFORE_VOWEL and triggers_elision(following) else text


def contract(text: str, following: str) -> str:
    """Contraction of a French preposition with the article after it; empty if there is none.

    >>> contract("de", "le"), contract("à", "les"), contract("de", "la"), contract("de", "l'")
    ('du', 'aux', '', '')
    """
    return _CONTRACTED.get((text, following), "")


def english_plural(noun: str) -> str:
    """The plural of a noun, or the third person of a verb: the rule is the same.

    >>> english_plural("box"), english_plural("cherry"), english_plural("boy"), english_plural("go")
    ('boxes', 'cherries', 'boys', 'goes')
    """
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "go")) else "s")


def english_past(verb: str) -> str:
    """The past of a regular verb.

    >>> english_past("chase"), english_past("carry"), english_past("play")
    ('chased', 'carried', 'played')
    """
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")


def english_article(following: str) -> str:
    """The indefinite article before a word: "a" or "an".

    >>> english_article("old"), english_article("useful")
    ('an', 'a')
    """
    return "an" if following[0] in "aeiouAEIOU" and not following.startswith("use") else "a"


def french_plural(word: str) -> str:
    """The plural of a noun, an adjective or a participle.

    >>> french_plural("chat"), french_plural("souris"), french_plural("gâteau"), french_plural("journal")
    ('chats', 'souris', 'gâteaux', 'journaux')
    """
    if word.endswith(("s", "x", "z")):
        return word
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + ("x" if word.endswith("eau") else "s")


def french_feminine(word: str) -> str:
    """The feminine of a regular adjective or participle.

    >>> french_feminine("petit"), french_feminine("rouge"), french_feminine("heureux"), french_feminine("fatigué")
    ('petite', 'rouge', 'heureuse', 'fatiguée')
    """
    if word.endswith("eux"):
        return word[:-1] + "se"
    return word if word.endswith("e") else word + "e"


# je, il, nous, vous, ils, past participle.
_IRREGULAR = {
    "aller": "vais va allons allez vont allé",
    "avoir": "ai a avons avez ont eu",
    "boire": "bois boit buvons buvez boivent bu",
    "conduire": "conduis conduit conduisons conduisez conduisent conduit",
    "connaître": "connais connaît connaissons connaissez connaissent connu",
    "construire": "construis construit construisons construisez construisent construit",
    "courir": "cours court courons courez courent couru",
    "devoir": "dois doit devons devez doivent dû",
    "dormir": "dors dort dormons dormez dorment dormi",
    "écrire": "écris écrit écrivons écrivez écrivent écrit",
    "être": "suis est sommes êtes sont été",
    "lire": "lis lit lisons lisez lisent lu",
    "mourir": "meurs meurt mourons mourez meurent mort",
    "naître": "nais naît naissons naissez naissent né",
    "ouvrir": "ouvre ouvre ouvrons ouvrez ouvrent ouvert",
    "partir": "pars part partons partez partent parti",
    "peindre": "peins peint peignons peignez peignent peint",
    "pouvoir": "peux peut pouvons pouvez peuvent pu",
    "prendre": "prends prend prenons prenez prennent pris",
    "revenir": "reviens revient revenons revenez reviennent revenu",
    "rire": "ris rit rions riez rient ri",
    "sortir": "sors sort sortons sortez sortent sorti",
    "sourire": "souris sourit sourions souriez sourient souri",
    "suivre": "suis suit suivons suivez suivent suivi",
    "voir": "vois voit voyons voyez voient vu",
    "vouloir": "veux veut voulons voulez veulent voulu",
}


def conjugate(infinitive: str, strong: str = "") -> tuple[tuple[str, ...], str]:
    """Present tense (je, il, nous, vous, ils) and past participle. `strong` is the stressed stem of an -er verb if it
    differs (acheter: achèt-, envoyer: envoi-). The spelling of -ger and -cer before -ons is handled automatically.

    >>> conjugate("manger")
    (('mange', 'mange', 'mangeons', 'mangez', 'mangent'), 'mangé')
    >>> conjugate("acheter", "achèt")
    (('achète', 'achète', 'achetons', 'achetez', 'achètent'), 'acheté')
    """
    if infinitive in _IRREGULAR:
        *present, participle = _IRREGULAR[infinitive].split()
        return tuple(present), participle
    stem, ending = infinitive[:-2], infinitive[-2:]
    if ending == "er":
        strong = strong or stem
        soft = stem + "e" if stem.endswith("g") else stem[:-1] + "ç" if stem.endswith("c") else stem
        return (strong + "e", strong + "e", soft + "ons", stem + "ez", strong + "ent"), stem + "é"
    if ending == "ir":
        return (stem + "is", stem + "it", stem + "issons", stem + "issez", stem + "issent"), stem + "i"
    return (stem + "s", stem, stem + "ons", stem + "ez", stem + "ent"), stem + "u"


# The two verbs that use the imperfect in the past.
IMPERFECT = {
    "être": ("étais", "était", "étions", "étiez", "étaient"),
    "avoir": ("avais", "avait", "avions", "aviez", "avaient"),
}
