"""Drawing tokens: the cache changes nothing, greedy equals transformers, filters equal their definitions."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import saved_reference, tokens
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.infer.decode import RunningBatch, sample_tokens
from bloomery.infer.past import Past
from bloomery.infer.sampling import NotFinite, Sampling, next_distribution, penalized
from bloomery.model.cache import Cache
from bloomery.model.io.weights import load_decoder

SHAPES = [
    "llama3-gqa-tied",
    "gpt2",
    "mistral-window",
    "gemma2",
    "gemma3",
    "qwen2.5-window-tied",
    "smollm3-window",
    "olmo2",
    "phi4-partial",
    "llama-yarn",
]
GREEDY = Sampling(max_new_tokens=25, temperature=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("pieces", [(40,), (10, 1, 1, 1, 12, 15), (1,) * 40])
@torch.no_grad()
def test_the_cache_changes_nothing(case: str, pieces: tuple[int, ...], tmp_path: Path) -> None:
    saved_reference(case, tmp_path)
    decoder, row = load_decoder(tmp_path, dtype=torch.float64), tokens()
    cache = Cache(decoder.config, capacity=40, slots=2)
    cache.rows = range(2)
    parts = [decoder(part, cache=cache).head for part in row.split(pieces, dim=1)]
    assert cache.length == 40
    assert_close(torch.cat(parts, 1), decoder(row).head, atol=1e-9, rtol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers(case: str, penalty: float, tmp_path: Path) -> None:
    theirs, row = saved_reference(case, tmp_path), tokens(rows=1, length=12)
    asked = transformers.GenerationConfig(
        max_new_tokens=25,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.no_grad():
        expected = theirs.generate(row, generation_config=asked)[0, 12:].tolist()
    sampling = Sampling(
        max_new_tokens=25, temperature=0.0, repetition_penalty=penalty, stop_ids=(2,)
    )
    ours = list(sample_tokens(load_decoder(tmp_path), row[0].tolist(), sampling))
    assert ours == [token for token in expected if token != 2]


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(temperature=0.7), transformers.TemperatureLogitsWarper(0.7)),
        (Sampling(temperature=1.0, top_k=5), transformers.TopKLogitsWarper(5)),
        (Sampling(temperature=1.0, top_k=500), transformers.TopKLogitsWarper(500)),
        (Sampling(temperature=1.0, top_p=0.8), transformers.TopPLogitsWarper(0.8)),
        (Sampling(temperature=1.0, top_p=1e-6), transformers.TopPLogitsWarper(1e-6)),
        (Sampling(temperature=1.0, min_p=0.1), transformers.MinPLogitsWarper(0.1)),
    ],
)
def test_filters_equal_those_of_transformers(
    sampling: Sampling, warper: transformers.LogitsProcessor
) -> None:
    for seed in range(5):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 3
        expected = warper(torch.empty(1, 0, dtype=torch.long), logits[None].clone())[0].softmax(-1)
        assert_close(next_distribution(logits, sampling), expected, atol=1e-6, rtol=1e-5)


def test_filters_together_in_the_stated_order() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(9)) * 3
    expected = logits[None].clone()
    for warper in (
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.02),
    ):
        expected = warper(torch.empty(1, 0, dtype=torch.long), expected)
    ours = next_distribution(logits, Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02))
    assert_close(ours, expected[0].softmax(-1), atol=1e-6, rtol=1e-5)


def test_a_seed_is_a_text(tmp_path: Path) -> None:
    saved_reference("gpt2", tmp_path)
    decoder = load_decoder(tmp_path)

    def drawn(seed: int) -> list[int]:
        torch.manual_seed(torch.seed())
        return list(
            sample_tokens(decoder, [1, 5], Sampling(max_new_tokens=20, temperature=1.5, seed=seed))
        )

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(4)}) == 4


def test_drawing_leaves_the_global_random_stream_and_the_gradients_alone(tmp_path: Path) -> None:
    saved_reference("gpt2", tmp_path)
    decoder, before = load_decoder(tmp_path), torch.get_rng_state()
    list(sample_tokens(decoder, [1, 5], Sampling(max_new_tokens=5)))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_the_text_ends_with_the_models_positions(tmp_path: Path) -> None:
    saved_reference("gpt2", tmp_path)
    decoder = load_decoder(tmp_path)
    assert len(list(sample_tokens(decoder, [1] * 60, GREEDY))) == 4
    assert list(sample_tokens(decoder, [1] * 64, GREEDY)) == []


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(tmp_path: Path) -> None:
    saved_reference("gpt2", tmp_path)
    decoder = load_decoder(tmp_path)
    whole = list(sample_tokens(decoder, [1, 7], GREEDY))
    stop = whole[5]
    cut = list(
        sample_tokens(
            decoder, [1, 7], Sampling(max_new_tokens=25, temperature=0.0, stop_ids=(stop,))
        )
    )
    assert cut == whole[: whole.index(stop)]


BATCHED = [*SHAPES, "phi3-longrope", "llama-dynamic"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", BATCHED)
def test_texts_that_share_a_batch_are_those_of_one_alone(case: str, tmp_path: Path) -> None:
    """They come and go, their prompts are read in pieces, and slots keep the tokens of texts that ended."""
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path, dtype=torch.float64)
    sizes = (3, min(30, decoder.config.max_positions), 12, 3, 22, 1, 9)
    prompts = [row[:size].tolist() for row, size in zip(tokens(rows=7), sizes, strict=True)]
    prompts[3] = [*prompts[0], 9]
    lengths = (9, 3, 25, 4, 12, 30, 1)
    heats = (0.0, 0.9, 0.0, 0.9, 0.0, 0.9, 0.0)
    settings = [
        Sampling(max_new_tokens=n, temperature=t, seed=n)
        for n, t in zip(lengths, heats, strict=True)
    ]
    alone = [list(sample_tokens(decoder, *pair)) for pair in zip(prompts, settings, strict=True)]
    batch, left, texts = (
        RunningBatch(Past(decoder, 3, 60), piece=10),
        list(zip(prompts, settings, strict=True)),
        [],
    )
    while batch.texts or left:
        while left and not batch.full:
            texts.append(batch.add(*left.pop(0)))
        batch.step()
    assert [text.new for text in texts] == alone


def test_the_numbers_of_a_text_that_is_not_finite_reach_no_other(tmp_path: Path) -> None:
    saved_reference("llama2", tmp_path)
    decoder = load_decoder(tmp_path)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[7] = float("nan")
    batch, cold = RunningBatch(Past(decoder, 2, 60)), Sampling(max_new_tokens=20, temperature=0.0)
    good, bad = batch.add([1, 5, 9], cold), batch.add([1, 7, 9, 20, 5, 30, 41], cold)
    ended = {}
    while batch.texts:
        ended |= {drawn.text: drawn.ended for drawn in batch.step() if drawn.ended is not None}
    assert isinstance(ended[bad], NotFinite) and ended[good] == "length"
    second = [batch.add([1, 5, 9], cold), batch.add([1, 5], cold)]
    while batch.texts:
        batch.step()
    assert second[0].new == good.new == list(sample_tokens(decoder, [1, 5, 9], cold))
    assert second[1].new == list(sample_tokens(decoder, [1, 5], cold))


@pytest.mark.parametrize(
    "controls",
    [
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 18},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    ],
)
def test_controls_of_length_and_repetition_equal_those_of_transformers(
    controls: dict, tmp_path: Path
) -> None:
    theirs, row = saved_reference("llama2", tmp_path), tokens(rows=1, length=12)
    free = list(sample_tokens(load_decoder(tmp_path), row[0].tolist(), GREEDY))
    end = free[3]  # an end that comes early
    asked = transformers.GenerationConfig(
        max_new_tokens=25, do_sample=False, eos_token_id=end, pad_token_id=0, **controls
    )
    with torch.no_grad():
        expected = theirs.generate(row, generation_config=asked)[0, 12:].tolist()
    sampling = Sampling(max_new_tokens=25, temperature=0.0, stop_ids=(end,), **controls)
    ours = list(sample_tokens(load_decoder(tmp_path), row[0].tolist(), sampling))
    assert ours == [token for token in expected if token != end]
    assert ours != free


def test_penalties_of_what_was_said_are_those_that_openai_documents() -> None:
    logits, sampling = torch.zeros(6), Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    penalties = penalized(logits, [5, 5], [1, 1, 3], sampling)
    assert penalties.tolist() == [0.0, -1.25, 0.0, -0.75, 0.0, 0.0]


def test_log_probabilities_are_those_of_the_model_before_any_filter(tmp_path: Path) -> None:
    saved_reference("llama2", tmp_path)
    decoder = load_decoder(tmp_path)
    batch = RunningBatch(Past(decoder))
    text = batch.add([1, 5, 9], Sampling(max_new_tokens=6, temperature=0.5, top_k=3), logprobs=4)
    drawn = [each for _ in range(6) for each in batch.step()]
    with torch.no_grad():
        expected = decoder(torch.tensor([[1, 5, 9, *text.new]])).head[0, 2:-1].log_softmax(-1)
    assert_close(
        torch.tensor([each.logprob for each in drawn]),
        expected[range(6), text.new],
        atol=1e-5,
        rtol=0,
    )
    assert [[token for token, _ in each.top] for each in drawn] == expected.topk(4).indices.tolist()


def test_a_nucleus_wider_than_the_likeliest_tokens_is_sorted_whole() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    warped = transformers.TopPLogitsWarper(0.9)(
        torch.empty(1, 0, dtype=torch.long), logits[None].clone()
    )
    expected = warped[0].softmax(-1)
    assert int((expected > 0).sum()) > 1024
    assert_close(
        next_distribution(logits, Sampling(temperature=1.0, top_p=0.9)),
        expected,
        atol=1e-6,
        rtol=1e-5,
    )


def test_bans_that_leave_no_token_of_a_grammar_do_not_count() -> None:
    allowed = torch.full((8,), float("-inf"))
    allowed[3] = 1.0
    sampling = Sampling(temperature=0.0, no_repeat_ngram_size=1, min_new_tokens=5, stop_ids=(3,))
    assert int(penalized(allowed, [3], [3], sampling).argmax()) == 3
    allowed[4] = 0.0
    assert int(penalized(allowed, [3], [3], sampling).argmax()) == 4


def test_a_grammar_that_gives_up_ends_its_text_alone(tmp_path: Path) -> None:
    class GivesUp:
        def masked(self, logits: torch.Tensor) -> torch.Tensor:
            raise UserError(f"no token of {len(logits)}")

        def take(self, token: int) -> None:
            raise AssertionError(token)

    saved_reference("llama3-gqa-tied", tmp_path)
    decoder = load_decoder(tmp_path)
    alone = list(sample_tokens(decoder, [5, 6, 7], GREEDY))
    batch = RunningBatch(Past(decoder, 2, 60))
    good, bad = batch.add([5, 6, 7], GREEDY), batch.add([5, 8], GREEDY, constraint=GivesUp())
    ends = {}
    while batch.texts:
        ends |= {drawn.text: drawn.ended for drawn in batch.step() if drawn.ended is not None}
    assert good.new == alone and isinstance(ends[bad], UserError)
    with pytest.raises(UserError):
        list(sample_tokens(decoder, [5, 8], GREEDY, constraint=GivesUp()))
