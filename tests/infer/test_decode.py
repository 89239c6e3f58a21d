"""Texts in the slots of a batch: which slots they take when others end, and what rows of completions refuse."""

import pytest
import torch

from bloomery.facts.config import ModelConfig
from bloomery.infer.decode import RunningBatch, RunningText, TextUpdate
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling, sample_each_row
from bloomery.model.io.weights import fresh_decoder

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def test_of_several_texts_that_end_in_one_step_the_lowest_slot_is_freed_first() -> None:
    """The last text moves into a free slot, and leaves it at once where it has ended, too."""
    decoder = fresh_decoder(CONFIG, seed=1).eval()
    ending_prompts = ([1], [2], [5])

    def sample(texts: list[RunningText], logits: torch.Tensor) -> list[TextUpdate]:
        for text in texts:
            text.new.append(7)
            text.unread = [7]
        is_last_step = len(texts) == 5
        return [
            TextUpdate(text, 7, "stop" if is_last_step and text.prompt in ending_prompts else None)
            for text in texts
        ]

    batch = RunningBatch(Past(decoder, 5, 16), sample_rows=sample)
    for first_id in range(1, 6):
        batch.add([first_id], Sampling(max_new_tokens=15))
    while len(batch.texts) == 5:
        batch.step()
    assert [text.prompt for text in batch.texts] == [[4], [3]]
    assert [ids[0] for ids in batch.past.ids[:2]] == [4, 3]


def test_a_prompt_that_is_read_once_begins_its_texts_as_if_each_had_read_it() -> None:
    decoder = fresh_decoder(CONFIG, seed=1).eval()
    prompt = [5, 6, 7, 8]
    alone = Past(decoder, 1, 8)
    alone.read([prompt])
    shared = Past(decoder, 3, 8)
    shared.take([prompt, prompt], alone.cache, [0, 0], first=1)
    assert shared.ids == [[], prompt, prompt]
    assert shared.cache.lengths == [0, 4, 4]
    torch.testing.assert_close(shared.read([[9]], 2), alone.read([[9]]), atol=0, rtol=0)


def test_rows_of_completions_refuse_penalties_of_a_text() -> None:
    penalty = Sampling(temperature=1.0, frequency_penalty=0.5)
    with pytest.raises(AssertionError):
        sample_each_row(torch.zeros(1, 4), torch.zeros(1), penalty)
