"""Word lists and the prose made of them: haystacks that need no file.

No word here is a person, a place or a thing of the reasoning tasks' world, so filler never states a fact.
"""

from __future__ import annotations

import random

_NOUNS = """
    anchor answer arrow autumn badge bakery barrel basin beacon blanket border branch breeze bridge
    brush bucket canal candle canyon captain carpet castle cedar chain chapter chimney circle cliff
    cloud coast column compass copper corner cotton cradle creek crown curtain dancer desert dinner
    doctor dragon drawer drum eagle echo engine evening fabric farmer feather fence ferry field
    flame flute forest fountain galaxy garlic glacier grain granite guitar hammer harbor harvest
    helmet hermit hill horizon horse hunter island ivory jacket jewel journey judge kettle ladder
    lagoon lantern lawyer leaf lemon letter lizard lumber marble market meadow melody merchant metal
    mirror monarch morning motor mountain museum needle nephew novel ocean orchard orchid otter
    paddle painter palace parrot pebble pencil pepper pilot pine planet pocket poem pond porter
    prairie puzzle quarry quilt rabbit raft railway rain ranger raven reef ribbon river rocket
    rooster rope saddle sailor salmon sand scholar season shadow shelter shepherd signal silver
    singer sketch spider spring squirrel stable station stone storm stream student summer sunset
    tailor tavern temple thread thunder tiger timber tower traveler tunnel valley velvet village
    violin voyage wagon walnut weaver whistle willow window winter wizard wolf writer
"""
_ADJECTIVES = """
    ancient amber angry bitter blue bold brave brief bright broad broken brown calm careful cheap
    clean clever cloudy cold common cool crisp curious dark deep distant dull dusty eager early
    empty faint fair famous fancy fierce fine firm flat foggy fresh friendly frozen gentle giant
    golden grand gray green happy harsh heavy hidden hollow honest huge humble icy idle jolly keen
    kind large late lazy lively lonely long loud loyal lucky mellow mild misty modern modest muddy
    narrow neat noble odd old open pale patient plain polite proud pure quick quiet rapid rare
    rough round royal rusty sharp shiny shy silent silky simple sleepy slender small smooth soft
    solid sour spare steady steep stiff strange strong sturdy sunny swift tall tame tender thick
    thin tidy tiny tough vast vivid warm wary weary wide wild wise wooden young zesty
"""
_VERBS = """
    admired answered avoided blessed borrowed brushed carried chased circled cleaned climbed copied
    counted covered crossed described drew ended enjoyed entered examined faced feared fetched filled
    finished followed forgot found framed greeted guarded guided heard helped ignored imagined
    joined judged kept knew learned left lifted liked loved measured mended met missed moved named
    noticed opened painted passed planned praised pulled pushed raised reached recalled repaired
    rescued saved sketched sold sought studied tasted thanked touched traded trusted visited wanted
    warned washed watched wrapped
"""
NOUNS, ADJECTIVES, VERBS = (tuple(words.split()) for words in (_NOUNS, _ADJECTIVES, _VERBS))
LINKS = ("before", "after", "beyond", "beside", "near", "behind", "under", "above", "around", "without")


def sentence(rng: random.Random) -> str:
    """A sentence of eight to ten words without digits or names; its full stop included."""
    pick = rng.choice
    subject = f"{pick(ADJECTIVES)} {pick(NOUNS)}"
    return (
        f"The {subject} {pick(VERBS)} the {pick(NOUNS)} {pick(LINKS)} the {pick(ADJECTIVES)} {pick(NOUNS)}."
    )


def prose(rng: random.Random, characters: int) -> str:
    """Exactly `characters` characters of sentences, ending with a whole one (the first may be cut)."""
    sentences: list[str] = []
    total = -1
    while total < characters:
        sentences.append(sentence(rng))
        total += 1 + len(sentences[-1])
    return " ".join(sentences)[total - characters :]


def murmur(rng: random.Random, characters: int) -> str:
    """Exactly `characters` characters of lower-case words and spaces: no capital, digit or mark."""
    words: list[str] = []
    total = -1
    while total < characters:
        words.append(rng.choice(NOUNS if rng.random() < 0.5 else VERBS))
        total += 1 + len(words[-1])
    return " ".join(words)[total - characters :]


def random_key(rng: random.Random) -> str:
    """An `adjective-noun` key, as RULER's keys are."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
