"""Lexicon of the phrasebook: tables of words, and which words can be combined.

Notation: a noun is `english:french:gender`, with `/plural` after a word with an irregular plural. A verb is `base/past`
in English and `infinitive/strong stem` in French. Names in capitals are groups of nouns.
"""

from collections.abc import Sized
from dataclasses import dataclass

from tools.phrasebook.morphology import (
    IL,
    ILS,
    JE,
    NOUS,
    VOUS,
    conjugate,
    english_past,
    english_plural,
    french_feminine,
    french_plural,
)


@dataclass(frozen=True, eq=False)
class Noun:
    english: tuple[str, str]  # singular, plural
    french: tuple[str, str]
    feminine: bool
    countable: bool  # bread is not: "some bread", never "two breads"
    pluralized: bool  # whether its plural is used
    owned: bool  # whether it can have a possessive ("my")


@dataclass(frozen=True, eq=False)
class Adjective:
    english: str
    french: tuple[tuple[str, str], tuple[str, str]]  # masculine and feminine; singular and plural of each
    before_vowel: str  # beau, nouveau, vieux: bel, nouvel, vieil
    before_noun: bool
    graded: bool  # whether it can have an intensifier ("very")


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb in both languages. `particle` follows the English verb (look *for*), `preposition` precedes the French
    object (jouer *de*). If a verb has both, they translate each other."""

    name: str
    base: str
    third: str
    past: str
    particle: str
    infinitive: str
    present: tuple[str, ...]
    participle: str
    preposition: str
    with_etre: bool
    reflexive: bool
    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    traits: frozenset[str]


_NOUN_TABLES = {
    # People. Groups that are not in _NOT_OWNED can have a possessive ("my").
    "PEOPLE": """man/men:homme:m woman/women:femme:f boy:garçon:m girl:fille:f king:roi:m queen:reine:f
        princess:princesse:f baker:boulanger:m farmer:fermier:m student:étudiant:m actress:actrice:f witch:sorcière:f
        hero/heroes:héros:m thief/thieves:voleur:m lady:dame:f engineer:ingénieur:m nurse:infirmière:f""",
    "FRIENDS": "teacher:professeur:m doctor:médecin:m neighbour:voisin:m friend:ami:m child/children:enfant:m",
    "FAMILY": "brother:frère:m sister:sœur:f uncle:oncle:m aunt:tante:f",
    "PARENTS": "mother:mère:f father:père:m",
    "PETS": """cat:chat:m dog:chien:m horse:cheval/chevaux:m cow:vache:f hen:poule:f rabbit:lapin:m duck:canard:m
        goat:chèvre:f donkey:âne:m""",
    "WILD": """mouse/mice:souris:f bird:oiseau:m wolf/wolves:loup:m fox:renard:m bear:ours:m lion:lion:m
        elephant:éléphant:m monkey:singe:m snake:serpent:m frog:grenouille:f owl:hibou/hiboux:m bee:abeille:f
        butterfly:papillon:m squirrel:écureuil:m""",
    "FOOD": """apple:pomme:f orange:orange:f cake:gâteau:m egg:œuf:m tomato/tomatoes:tomate:f carrot:carotte:f
        cherry:cerise:f strawberry:fraise:f bean:haricot:m mushroom:champignon:m sandwich:sandwich:m""",
    "STAPLES": "bread:pain:m cheese:fromage:m soup:soupe:f meat:viande:f honey:miel:m",
    "DRINKS": "water:eau:f milk:lait:m coffee:café:m tea:thé:m wine:vin:m beer:bière:f juice:jus:m",
    "TEXTS": "book:livre:m letter:lettre:f newspaper:journal:m story:histoire:f poem:poème:m message:message:m",
    "CLOTHES": "hat:chapeau:m coat:manteau:m shirt:chemise:f dress:robe:f shoe:chaussure:f scarf/scarves:écharpe:f",
    "THINGS": """key:clé:f knife/knives:couteau:m bag:sac:m umbrella:parapluie:m watch:montre:f lamp:lampe:f
        box:boîte:f bottle:bouteille:f glass:verre:m cup:tasse:f plate:assiette:f ball:balle:f ring:bague:f
        jewel:bijou/bijoux:m axe:hache:f gift:cadeau:m flower:fleur:f map:carte:f phone:téléphone:m
        computer:ordinateur:m photo:photo:f painting:tableau:m guitar:guitare:f violin:violon:m stone:pierre:f""",
    "FURNITURE": "table:table:f chair:chaise:f bed:lit:m door:porte:f window:fenêtre:f piano:piano:m",
    "VEHICLES": "car:voiture:f bike:vélo:m boat:bateau:m train:train:m bus:bus:m plane:avion:m",
    "SITES": """church:église:f hotel:hôtel:m museum:musée:m village:village:m island:île:f castle:château:m
        bridge:pont:m theatre:théâtre:m restaurant:restaurant:m tree:arbre:m star:étoile:f""",
    "PREMISES": "house:maison:f garden:jardin:m school:école:f shop:magasin:m farm:ferme:f",
    "ROOMS": "kitchen:cuisine:f bedroom:chambre:f office:bureau:m",
    "PLACES": """market:marché:m hospital:hôpital:m station:gare:f library:bibliothèque:f beach:plage:f forest:forêt:f
        park:parc:m street:rue:f city:ville:f river:rivière:f""",
}
_UNCOUNTABLE = ("STAPLES", "DRINKS")
_SINGULAR = ("PARENTS", "STAPLES", "DRINKS", "ROOMS", "PLACES")
_NOT_OWNED = ("PEOPLE", "WILD", "SITES", "PLACES")


def _read_nouns() -> tuple[dict[str, Noun], dict[str, tuple[Noun, ...]]]:
    nouns: dict[str, Noun] = {}
    groups: dict[str, tuple[Noun, ...]] = {}
    for group, table in _NOUN_TABLES.items():
        members = []
        for row in table.split():
            english, french, gender = row.split(":")
            singular, _, plural = english.partition("/")
            singulier, _, pluriel = french.partition("/")
            noun = Noun(
                english=(singular, plural or english_plural(singular)),
                french=(singulier, pluriel or french_plural(singulier)),
                feminine=gender == "f",
                countable=group not in _UNCOUNTABLE,
                pluralized=group not in _SINGULAR,
                owned=group not in _NOT_OWNED,
            )
            nouns[singular] = noun
            members.append(noun)
        groups[group] = tuple(members)
    return nouns, groups


NOUNS, GROUPS = _read_nouns()
KIN = frozenset(GROUPS["FAMILY"] + GROUPS["PARENTS"])
HUMANS = GROUPS["PEOPLE"] + GROUPS["FRIENDS"] + GROUPS["FAMILY"] + GROUPS["PARENTS"]
_UNIONS = {
    "HUMANS": ("PEOPLE", "FRIENDS", "FAMILY", "PARENTS"),
    "ANIMALS": ("PETS", "WILD"),
    "MEALS": ("FOOD", "STAPLES"),
    "GOODS": ("CLOTHES", "THINGS"),
}


def _select(names: str) -> tuple[Noun, ...]:
    """Nouns given by name or by group."""
    chosen: dict[Noun, None] = {}
    for name in names.split():
        for part in _UNIONS.get(name, (name,)):
            chosen.update(dict.fromkeys(GROUPS[part] if part in GROUPS else (NOUNS[part],)))
    return tuple(chosen)


# english : masculine[/feminine] | nouns. The first table has adjectives before the French noun, the second after it.
_ADJECTIVES_BEFORE = """
beautiful:beau/belle | CLOTHES child queen princess actress lady bird elephant donkey squirrel horse butterfly tree
    hotel garden house castle island church city painting jewel ring watch flower poem story star plane boat
