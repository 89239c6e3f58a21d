"""Texts in the slots of a batch: which slots they take when others end, and what rows of completions refuse."""

import pytest
import torch

from bloomery.facts.config import ModelConfig
from bloomery.infer.decode import RunningBatch, RunningText, Speculation, TextUpdate, sample_tokens
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
    shared.copy_prompts([prompt, prompt], alone.cache, [0, 0], first=1)
    assert shared.ids == [[], prompt, prompt]
    assert shared.cache.lengths == [0, 4, 4]
    torch.testing.assert_close(shared.read([[9]], 2), alone.read([[9]]), atol=0, rtol=0)


def test_rows_of_completions_refuse_penalties_of_a_text() -> None:
    penalty = Sampling(temperature=1.0, frequency_penalty=0.5)
    with pytest.raises(AssertionError):
        sample_each_row(torch.zeros(1, 4), torch.zeros(1), penalty)


@pytest.mark.parametrize("max_new_tokens", [15, 3])
def test_a_text_that_is_removed_has_no_more_updates_of_that_step(max_new_tokens: int) -> None:
    """With guesses a step has two tokens of a text, of which the first may complete a stop text.

    The second may be its last, so that it has ended before it is removed.
    """
    decoder = fresh_decoder(CONFIG, seed=1).eval()
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0)
    expected = list(sample_tokens(decoder, [1, 2], sampling))

    def guess(text: RunningText, limit: int) -> list[int]:
        return expected[len(text.new) : len(text.new) + min(limit, 1)]

    speculation = Speculation(guess)
    batch = RunningBatch(Past(decoder), speculation=speculation)
    text = batch.add([1, 2], sampling)
    assert [update.token for update in batch.step()] == expected[:1]
    tokens = []
    for update in batch.step():
        tokens.append(update.token)
        batch.remove(update.text)
    assert text.new == expected[:3]
    assert tokens == expected[1:2]
    assert speculation.accepted == 1
    assert not batch.texts


def test_rows_of_completions_refuse_what_a_text_may_have() -> None:
    past = Past(fresh_decoder(CONFIG, seed=1).eval(), 1, 8)

    def sample(texts: list[RunningText], logits: torch.Tensor) -> list[TextUpdate]:
        raise NotImplementedError

    with pytest.raises(AssertionError, match="without guesses"):
        RunningBatch(past, sample_rows=sample, agree=float)
    batch = RunningBatch(past, sample_rows=sample)
    with pytest.raises(AssertionError, match="no grammar"):
        batch.add([1], Sampling(), logprobs=2)
    with pytest.raises(AssertionError):
        sample_each_row(torch.zeros(1, 4), torch.zeros(1), Sampling(temperature=0.0))
