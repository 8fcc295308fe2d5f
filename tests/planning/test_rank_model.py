from __future__ import annotations

import numpy as np
import pytest

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.rank_model import (
    RankModel,
    held_out_model,
    in_sample_model,
    model_of_counts,
    ranking,
    running_model,
    shifted,
    uniform_model,
)


def active(rows: list[str]) -> np.ndarray:
    return np.array([[letter == "x" for letter in row] for row in rows])


def test_ranking_breaks_ties_by_id() -> None:
    assert ranking(np.array([2, 5, 0, 5, 2])).tolist() == [1, 3, 0, 4, 2]


def test_counted_on_the_part_that_follows() -> None:
    steps = active(["..xx", "...x", "..xx", "x.x.", "x..x", "xx..", ".x.x", "x..x"])
    model = held_out_model(steps, 0.375)  # learnt on three steps: 3 and 2 (3 : 2 : 0 : 0), then 0 and 1
    assert model.probabilities.tolist() == pytest.approx([3 / 5, 1 / 5, 4 / 5, 2 / 5])
    assert model.distinct.tolist() == [0, 0, 1, 0, 0]
    assert model.steps == 5
    assert model.hit_rate(2) == pytest.approx(0.4)


def test_number_of_distinct_experts_keeps_its_distribution() -> None:
    model = held_out_model(active(["x...", "xxx.", "x..x", "xxxx", "xx.."]), 0.2)
    assert model.distinct.tolist() == pytest.approx([0, 0, 0.5, 0.25, 0.25])
    assert model.mean_distinct == pytest.approx(2.75)
    assert model.probabilities.sum() == pytest.approx(2.75)


def test_same_steps_for_both_overstate_skew() -> None:
    generator = np.random.default_rng(0)
    steps = np.zeros((38, 60), dtype=bool)
    for row in steps:
        row[generator.choice(60, 4, replace=False)] = True
    assert in_sample_model(steps).hit_rate(15) > 0.45  # of uniform draws!
    assert held_out_model(steps).hit_rate(15) == pytest.approx(0.25, abs=0.08)


def test_running_model_ranks_by_decayed_counts_of_earlier_steps() -> None:
    # Counts halve every step. Before step 1: [1 0 0]; 2: [.5 1 0]; 3: [.25 .5 1]; 4: [1.125 .25 .5].
    steps = active(["x..", ".x.", "..x", "x..", "x.."])
    model = running_model(steps, half_life_steps=1, warm_up_steps=1)
    # Ranks of the active expert in steps 1..4: 1, 2, 2, 0.
    assert model.probabilities.tolist() == [0.25, 0.25, 0.5]
    assert model.steps == 4


def test_shift_moves_towards_the_mean() -> None:
    f = np.array([0.9, 0.5, 0.1, 0.1])
    assert shifted(f, 0).tolist() == f.tolist()
    assert shifted(f, 1).tolist() == pytest.approx([0.4] * 4)
    assert shifted(f, 0.25).tolist() == pytest.approx([0.775, 0.475, 0.175, 0.175])
    with pytest.raises(InvalidArgumentError, match=r"outside 0\.\.1"):
        shifted(f, 1.1)


def test_shifted_model_keeps_its_sizes() -> None:
    model = held_out_model(active(["xx..", "x...", "xxx.", "xx.x"]), 0.25).shifted(0.5)
    assert model.probabilities.sum() == pytest.approx(model.mean_distinct)
    assert model.distinct.tolist() == pytest.approx([0, 1 / 3, 0, 2 / 3, 0])


def test_counts_per_prompt() -> None:
    followed = np.array([[3, 1, 0], [0, 1, 1]])
    steps = np.array([4, 2])
    one_ranking = model_of_counts(np.array([0, 9, 5]), followed, steps, 1)
    assert one_ranking.probabilities.tolist() == pytest.approx([2 / 6, 1 / 6, 3 / 6])
    own_rankings = model_of_counts(followed, followed, steps, 1)
    assert own_rankings.probabilities.tolist() == pytest.approx([4 / 6, 2 / 6, 0])


def test_uniform_model() -> None:
    model = uniform_model(8, 2)
    assert model.probabilities.tolist() == [0.25] * 8
    assert model.hit_rate(2) == 0.25


def test_impossible_models_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="sums to 1"):
        RankModel(np.array([0.5, 0.5]), np.array([0, 0, 1.0]), 1)
    with pytest.raises(InvalidArgumentError, match="cannot be split"):
        held_out_model(active(["x."]))
    with pytest.raises(InvalidArgumentError, match="nothing to count"):
        running_model(active(["x.", ".x"]), 16)
    with pytest.raises(InvalidArgumentError, match="cannot be activated"):
        uniform_model(4, 5)