pretty:joli | dress hat scarf shirt girl flower ring watch garden village house bird box lamp cup poem bedroom
big:grand | ANIMALS VEHICLES SITES PREMISES ROOMS table bed window door box bag market park forest river
small:petit | ANIMALS VEHICLES THINGS PREMISES ROOMS boy girl child church hotel village island museum bridge theatre
    restaurant tree table chair bed door window cake park street station star
old:vieux/vieille | man woman king queen baker farmer witch thief lady engineer nurse hero uncle aunt teacher doctor
    neighbour friend PETS THINGS VEHICLES FURNITURE CLOTHES church hotel museum village castle bridge theatre tree
    house school farm book newspaper lion wolf elephant owl monkey city
new:nouveau/nouvelle | CLOTHES THINGS VEHICLES FURNITURE book poem newspaper teacher doctor neighbour friend church
    hotel museum bridge theatre restaurant house school shop office hospital station library
young:jeune | PEOPLE teacher doctor neighbour ANIMALS tree
good:bon/bonne | MEALS DRINKS book story poem restaurant hotel teacher doctor friend neighbour student king queen
    knife bed
bad:mauvais | wine coffee soup meat cheese restaurant hotel student king witch neighbour doctor book poem apple egg
long:long/longue | letter story poem message newspaper garden dress coat scarf street bridge river knife table boat
    train
