"""The word lists of the story grammar: who may appear in a story, where it happens and what is in it.

Every list is ours and plain on purpose. Some entries carry what must agree with them: a fear knows its remedy, a
place knows its preposition, an elder knows the pronouns.
"""

from __future__ import annotations

from dataclasses import dataclass

GIRL_NAMES = ("Lily", "Mia", "Anna", "Ella", "Ruby", "Nora", "Rosa", "Zoe", "Ivy", "Clara", "Molly", "Lucy")
BOY_NAMES = ("Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Tim", "Finn", "Omar", "Noah", "Hugo", "Theo")

ANIMALS = (
    "cat",
    "dog",
    "rabbit",
    "fox",
    "bear",
    "mouse",
    "duck",
    "frog",
    "owl",
    "squirrel",
    "hedgehog",
    "turtle",
    "otter",
    "goat",
    "beaver",
    "badger",
)
TRAITS = ("little", "kind", "brave", "curious", "clever", "quiet", "cheerful", "gentle", "friendly", "young")
MOODS = ("happy", "busy", "full of ideas", "ready to help", "ready for fun", "in a good mood")
WEATHERS = ("sunny", "windy", "cold", "warm", "foggy", "bright", "cloudy", "golden")
DAY_PARTS = ("morning", "day", "afternoon")

COLORS = ("red", "blue", "green", "yellow", "orange", "purple", "white", "brown", "golden", "silver")
TOYS = ("ball", "kite", "doll", "drum", "boat", "hat", "book", "bell", "scarf", "whistle", "basket", "spoon")
FRAGILE_THINGS = ("cup", "lamp", "mirror", "plate", "vase", "bowl", "clock", "jar")
MEALS = ("apple", "cake", "sandwich", "pear", "carrot", "pie", "muffin", "pancake", "bun", "orange")
MATERIALS = ("paper", "wood", "old cloth", "clay", "wool", "leaves")
GAMES = ("hide and seek", "tag", "catch", "chess", "cards", "a guessing game", "a counting game")
HIDING_SPOTS = (
    "under a bench",
    "behind a big rock",
    "inside a hollow tree",
    "next to the well",
    "under a pile of leaves",
    "behind a fence",
    "in the tall grass",
    "between two bushes",
    "under the bridge",
)


@dataclass(frozen=True)
class Place:
    """A place and how one is there: ``the hill``, ``on the hill``."""

    name: str
    at: str

    def __str__(self) -> str:
        return self.name


PLACES = (
    Place("the park", "in the park"),
    Place("the garden", "in the garden"),
    Place("the forest", "in the forest"),
    Place("the meadow", "in the meadow"),
    Place("the beach", "at the beach"),
    Place("the market", "at the market"),
    Place("the old mill", "at the old mill"),
    Place("the hill", "on the hill"),
    Place("the river", "by the river"),
    Place("the pond", "by the pond"),
    Place("the lake", "by the lake"),
    Place("the village square", "in the village square"),
)


@dataclass(frozen=True)
class Elder:
    """A grown-up of the family or the school."""

    title: str
    he: str
    his: str

    def __str__(self) -> str:
        return self.title

    @property
    def He(self) -> str:  # capital on purpose: it begins a sentence
        return self.he.capitalize()


ELDERS = (
    Elder("mother", "she", "her"),
    Elder("father", "he", "his"),
    Elder("grandmother", "she", "her"),
    Elder("grandfather", "he", "his"),
    Elder("aunt", "she", "her"),
    Elder("uncle", "he", "his"),
)


@dataclass(frozen=True)
class Fear:
    """What somebody is afraid of, and what takes the fear away."""

    thing: str
    remedy: str

    def __str__(self) -> str:
        return self.thing


FEARS = (
    Fear("the dark", "the light of a small lamp"),
    Fear("thunder", "a happy song"),
    Fear("deep water", "a long rope"),
    Fear("high places", "a strong ladder"),
    Fear("the big dog next door", "a soft voice"),
    Fear("loud noises", "a warm hat over both ears"),
    Fear("strange shadows", "a funny story"),
)


@dataclass(frozen=True)
class Trap:
    """Where somebody is stuck, and the deed (past tense) that frees them."""

    where: str
    deed: str

    def __str__(self) -> str:
        return self.where


TRAPS = (
    Trap("in a thorny bush", "pulled the branches apart"),
    Trap("in a deep hole", "put a long plank into the hole"),
    Trap("in the mud", "threw a rope and pulled hard"),
    Trap("on a high branch", "brought a ladder"),
    Trap("behind a heavy gate", "lifted the rusty latch"),
    Trap("in an old net", "cut the net with care"),
    Trap("under a fallen log", "rolled the log away"),
)


@dataclass(frozen=True)
class Skill:
    """Something to learn (``to swim``), how it goes wrong at first and how it goes in the end (both past tense)."""

    verb: str
    failure: str
    success: str

    def __str__(self) -> str:
        return self.verb


SKILLS = (
    Skill("to swim", "sank like a stone", "swam across the pool"),
    Skill("to whistle", "made no sound at all", "whistled a whole tune"),
    Skill("to skate", "fell on the ice", "made a wide circle on the ice"),
    Skill("to juggle", "dropped all the balls", "kept three balls in the air"),
    Skill("to ride a bike", "fell into the grass", "rode all around the house"),
    Skill("to bake bread", "burned the bread", "took a perfect loaf out of the oven"),
    Skill("to dance", "stepped on many toes", "danced until the music stopped"),
)
