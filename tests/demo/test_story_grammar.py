"""The promises of the story grammar, checked on a few thousand stories."""

from __future__ import annotations

import math
import re
from itertools import islice

import pytest

from demo.story_grammar import Picker, Story, stories, tell_story, vocabulary, with_article, words_of
from demo.story_plots import PLOTS
from demo.story_words import BOY_NAMES, GIRL_NAMES

NAMES = frozenset(GIRL_NAMES + BOY_NAMES)


@pytest.fixture(scope="module")
def many() -> list[Story]:
    return list(islice(stories(seed=0), 3000))


def test_a_story_is_the_same_everywhere() -> None:
    assert tell_story(seed=0, index=0).text == (
        "Once upon a time, a cheerful mouse named Tim lived in a small house near the market. One foggy "
        "afternoon, Tim found a tiny seed at the market. Tim dug a small hole and planted it. Tim waited all "
        'day, but the seed did not grow. "I do not like to wait," said Tim. Then a brave boy named Finn came '
        'by and looked at the ground. "Good things take time," said Finn. Tim gave it water every day. Then, '
        'one fine morning, there was a small green leaf. In the summer, there was a big yellow flower. "It is '
        'beautiful!" said Tim. Tim learned to work a little each day. Tim thanked Finn and gave him a big '
        "hug."
    )


def test_the_series_is_its_stories_one_by_one() -> None:
    assert list(islice(stories(5), 10)) == [tell_story(5, index) for index in range(10)]


def test_seeds_and_indices_give_distinct_stories(many: list[Story]) -> None:
    texts = {story.text for story in many}
    assert len(texts) == len(many)
    assert texts.isdisjoint(story.text for story in islice(stories(seed=1), 1000))


def test_every_plot_is_told(many: list[Story]) -> None:
    assert {story.plot for story in many} == {plot.name for plot in PLOTS}


def test_no_slot_is_left_open(many: list[Story]) -> None:
    assert not [story.text for story in many if re.search(r"[{}<>]|  ", story.text)]


def test_articles_agree_with_the_next_word(many: list[Story]) -> None:
    for story in many:
        for article, letter in re.findall(r"\b([Aa]n?) (\w)", story.text):
            assert (article.lower() == "an") == (letter in "aeiou"), story.text


def test_sentences_are_written_properly(many: list[Story]) -> None:
    for story in many:
        assert story.text.count('"') % 2 == 0, story.text
        assert re.search(r'[.!?]"?$', story.text), story.text
        assert not re.search(r"(^|[.!?] )[a-z]", story.text), story.text


def test_a_story_is_about_two_characters(many: list[Story]) -> None:
    for story in many:
        assert len(NAMES & set(re.findall(r"\w+", story.text))) == 2, story.text


def test_the_vocabulary_is_what_the_stories_use(many: list[Story]) -> None:
    told = {word for story in many for word in words_of(story.text)}
    assert told <= vocabulary()
    # The other way round, nearly: a word may be in one rare alternative only.
    assert len(vocabulary() - told) <= 5


def test_articles() -> None:
    assert with_article("orange kite") == "an orange kite"
    assert with_article("red kite") == "a red kite"


def test_a_pick_carries_minus_log_of_its_probability() -> None:
    picker = Picker("seed")
    picked = [picker.pick(("often", "often", "seldom")) for _ in range(300)]
    expected = picked.count("often") * math.log(3 / 2) + picked.count("seldom") * math.log(3)
    assert picker.nats == pytest.approx(expected)
    assert 160 < picked.count("often") < 240