fat:gros/grosse | PETS mouse bird bear monkey snake frog owl squirrel
"""
_ADJECTIVES_AFTER = """
red:rouge | CLOTHES VEHICLES FURNITURE apple cherry tomato wine flower bag box cup umbrella lamp ball guitar bird
blue:bleu | CLOTHES VEHICLES FURNITURE flower bag box cup plate umbrella lamp ball bird butterfly bottle
green:vert | CLOTHES VEHICLES FURNITURE apple bean tomato bag box cup plate umbrella bottle frog snake
white:blanc/blanche | CLOTHES VEHICLES FURNITURE cat dog horse cow hen rabbit mouse bird wine flower plate cup goat
    owl house stone
black:noir | CLOTHES VEHICLES FURNITURE cat dog horse cow hen rabbit bear wolf goat bird bag umbrella box coffee stone
yellow:jaune | CLOTHES VEHICLES FURNITURE flower bird butterfly bag box lamp ball cup plate
grey:gris | CLOTHES VEHICLES cat dog horse rabbit mouse donkey wolf elephant stone squirrel owl bag
heavy:lourd | bag box table chair bed coat axe stone computer piano book
expensive:cher/chère | CLOTHES ring jewel watch car boat hotel restaurant wine cheese meat lamp painting guitar violin
    piano phone computer
dirty:sale | CLOTHES FURNITURE VEHICLES plate glass cup bottle knife kitchen bedroom street river beach hotel
empty:vide | bottle glass cup box bag train bus hotel restaurant theatre museum church house street beach bedroom shop
    village
hot:chaud | soup coffee tea milk water bread
cold:froid | soup coffee tea milk water meat juice beer river
fresh:frais/fraîche | bread milk egg tomato strawberry cherry carrot bean mushroom orange juice
delicious:délicieux | MEALS wine tea coffee juice beer
happy:heureux | HUMANS dog
sad:triste | HUMANS story poem letter donkey
tired:fatigué | HUMANS dog horse donkey bird
sick:malade | HUMANS PETS monkey lion elephant
clever:intelligent | HUMANS dog horse fox monkey elephant owl
famous:célèbre | king queen princess hero thief actress witch teacher doctor baker engineer painting poem story castle
    museum restaurant church bridge island
rich:riche | PEOPLE uncle aunt neighbour doctor friend
kind:gentil/gentille | HUMANS dog
brave:courageux | HUMANS dog
curious:curieux | HUMANS PETS mouse monkey fox bear bird
shy:timide | HUMANS cat rabbit squirrel
lazy:paresseux | HUMANS cat dog donkey lion bear
proud:fier/fière | HUMANS lion horse
dangerous:dangereux | thief witch bear lion wolf snake street bridge river island knife axe
interesting:intéressant | TEXTS museum city painting photo village
French:français | actress student engineer nurse baker teacher doctor neighbour wine cheese newspaper poem car
    restaurant
