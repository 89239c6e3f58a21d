"""Completions of several prompts at once. Oracles: a forward of each whole text, and the distribution of one text."""

import pytest
import torch

from bloomery.facts.config import DeltaNet, ModelConfig
from bloomery.infer.completions import Completion, past_of_turns, sample_completions
from bloomery.infer.sampling import (
    NotFinite,
    Sampling,
    filtered_rows,
    next_distribution,
    sample_each_row,
)
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.io.weights import fresh_decoder

PROMPTS = ([5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6])
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8, stop_ids=(0, 11))


def decoder_of(**changes):
    facts = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    return fresh_decoder(ModelConfig(**facts | changes), seed=1).eval()


def uniforms(texts):
    numbers = [uniform(text.prompt, text.number, len(text.ids)) for text in texts]
    return torch.tensor(numbers, dtype=torch.float64)


def uniform(prompt, number, position):
    generator = torch.Generator().manual_seed(1000 * prompt + 50 * number + position)
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def completions(decoder, slots, generations=4, prompts=PROMPTS, sampling=SAMPLING):
    return sample_completions(decoder, prompts, generations, sampling, uniforms, slots=slots)


STATES = {
    "mixers": ("delta_net", "attention"),
    "delta_net": DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
}


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": (4, None)}, STATES], ids=["all keys", "window", "states"]
)
def test_every_token_is_drawn_from_the_forward_of_the_text_before_it(changes):
    decoder = decoder_of(**changes)
    drawn = completions(decoder, slots=5)
    assert [(text.prompt, text.number) for text in drawn] == [
        (prompt, number) for prompt in range(3) for number in range(4)
    ]
    for text in drawn:
        ids = [*PROMPTS[text.prompt], *text.ids]
        with torch.no_grad():
            logits = decoder(torch.tensor([ids])).head[0, len(PROMPTS[text.prompt]) - 1 : -1]
        logps = (logits / SAMPLING.temperature).log_softmax(-1)
        expected = logps.gather(1, torch.tensor(text.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(text.logps), expected, atol=1e-5, rtol=1e-5)
        cumulative = logps.double().exp().cumsum(-1)
        for position, token in enumerate(text.ids):
            number = uniform(text.prompt, text.number, position)
            below = 0.0 if token == 0 else float(cumulative[position, token - 1])
            assert below - 1e-5 <= number <= float(cumulative[position, token]) + 1e-5


def test_a_completion_ends_with_its_stop_token_or_is_truncated():
    drawn = completions(decoder_of(), slots=12, generations=30)
    assert {text.truncated for text in drawn} == {True, False}
    for text in drawn:
        stops = [token in SAMPLING.stop_ids for token in text.ids]
        assert sum(stops[:-1]) == 0
        assert stops[-1] != text.truncated
        assert len(text.ids) == SAMPLING.max_new_tokens if text.truncated else len(text.ids) > 0
        assert len(text.logps) == len(text.ids)


WIDE_STATES = STATES | {
    "delta_net": DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
}


@pytest.mark.parametrize(("threads", "changes"), [(1, {}), (2, {}), (2, WIDE_STATES)])
def test_the_compiled_step_draws_the_same_at_any_number_of_slots(threads, changes):
    decoder = decoder_of(hidden_size=64, intermediate_size=128, head_dim=16, **changes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder.step = CompiledStep(decoder)
        runs = [completions(decoder, slots=slots, generations=8) for slots in (1, 3, 24)]
    finally:
        torch.set_num_threads(before)
    decoder.step = CompiledStep(decoder)
    assert runs[0] == runs[1] == runs[2] == completions(decoder, slots=8, generations=8)


def test_the_draw_has_the_shares_of_the_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(4000, -1)
    numbers = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    ids, logps = sample_each_row(logits, numbers, Sampling(max_new_tokens=1, temperature=1.0))
    shares = logits[0].softmax(-1)
    counts = torch.tensor(ids).bincount(minlength=4)
    torch.testing.assert_close(counts / 4000, shares, atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(logps), shares.log()[ids])
    ends = sample_each_row(
        logits[:2], torch.tensor([0.0, 1 - 2.0**-53]), Sampling(max_new_tokens=1, temperature=1.0)
    )
    assert ends[0] == [0, 3]


def test_the_token_of_a_large_vocabulary_is_where_the_cumulative_distribution_passes():
    """Found in pieces, it is the one that the sum over all entries gives; alone the row gives the same bits."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(33, 5003, generator=generator) * 3
    numbers = torch.rand(33, generator=generator, dtype=torch.float64)
    sampling = Sampling(max_new_tokens=1, temperature=0.9)
    ids, logps = sample_each_row(logits, numbers, sampling)
    logprobs = (logits.double() / 0.9).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    expected = torch.searchsorted(cumulative, numbers[:, None], right=True)[:, 0]
    assert ids == expected.tolist()
    chosen = logprobs[torch.arange(33), expected].float()
    torch.testing.assert_close(torch.tensor(logps), chosen, atol=1e-6, rtol=1e-6)
    for row in range(33):
        alone = sample_each_row(logits[row : row + 1], numbers[row : row + 1], sampling)
        assert alone == ([ids[row]], [logps[row]])
    last = sample_each_row(logits, torch.full((33,), 1 - 2.0**-53, dtype=torch.float64), sampling)
    assert all(shares[id_] > 0 for shares, id_ in zip(logprobs.exp(), last[0], strict=True))


@pytest.mark.parametrize(
    "changes", [{"sliding_window": (20, None)}, WIDE_STATES], ids=["window", "states"]
)
def test_prompts_that_are_read_together_begin_as_if_each_were_alone(changes):
    """Oracle: each prompt by itself. One is longer than a window, and than what is read at once."""
    decoder = decoder_of(hidden_size=64, intermediate_size=128, head_dim=16, **changes)
    decoder.step = CompiledStep(decoder)
    prompts = [[7 * place % 61 for place in range(length)] for length in (3, 19, 1, 25, 20, 1200)]
    together = completions(decoder, slots=9, prompts=prompts)
    for number, ids in enumerate(prompts):

        def own_uniforms(texts, number=number):
            return uniforms([Completion(number, text.number, text.ids) for text in texts])

        alone = sample_completions(decoder, [ids], 4, SAMPLING, own_uniforms, slots=4)
        assert [(text.ids, text.logps) for text in alone] == [
            (text.ids, text.logps) for text in together if text.prompt == number
        ]


class CountingStep:
    """A compiled step that counts what it reads."""

    def __init__(self, decoder):
        self.step = CompiledStep(decoder)
        self.num_tokens = 0

    def __call__(self, tokens, first, cache, **named):
        self.num_tokens += sum(map(len, tokens))
        return self.step(tokens, first, cache, **named)

    def takes(self, *asked):
        return self.step.takes(*asked)


def turns(decoder, prompts, num_turns, *, slots, keeps):
    """What texts become that get three tokens after each answer; a third of them is over after the first."""
    texts = [list(ids) for ids in prompts]
    sampled = [[] for _ in texts]
    capacity = max(map(len, texts)) + num_turns * (SAMPLING.max_new_tokens + 3)
    past = past_of_turns(decoder, slots, capacity) if keeps else None
    for turn in range(num_turns):
        playing = [place for place in range(len(texts)) if turn == 0 or place % 3]

        def of_playing(asked, playing=playing, turn=turn):
            return torch.tensor(
                [uniform(playing[text.prompt], turn, len(text.ids)) for text in asked],
                dtype=torch.float64,
            )

        answers = sample_completions(
            decoder,
            [texts[place] for place in playing],
            1,
            SAMPLING,
            of_playing,
            slots=slots,
            limits=[SAMPLING.max_new_tokens] * len(playing),
            past=past,
        )
        for place, answer in zip(playing, answers, strict=True):
            sampled[place].append((answer.ids, answer.logps))
            texts[place] += [*answer.ids, 7, place % 61, 8]
    return sampled


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, WIDE_STATES)],
    ids=["float32", "bfloat16", "states"],
)
def test_turns_that_keep_their_slots_are_those_that_are_read_anew(dtype, changes):
    """To the bit; and each token is read once, as are those that prompts begin with."""
    decoder = decoder_of(hidden_size=64, intermediate_size=128, head_dim=16, **changes).to(dtype)
    prompts = [[*range(40), place // 4, place // 2] for place in range(12)]
    decoder.step = step = CountingStep(decoder)
    anew = turns(decoder, prompts, 4, slots=12, keeps=False)
    num_anew, step.num_tokens = step.num_tokens, 0
    assert turns(decoder, prompts, 4, slots=12, keeps=True) == anew
    # The last token of a prompt is read for its logits, also where another has begun alike.
    num_sampled = sum(len(ids) for text in anew for ids, _ in text)
    num_given = 3 * sum(len(text) - 1 for text in anew)
    num_prompts = 6 * 42 if changes else 42 + 1 + 4 * 2
    assert step.num_tokens <= num_sampled + num_given + num_prompts < num_anew


def test_texts_that_a_window_forgets_have_no_past_of_turns():
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    decoder = decoder_of(sliding_window=(20, None), **wide)
    assert past_of_turns(decoder, 4, 16) is None
    decoder.step = CompiledStep(decoder)
    assert past_of_turns(decoder, 4, 21) is None
    assert past_of_turns(decoder, 4, 20) is not None


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}],
)
def test_filters_leave_what_one_text_would_be_drawn_from(filters):
    logits = torch.randn(20, 61, generator=torch.Generator().manual_seed(3)) * 2
    sampling = Sampling(max_new_tokens=1, temperature=0.7, **filters)
    shares = filtered_rows((logits / 0.7).log_softmax(-1), sampling).exp()
    one_text = Sampling(max_new_tokens=1, temperature=0.7, seed=0, **filters)
    for row in range(20):
        torch.testing.assert_close(shares[row], next_distribution(logits[row], one_text))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(NotFinite):
        sample_each_row(
            torch.tensor([[0.0, float("nan")]]),
            torch.zeros(1),
            Sampling(max_new_tokens=1, temperature=1.0),
        )
