"""Speculation changes how many forwards a text takes, and neither its tokens nor their distribution."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import saved_reference, tokens

from bloomery.core.errors import UserError
from bloomery.infer.decode import RunningText, Speculation, sample_tokens
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling, next_distribution
from bloomery.infer.speculation import DraftModel, PromptLookup, speculation_of
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder

AGAIN = [3, 5, 7, 9, 11, 13] * 3


def loaded(case: str, folder: Path) -> Decoder:
    saved_reference(case, folder)
    return load_decoder(folder).requires_grad_(False).eval()


def text_of(prompt: list[int], new: list[int]) -> RunningText:
    return RunningText(prompt, Sampling(), 50, [], None, None, torch.Generator(), new=new)


def test_prompt_lookup_finds_the_latest_place() -> None:
    guess = PromptLookup(4)
    assert guess(text_of([1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8], [2, 3]), 10) == [7, 8, 2, 3]
    # three tokens before two
    assert guess(text_of([1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8, 1], [2, 3]), 10) == [4, 5, 6, 9]
    assert guess(text_of([1, 2, 3, 4, 5, 6], [2, 3]), 1) == [4]
    assert guess(text_of([1, 2, 3], [4]), 9) == guess(text_of([1], []), 9) == []
    assert guess(text_of([0, 0, 0, 0], []), 2) == [0]  # zeros within numbers are not tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case", ["llama3-gqa-tied", "mistral-window", "gemma3", "qwen3", "qwen3.5"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_text_stays_the_same(case: str, temperature: float, tmp_path: Path) -> None:
    decoder, asked = (
        loaded(case, tmp_path),
        Sampling(max_new_tokens=30, temperature=temperature, stop_ids=(2,)),
    )
    draft = load_decoder(tmp_path).requires_grad_(False).eval()
    draft.model.layers[0].mlp.up_proj.weight.mul_(0.9)  # agrees often, and not always
    for prompt in (AGAIN, tokens(rows=1, length=9)[0].tolist()):
        plain = list(sample_tokens(decoder, prompt, asked))
        for guess in (
            PromptLookup(5),
            DraftModel(draft, decoder),
            lambda text, most: [5, 7, 9, 11][:most],
        ):
            speculation, past = Speculation(guess), Past(decoder)
            assert (
                list(sample_tokens(decoder, prompt, asked, past, speculation=speculation)) == plain
            )
            held = past.ids[0]
            assert held == [*prompt, *plain][: len(held)] and past.cache.lengths[0] == len(held)
            if (
                isinstance(guess, DraftModel)
                and temperature == 0.0
                and case in ("llama3-gqa-tied", "qwen3")
            ):
                assert speculation.accepted > 0.3 * speculation.guessed > 0


@pytest.mark.parametrize("number", [250, pytest.param(600, marks=pytest.mark.soak)])
def test_drawn_tokens_keep_their_distribution(number: int, tmp_path: Path) -> None:
    """Chi-square of the first guessed place: so many texts against the model's own probabilities."""
    decoder = loaded("qwen3", tmp_path)
    draft = load_decoder(tmp_path).requires_grad_(False).eval()
    draft.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    asked = Sampling(max_new_tokens=2, temperature=1.0, top_k=6)
    speculation = Speculation(DraftModel(draft, decoder))
    drawn = Counter[int]()
    past = Past(decoder)
    pasts = Past(decoder)
    with torch.no_grad():
        first = next_distribution(decoder(torch.tensor([AGAIN])).head[0, -1], asked)
        second = sum(
            share * next_distribution(decoder(torch.tensor([[*AGAIN, token]])).head[0, -1], asked)
            for token, share in enumerate(first.tolist())
            if share
        )
    for seed in range(number):
        sampling = Sampling(max_new_tokens=2, temperature=1.0, top_k=6, seed=seed)
        both = list(sample_tokens(decoder, AGAIN, sampling, past, speculation=speculation))
        assert seed % 100 or both == list(sample_tokens(decoder, AGAIN, sampling, pasts))
        drawn[both[1]] += 1
    assert isinstance(second, torch.Tensor)
    common = [token for token, share in enumerate(second.tolist()) if share * number >= 5]
    rest = number - sum(drawn[token] for token in common), 1 - float(second[common].sum())
    pairs = [(drawn[token], float(second[token])) for token in common] + (
        [rest] if rest[1] * number >= 1 else []
    )
    statistic = sum((seen - number * share) ** 2 / (number * share) for seen, share in pairs)
    freedom = len(pairs) - 1
    # about one in 10,000 seeds fails by chance
    assert freedom >= 4 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    decoder = loaded("qwen3", tmp_path)
    other = Decoder(decoder.config.__class__(**{**decoder.config.__dict__, "vocab_size": 140}))
    with pytest.raises(UserError, match="140 tokens"):
        DraftModel(other, decoder)


def test_a_state_takes_no_guesses(tmp_path: Path) -> None:
    """A token that was guessed wrong could not be taken out of it again."""
    decoder = loaded("qwen3.5", tmp_path)
    assert Past(decoder, capacity=64).max_guesses(1) == 0
    with pytest.raises(UserError, match="layers with a delta net cannot forget") as refused:
        speculation_of(decoder, None, lookup=4, draft=None)
    assert refused.value.where == "--prompt-lookup"


def test_a_text_with_another_end_is_read_again_from_its_start(tmp_path: Path) -> None:
    """A state goes on with what it has read, and cannot go back to a part of it."""
    decoder = loaded("qwen3.5", tmp_path)
    past = Past(decoder)
    first = tokens(rows=1, length=20)[0].tolist()
    for ids, num_read in ((first, 20), ([*first, 7, 8, 9], 3), ([*first[:12], 5, 4], 14)):
        rest = past.reuse(ids, 64)
        assert len(rest) == num_read
        with torch.no_grad():
            expected = decoder(torch.tensor([ids])).head[:, -1]
        torch.testing.assert_close(past.read([rest]), expected, atol=2e-4, rtol=0)