Italian:italien/italienne | actress student engineer nurse baker teacher doctor neighbour wine coffee newspaper car
    restaurant shoe
useful:utile | knife bag map phone computer umbrella box lamp book bike axe
broken:cassé | glass cup plate bottle chair table window watch lamp guitar violin phone
"""

_UNGRADED = (
    *("red", "blue", "green", "white", "black", "yellow", "grey", "empty", "delicious", "broken"),
    *("French", "Italian"),
)

# english | french [preposition] | subjects | objects | traits:
#   definite, indefinite, singular: required of the object      past, present: the only tense
#   person: the object may be a pronoun                         state: no adverb or time expression may follow
#   etre, reflexive: the auxiliary is être                      place, for, with, well, slowly: may follow the verb
_TRANSITIVE = """
chase | chasser | cat dog fox wolf lion bear owl snake | cat mouse rabbit bird hen duck frog squirrel goat butterfly
    monkey | place
eat/ate | manger | HUMANS dog mouse rabbit monkey bear horse bird squirrel goat donkey | MEALS | place
drink/drank | boire | HUMANS cat dog horse cow | DRINKS | place
read/read | lire | HUMANS | TEXTS map | place
write/wrote | écrire | HUMANS | letter book story poem message | for
see/saw | voir | HUMANS PETS owl fox wolf monkey | HUMANS ANIMALS SITES VEHICLES house key bag box painting photo |
    place person
hear/heard | entendre | HUMANS PETS fox wolf | HUMANS ANIMALS train bus plane guitar violin piano | place person
buy/bought | acheter/achèt | HUMANS | MEALS DRINKS CLOTHES THINGS VEHICLES FURNITURE TEXTS house horse | for
sell/sold | vendre | HUMANS | CLOTHES THINGS VEHICLES FURNITURE FOOD PETS house farm shop hotel tree |
find/found | trouver | HUMANS | CLOTHES THINGS egg mushroom letter cat dog rabbit hotel restaurant | place person
lose/lost | perdre | HUMANS | CLOTHES key knife bag umbrella watch ball ring jewel map phone photo letter dog | place
break/broke | casser | HUMANS cat dog monkey | glass cup plate bottle lamp window chair table watch guitar violin
    phone |
clean | nettoyer/nettoi | HUMANS | ROOMS house car bike boat bus table window shoe glass cup knife church |
open | ouvrir | HUMANS | door window box bottle bag letter book gift umbrella shop hotel |
close | fermer | HUMANS | door window box bag book bottle umbrella shop hotel museum |
love | aimer | HUMANS | FRIENDS FAMILY PARENTS PETS beach forest park city river library man woman boy girl princess
    house garden story castle island | definite state person
prefer/preferred | préférer/préfèr | HUMANS | FOOD DRINKS CLOTHES train bus bike cat dog garden | definite state
hide/hid | cacher | HUMANS squirrel | key ring jewel letter gift knife box watch photo map egg | place
wear/wore | porter | HUMANS | CLOTHES ring watch jewel | state
take/took | prendre | HUMANS | bag key coat umbrella train bus plane book map photo box phone |
choose/chose | choisir | HUMANS | CLOTHES TEXTS gift cake ring lamp flower hotel restaurant | for
draw/drew | dessiner | HUMANS | ANIMALS house tree flower boat castle car map church star bridge | for
follow | suivre | HUMANS PETS wolf fox | HUMANS ANIMALS car bus river street | person
meet/met | rencontrer | HUMANS | HUMANS | place person
help | aider | HUMANS | HUMANS | person
call | appeler/appell | HUMANS | HUMANS cat dog horse | person
know/knew | connaître | HUMANS | HUMANS hotel museum city village restaurant island story poem | definite state
    present person
visit | visiter | HUMANS | church hotel museum village island castle theatre house school farm city library market |
    definite
