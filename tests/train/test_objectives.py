import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bloomery.data.batch import Batch
from bloomery.train.evaluation.evaluation import complete_batches
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import next_token_loss


def test_next_token_loss_is_the_sum_over_learned_labels():
    scores_BT = torch.tensor([[math.log(0.5), math.log(0.25)], [math.log(0.125), math.log(0.1)]])
    loss_mask_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    total, count, *_ = next_token_loss(scores_BT, loss_mask_BT)
    assert math.isclose(total, math.log(2) + math.log(4) + math.log(8), rel_tol=1e-6)
    assert count == 3


def test_pretraining_scores_the_labels_of_the_batch_by_hand():
    output = nn.Linear(2, 3, bias=False)
    output.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    hidden_BTD = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    batch = Batch(zeros, torch.tensor([[0, 2]]), torch.ones(1, 2), zeros, zeros)
    objective = pretraining(score_chunk=1)
    total, count, *_ = objective.loss(objective.head(batch)(hidden_BTD, output, None), batch)
    expected = (math.log(math.e + 2) - 1) + math.log(math.e**2 + 2)
    assert math.isclose(total.item(), expected, rel_tol=1e-6)
    assert count == 2


@pytest.mark.parametrize(("together", "before_the_first"), [(False, 1), (True, 3)])
def test_held_out_batches_are_completed_one_by_one_unless_all_must_be_known(
    together, before_the_first
):
    read = []
    batches = (read.append(number) or number for number in range(3))
    objective = replace(
        pretraining(score_chunk=8), before=lambda _model, some: [10 * one for one in some]
    )
    found = complete_batches(None, batches, replace(objective, together=together))
    assert next(found) == 0
    assert len(read) == before_the_first
    assert list(found) == [10, 20]
