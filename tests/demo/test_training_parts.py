"""What the training is made of: batches, load balance, learning rate."""

from __future__ import annotations

import pytest
import torch

from demo.load_balance import expert_load, load_balancing_loss
from demo.story_batches import IGNORED, batch_of
from demo.story_grammar import tell_story
from demo.train import LAST_LEARNING_RATE_SHARE, WARM_UP_STEPS, learning_rate_share


def test_a_batch_holds_whole_stories_and_ignores_its_padding() -> None:
    story = tell_story(0, 0)
    batch = batch_of([(story, [0, 7, 8, 9, 1]), (story, [0, 5, 1])], pad_id=2)
    assert batch.inputs.tolist() == [[0, 7, 8, 9], [0, 5, 2, 2]]
    assert batch.labels.tolist() == [[7, 8, 9, 1], [5, 1, IGNORED, IGNORED]]
    assert batch.label_count == 6
    assert batch.nats == pytest.approx(2 * story.nats)


def test_expert_load_counts_the_chosen_experts() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0], [3.0, 0.0, 2.0, 0.0]])
    assert expert_load(logits, experts_per_token=2).tolist() == [0.5, 0.25, 0.25, 0.0]


def test_load_balancing_loss_is_one_when_even_and_the_expert_count_when_one_expert_takes_all() -> None:
    one_each = 50 * torch.eye(4)
    everything_to_one = torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(4, 1)
    real = torch.ones(4, dtype=torch.bool)
    assert load_balancing_loss((one_each,), real, 1).item() == pytest.approx(1)
    assert load_balancing_loss((everything_to_one,), real, 1).item() == pytest.approx(4)
    assert load_balancing_loss((one_each, everything_to_one), real, 1).item() == pytest.approx(2.5)


def test_load_balancing_loss_leaves_padding_out() -> None:
    logits = torch.cat([50 * torch.eye(4), torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(4, 1)])
    real = torch.tensor([True] * 4 + [False] * 4)
    assert load_balancing_loss((logits,), real, 1).item() == pytest.approx(1)


def test_learning_rate_warms_up_stays_and_decays() -> None:
    assert learning_rate_share(step=0, progress=0.0) == pytest.approx(1 / WARM_UP_STEPS)
    assert learning_rate_share(step=500, progress=0.5) == 1
    assert learning_rate_share(step=750, progress=0.75) == pytest.approx(0.5)
    assert learning_rate_share(step=999, progress=1.0) == LAST_LEARNING_RATE_SHARE