build/built | construire | HUMANS | church hotel bridge castle theatre museum house school farm boat |
prepare | préparer | HUMANS | cake sandwich soup meat tea coffee juice | for
throw/threw | lancer | HUMANS | ball stone hat shoe apple key |
forget/forgot | oublier | HUMANS | key bag umbrella coat hat book gift phone letter message photo map |
look at | regarder | HUMANS cat dog owl | HUMANS ANIMALS painting map photo star tree flower watch newspaper
    boat train | person
listen to | écouter | HUMANS | HUMANS bird owl story poem guitar violin piano | person
look for | chercher | HUMANS | GOODS cat dog rabbit child hotel restaurant | person
wait for | attendre | HUMANS dog | HUMANS bus train plane boat letter message | person
finish | finir | HUMANS | TEXTS soup cake sandwich painting |
protect | protéger/protèg | HUMANS dog | HUMANS PETS bird bee village castle tree flower forest | person
catch/caught | attraper | HUMANS cat fox | mouse rabbit bird frog butterfly ball thief hen duck snake | place person
share | partager | HUMANS | bread cake cheese soup apple sandwich meat orange bedroom |
have/had | avoir | HUMANS | FRIENDS FAMILY PETS CLOTHES THINGS VEHICLES FURNITURE house garden farm shop | state
    indefinite
leave/left | quitter | HUMANS | house village city hotel school hospital island castle farm shop | definite
answer | répondre à | HUMANS | HUMANS letter message | person
obey | obéir à | HUMANS dog horse | king queen teacher doctor mother father lady farmer | definite person
speak to/spoke | parler à | HUMANS | HUMANS dog cat horse bird | person
play | jouer de | HUMANS | guitar violin piano | definite singular
enter | entrer dans | HUMANS cat dog | ROOMS PREMISES church hotel museum castle theatre restaurant hospital station
    library park forest | etre
go to/went | aller à | HUMANS | church museum village castle theatre restaurant school shop farm market hospital
    station library beach park river office | definite etre
arrive at | arriver à | HUMANS | hotel museum village castle theatre restaurant school farm market hospital station
    library beach river | definite etre
come back from/came | revenir de | HUMANS | church museum village castle theatre restaurant school shop farm market
    hospital station library beach park island office | definite etre
