"""The story grammar: turns (seed, index) into one little story, the same one every time and on every machine.

A story is a plot from :mod:`demo.story_plots` whose beats are picked one by one and whose slots are filled from
:mod:`demo.story_words`. Every pick is uniform, so the grammar also knows the information in each story: the sum of
``-log(probability)`` over its picks. Two different series of picks seldom give the same text, so this sum per token is
(a hair above) the entropy of the text, the lowest loss that any model can reach.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from demo import story_words as words
from demo.story_plots import CLOSING, OPENINGS, PLOTS, Beat

T = TypeVar("T")


def with_article(phrase: str) -> str:
    """``apple`` -> ``an apple``. The word lists hold no silent h and no spoken-y vowel, so the letter decides."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


class Picker:
    """Uniform picks from a seeded generator, with an account of the information they carry.

    An option that is listed twice is twice as likely, and tells less.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, options: Sequence[T]) -> T:
        # random() is the one method whose sequence Python promises to keep between versions.
        picked = options[int(self._random.random() * len(options))]
        self.nats += math.log(len(options) / options.count(picked))
        return picked


@dataclass(frozen=True)
class Thing:
    """An object of the story: ``str`` gives ``red kite``, ``head`` gives ``kite``, ``a`` gives ``a red kite``."""

    head: str
    color: str = ""

    def __str__(self) -> str:
        return f"{self.color} {self.head}".strip()

    @property
    def a(self) -> str:
        return with_article(str(self))


@dataclass(frozen=True)
class Character:
    """Somebody in the story, with the pronouns that go with the name."""

    name: str
    kind: str
    trait: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:  # capital on purpose: it begins a sentence
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a(self) -> str:
        """``a brave fox``"""
        return with_article(f"{self.trait} {self.kind}")

    @property
    def A(self) -> str:
        return self.a.capitalize()

    @property
    def intro(self) -> str:
        """``a brave fox named Tom``"""
        return f"{self.a} named {self.name}"


@dataclass(frozen=True)
class Story:
    """One story; ``nats`` is the information in the picks that made it."""

    text: str
    plot: str
    nats: float


def _character(picker: Picker, taken: str = "") -> Character:
    is_girl = picker.pick((True, False))
    names = words.GIRL_NAMES if is_girl else words.BOY_NAMES
    name = picker.pick(tuple(name for name in names if name != taken))
    is_animal = picker.pick((True, True, False))
    kind = picker.pick(words.ANIMALS) if is_animal else ("girl" if is_girl else "boy")
    he, him, his = ("she", "her", "her") if is_girl else ("he", "him", "his")
    return Character(name, kind, picker.pick(words.TRAITS), he, him, his)


def _slot(picker: Picker, slot: str) -> object:
    """Fill one slot by its name; a plot that names an unknown slot is a programming error."""
    match slot:
        case "toy":
            return Thing(picker.pick(words.TOYS), picker.pick(words.COLORS))
        case "fragile":
            return Thing(picker.pick(words.FRAGILE_THINGS), picker.pick(words.COLORS))
        case "meal":
            return Thing(picker.pick(words.MEALS))
        case "day":
            return f"one {picker.pick(words.WEATHERS)} {picker.pick(words.DAY_PARTS)}"
    lists: dict[str, Sequence[object]] = {
        "place": words.PLACES,
        "elder": words.ELDERS,
        "fear": words.FEARS,
        "trap": words.TRAPS,
        "skill": words.SKILLS,
        "spot": words.HIDING_SPOTS,
        "material": words.MATERIALS,
        "game": words.GAMES,
        "mood": words.MOODS,
    }
    return picker.pick(lists[slot])


_SLOT_NAME = re.compile(r"\{(\w+)")


_SENTENCE_START = re.compile(r"(?:^|(?<=[.!?] ))[a-z]")  # not after a closing quote: '"Why?" asked Tom.'


def _sentence_case(text: str) -> str:
    return _SENTENCE_START.sub(lambda start: start.group().upper(), text)


def tell_story(seed: int, index: int) -> Story:
    """Story number ``index`` of the endless series ``seed``."""
    picker = Picker(f"story {seed} {index}")
    hero = _character(picker)
    slots: dict[str, object] = {"hero": hero, "friend": _character(picker, taken=hero.name)}
    plot = picker.pick(PLOTS)
    sentences = []
    beats: tuple[Beat, ...] = (OPENINGS, *plot.beats, plot.morals, CLOSING)
    for beat in beats:
        template = picker.pick(beat)
        # A slot is filled where it first appears, so that only what the text shows counts as information.
        for name in _SLOT_NAME.findall(template):
            if name not in slots:
                slots[name] = _slot(picker, name)
        if template:
            sentences.append(_sentence_case(template.format_map(slots)))
    return Story(" ".join(sentences), plot.name, picker.nats)


def stories(seed: int) -> Iterator[Story]:
    """The endless series ``seed``, from its first story on."""
    return (tell_story(seed, index) for index in count())


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z]+", text.lower())


def vocabulary() -> frozenset[str]:
    """Every word that the grammar can write, in lower case."""
    templates = [template for plot in PLOTS for beat in (*plot.beats, plot.morals) for template in beat]
    found = set(words_of(" ".join(re.sub(r"\{[^}]*\}", " ", text) for text in [*templates, *OPENINGS, *CLOSING])))
    for value in vars(words).values():
        if isinstance(value, tuple):
            for entry in value:
                fields = [entry] if isinstance(entry, str) else vars(entry).values()
                found.update(words_of(" ".join(fields)))
    return frozenset(found | set(words_of("a an one named girl boy he she him her his")))