live in | habiter dans | HUMANS | village castle hotel house forest city | state
"""
_INTRANSITIVE = """
sleep/slept | dormir | HUMANS ANIMALS | | place well with
sing/sang | chanter | HUMANS bird | | place well with
dance | danser | HUMANS bear | | place well with
cry | pleurer | HUMANS | | place
laugh | rire | HUMANS | | place with
work | travailler | HUMANS donkey horse | | place well slowly with
swim/swam | nager | HUMANS dog duck bear frog | | well slowly with
run/ran | courir | HUMANS PETS fox wolf lion mouse squirrel | | place slowly with
walk | marcher | HUMANS ANIMALS | | place slowly with
arrive | arriver | HUMANS | | etre with
leave/left | partir | HUMANS | | etre with
come back/came | revenir | HUMANS | | etre with
go out/went | sortir | HUMANS cat dog | | etre with
fall/fell | tomber | HUMANS PETS monkey bird | | etre place
stay | rester | HUMANS cat dog | | etre place with
die | mourir | king queen hero witch horse dog lion elephant farmer lady | | etre past place
get up/got | lever/lèv | HUMANS | | reflexive
wake up/woke | réveiller | HUMANS cat bear owl | | reflexive
rest | reposer | HUMANS PETS | | reflexive place
"""
# Verbs with a direct and an indirect object.
_DITRANSITIVE = """
give/gave | donner | HUMANS | CLOTHES THINGS TEXTS apple cake bread cheese cat dog |
show | montrer | HUMANS | CLOTHES THINGS TEXTS house garden bedroom |
send/sent | envoyer/envoi | HUMANS | letter message gift book photo flower map jewel |
bring/brought | apporter | HUMANS | STAPLES DRINKS letter flower gift book newspaper key cup plate chair |
"""


def _rows(table: str) -> list[list[str]]:
    """The cells of a table; an indented line continues the previous one."""
    return [[cell.strip() for cell in row.split("|")] for row in table.replace("\n    ", " ").strip().splitlines()]


def _read_adjectives() -> dict[Adjective, tuple[Noun, ...]]:
    adjectives = {}
    for before_noun, table in ((True, _ADJECTIVES_BEFORE), (False, _ADJECTIVES_AFTER)):
        for entry, nouns in _rows(table):
            english, french = entry.split(":")
            masculine, _, feminine = french.partition("/")
            feminine = feminine or french_feminine(masculine)
            adjective = Adjective(
                english=english,
                french=((masculine, french_plural(masculine)), (feminine, french_plural(feminine))),
                before_vowel={"beau": "bel", "nouveau": "nouvel", "vieux": "vieil"}.get(masculine, masculine),
                before_noun=before_noun,
                graded=english not in _UNGRADED,
            )
            adjectives[adjective] = _select(nouns)
    return adjectives


def _read_verb(english: str, french: str, subjects: str = "", objects: str = "", traits: str = "") -> Verb:
    english, _, past = english.partition("/")
    base, _, particle = english.partition(" ")
    french, _, preposition = french.partition(" ")
    infinitive, _, strong = french.partition("/")
    present, participle = conjugate(infinitive, strong)
    return Verb(
        name=english,
        base=base,
        third="has" if base == "have" else english_plural(base),
        past=past or english_past(base),
        particle=particle,
        infinitive=infinitive,
        present=present,
        participle=participle,
        preposition=preposition,
        with_etre="etre" in traits.split() or "reflexive" in traits.split(),
        reflexive="reflexive" in traits.split(),
        subjects=_select(subjects),
        objects=_select(objects),
        traits=frozenset(traits.split()),
    )


def _read_verbs(table: str) -> tuple[Verb, ...]:
    return tuple(_read_verb(*row) for row in _rows(table))


ADJECTIVES = _read_adjectives()
TRANSITIVE, INTRANSITIVE, DITRANSITIVE = (
    _read_verbs(_TRANSITIVE),
    _read_verbs(_INTRANSITIVE),
    _read_verbs(_DITRANSITIVE),
)
CAN, MUST, WANT = MODALS = _read_verb("can", "pouvoir"), _read_verb("must", "devoir"), _read_verb("want to", "vouloir")

# Whether each name is feminine.
NAMES = {
    **dict.fromkeys(("Paul", "Pierre", "Luc", "Thomas", "Louis", "Henri"), False),
    **dict.fromkeys(("Marie", "Anne", "Claire", "Sophie", "Alice", "Julie"), True),
}

# English singular and plural; French masculine, feminine and plural ("-": not used).
DETERMINERS = {
    row.split()[0]: tuple(word.replace("+", " ") for word in row.split())
    for row in """
        the the le la les
        this these ce cette ces
        a - un une -
        some some de+le de+la des
        any any de de de
        each - chaque chaque -
        my my mon ma mes
        your your votre votre vos
        his his son sa ses
        her her son sa ses
        our our notre notre nos
        their their leur leur leurs
        two two - - deux
        three three - - trois
        four four - - quatre
        five five - - cinq
        many many - - beaucoup+de""".strip().splitlines()
}
POSSESSIVES = ("my", "your", "his", "her", "our", "their")
NUMBERS = ("two", "three", "four", "five")

# French pronoun, form of the verb, feminine, plural. "I" and "they" are masculine, "you" is plural.
SUBJECT_PRONOUNS = {
    "I": ("je", JE, False, False),
    "you": ("vous", VOUS, False, True),
    "he": ("il", IL, False, False),
    "she": ("elle", IL, True, False),
    "we": ("nous", NOUS, False, True),
    "they": ("ils", ILS, False, True),
    "who": ("qui", IL, False, False),
}
# French direct and indirect object pronoun, feminine, plural.
OBJECT_PRONOUNS = {
    "me": ("me", "me", False, False),
    "you": ("vous", "vous", False, True),
    "him": ("le", "lui", False, False),
    "her": ("la", "lui", True, False),
    "us": ("nous", "nous", False, True),
    "them": ("les", "leur", False, True),
}
REFLEXIVE_PRONOUNS = ("me", "se", "nous", "vous", "se")  # je, il, nous, vous, ils

# Adverbs before the English verb and after the finite French verb.
FREQUENCY = {"often": "souvent", "always": "toujours", "sometimes": "parfois", "already": "déjà"}
# Adverbs after the English verb and after the finite French verb.
QUALITY = {"well": "bien", "badly": "mal"}
# Adverbs after the verb in both languages.
MANNER = {"slowly": "lentement", "quickly": "vite"}
INTENSITY = {"very": "très", "too": "trop"}
QUESTION_WORDS = {"where": "où", "when": "quand", "why": "pourquoi", "what": "que"}
# Adjective with "be" in English, noun with "avoir" in French: is hungry, a faim.
SENSATIONS = {"hungry": "faim", "thirsty": "soif", "sleepy": "sommeil", "right": "raison", "wrong": "tort"}

# After each French word, the indices of the English words that it translates.
TIMES = {
    "yesterday": "hier:0",
    "last night": "hier:0 soir:1",
    "this morning": "ce:0 matin:1",
    "last week": "la:1 semaine:1 dernière:0",
    "last year": "la:1 année:1 dernière:0",
    "on Sunday": "dimanche:01",
    "on Monday": "lundi:01",
    "on Sundays": "le:0 dimanche:1",
    "on Mondays": "le:0 lundi:1",
    "every day": "tous:0 les:0 jours:1",
    "every morning": "tous:0 les:0 matins:1",
    "every evening": "tous:0 les:0 soirs:1",
    "every year": "tous:0 les:0 ans:1",
    "today": "aujourd'hui:0",
    "tomorrow": "demain:0",
    "tonight": "ce:0 soir:0",
    "now": "maintenant:0",
}
# The first three also fit actions done once a day, such as getting up.
TIMES_PAST = ("yesterday", "last night", "this morning", "last week", "last year", "on Sunday", "on Monday", "today")
TIMES_PRESENT = ("every day", "every morning", "every evening", "every year", "on Sundays", "on Mondays")
TIMES_FUTURE = ("now", "today", "tomorrow", "tonight", "on Sunday", "on Monday")

# English preposition of place: French preposition, nouns.
PLACES = {
    "in": (
        "dans",
        "ROOMS house garden school shop church hotel museum village castle theatre restaurant hospital station library "
        "forest park street ",
    ),
    "on": ("sur", "beach island bridge boat"),
    "under": ("sous", "table bed tree bridge"),
    "behind": ("derrière", "house school shop church hotel castle tree station hospital"),
    "in front of": ("devant", "house school shop church hotel museum theatre restaurant hospital station library"),
    "near": (
        "près de",
        "river beach forest station bridge school market church hospital farm village castle tree",
    ),
}
PLACE_NOUNS = {english: _select(nouns) for english, (_, nouns) in PLACES.items()}
PREPOSITIONS = {english: french for english, (french, _) in PLACES.items()} | {
    "with": "avec",
    "without": "sans",
    "for": "pour",
    "to": "à",
}
# Lemmas in the grammar itself: être, naître, here is, there is, not, never, and, that, 's.
_GRAMMATICAL = 9


def count_lemmas() -> int:
    """Number of lemmas in the phrasebook; an English lemma and its French translation count once.

    >>> count_lemmas() > 300
    True
    """
    verbs = {(verb.base, verb.infinitive) for verb in TRANSITIVE + INTRANSITIVE + DITRANSITIVE + MODALS}
    pronouns = SUBJECT_PRONOUNS.keys() | OBJECT_PRONOUNS.keys()
    tables: tuple[Sized, ...] = (NOUNS, ADJECTIVES, verbs, NAMES, DETERMINERS, pronouns, FREQUENCY, QUALITY, MANNER)
    tables += (INTENSITY, QUESTION_WORDS, SENSATIONS, TIMES, PREPOSITIONS)
    return sum(len(table) for table in tables) + _GRAMMATICAL
