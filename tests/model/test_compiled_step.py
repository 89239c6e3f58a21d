"""The compiled step computes what the decoder computes in PyTorch, and each text as if it were alone, to the bit."""

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from benchmarks.memory_tracker import peak_bytes
from tiny_models import CASES, saved_reference, tokens
from torch import Tensor
from torch.testing import assert_close

from bloomery.facts.config import Experts, LayerSizes, ModelConfig
from bloomery.infer.decode import RunningBatch, sample_tokens
from bloomery.infer.past import Past
from bloomery.infer.sampling import NotFinite, Sampling
from bloomery.model import compiled_step
from bloomery.model.adapters.lora import adapt, init_adapters
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import COMPUTED_FACTS, CompiledStep, compile_step, use_tiles
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, load_decoder, quantize_model
from bloomery.model.native import Uncompiled, library
from bloomery.parallel.streamed import StreamedWeights
from bloomery.recipe.schema import Lora, Quantize

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
SHAPES = [
    "llama3-gqa-tied",
    "llama-biases-head-dim",
    "gpt2",
    "gpt2-erf-wide",
    "mistral-window",
    "gemma2",
    "gemma3",
    "qwen2",
    "qwen3",
    "smollm3-window",
    "olmo2",
    "phi4-partial",
    "llama-yarn",
    "olmo3",
    "ministral3",
    "hunyuan",
    "cohere2",
    "glm4",
    "nemotron",
    "granite",
    "qwen3.5",
    "lfm2",
    "lfm2-bias",
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "gpt-oss",
    "granite-moe",
    "glm4-moe",
    "dots1",
    "qwen2-moe",
    "qwen3.5-moe",
    "lfm2-moe",
    "ernie4.5-moe",
]
MIXTURE = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    initializer_range=0.2,
)
# Matrices of 16 rows, of a few more than whole tiles, and of fewer than one.
UNEVEN = replace(
    MIXTURE,
    vocab_size=1009,
    hidden_size=192,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    experts=Experts(count=11, per_token=2, width=64, shared_width=64, shared_gate=True),
)
MIXTURES = [
    Experts(count=8, per_token=3, width=64, scores="sigmoid", choice_bias=True),
    Experts(
        count=8,
        per_token=3,
        width=64,
        scores="sigmoid",
        choice_bias=True,
        normalize=True,
        groups=4,
        groups_per_token=2,
        best_of_group=2,
        least_sum=1e-2,
        weight_scale=2.5,
    ),
    Experts(count=8, per_token=2, width=64, groups=4, groups_per_token=1, normalize=True),
    Experts(count=5, per_token=5, width=128, shared_width=64, shared_gate=True),
    Experts(count=5, per_token=1, width=64, shared_width=128, layers=(True, False)),
    Experts(count=6, per_token=2, width=64, bias=True, clamp=0.5, softmax_of_chosen=True),
    Experts(count=6, per_token=2, width=64, normalize=True, clamps_sum=True, least_sum=0.9),
]
ACTIVATION = ("relu2", "silu", "silu", "silu", "silu", "silu", "gelu")
COLD = Sampling(max_new_tokens=12, temperature=0.0)


@pytest.fixture(params=["AMX", "vectors"])
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    """What multiplies bfloat16 matrices; every machine has vectors."""
    wants_tiles = request.param == "AMX"
    if use_tiles(wanted=wants_tiles) != wants_tiles:
        pytest.skip("this CPU has no AMX, or the system does not let a process use it")
    yield request.param
    use_tiles(wanted=True)


def load_wide(
    case: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float32,
    **sizes_of_case: int,
) -> Decoder:
    """The tiny model of that shape, in the widths that the compiled code takes."""
    prefix, settings = CASES[case]
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    sizes = dict(n_embd=64, n_inner=128) if prefix == "GPT2" else sizes
    if "linear_key_head_dim" in settings or prefix == "Qwen3_5":
        sizes |= dict(linear_key_head_dim=16, linear_value_head_dim=48)
    if prefix.startswith("Lfm2"):
        sizes |= dict(block_auto_adjust_ff_dim=False)
    if "moe_intermediate_size" in settings:
        sizes |= dict(moe_intermediate_size=64)
    if "shared_expert_intermediate_size" in settings:
        sizes |= dict(shared_expert_intermediate_size=64)
    if prefix == "Dots1":
        sizes |= dict(sliding_window=8)  # a step appends no tokens that push each other out
    monkeypatch.setitem(CASES, case, (prefix, settings | sizes | sizes_of_case))
    saved_reference(case, folder)
    return load_decoder(folder, dtype=dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("case", SHAPES)
@torch.no_grad()
def test_logits_equal_those_of_the_decoder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_wide(case, tmp_path, monkeypatch)
    row = tokens(rows=1)[0].tolist()
    expected = decoder(torch.tensor([row])).head[0]
    step = CompiledStep(decoder)
    cache = Cache(decoder.config, capacity=40, slots=2)
    assert_close(
        torch.cat([step([[token]], 1, cache) for token in row]), expected, atol=2e-4, rtol=1e-4
    )
    cache_of_pytorch = Cache(decoder.config, capacity=40)
    decoder(torch.tensor([row[:5]]), cache=cache_of_pytorch)  # the step continues this text
    assert_close(
        step([row[5:8]], 0, cache_of_pytorch, every=True), expected[5:8], atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *(("qwen3", precision) for precision in ("float32", "bfloat16", "int8")),
        ("qwen3.5", "bfloat16"),
        ("lfm2-bias", "bfloat16"),
        *(("qwen3-moe", precision) for precision in ("float32", "bfloat16", "int8")),
    ],
)
def test_a_text_has_the_same_bits_alone_with_others_and_in_pieces(
    case: str, precision: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del products
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    # Keys that are rounded would now and then choose another expert: a token meets all of them.
    met = {"num_experts_per_tok": 8} if (case, precision) == ("qwen3-moe", "bfloat16") else {}
    decoder = load_wide(case, tmp_path, monkeypatch, dtype, **met)
    rows = tokens(rows=9, length=20).tolist()
    if precision == "int8":
        quantize_model(decoder, Quantize(kind="int8"))
    step = CompiledStep(decoder)
    separate_logits = []
    for row in rows:
        cache = Cache(decoder.config, 20)
        separate_logits.append(torch.cat([step([[token]], 0, cache) for token in row]))
    shared_cache = Cache(decoder.config, 20, slots=9)
    cache_of_pieces = Cache(decoder.config, 20, slots=9)
    for position in range(20):
        shared_logits = step([[row[position]] for row in rows], 0, shared_cache)
        assert torch.equal(
            shared_logits, torch.stack([logits[position] for logits in separate_logits])
        )
    for first, last in ((0, 1), (1, 8), (8, 20)):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            piece_logits = step([rows[3][first:last]], threads, cache_of_pieces, every=True)
            assert torch.equal(piece_logits, separate_logits[3][first:last])
    torch.set_num_threads(1)
    # The step rounds what it caches; its products are float32, as those of the same weights widened.
    tolerance = {"float32": 1e-4, "bfloat16": 0.3, "int8": 0.5}[precision]
    with torch.no_grad():
        exact_logits = decoder.float()(torch.tensor(rows[:1])).head[0]
        assert_close(separate_logits[0], exact_logits, atol=tolerance, rtol=0.02)


@torch.no_grad()
def test_any_number_of_texts_and_threads_gives_the_same_bits(products: str) -> None:
    """Texts fill none, one and several tiles of 16 columns; rows of matrices do not fill theirs, or are fewer."""
    del products
    decoder = fresh_decoder(UNEVEN, seed=2, dtype=torch.bfloat16).eval()
    step = CompiledStep(decoder)
    ids = [7 * place % 61 for place in range(131)]
    separate_logits = torch.cat([step([[token]], 0, Cache(UNEVEN, 8)) for token in ids])
    for num_texts in (2, 5, 15, 16, 17, 32, 33, 49, 64, 65, 131):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = step(
                [[token] for token in ids[:num_texts]], 0, Cache(UNEVEN, 8, slots=num_texts)
            )
            assert torch.equal(together, separate_logits[:num_texts])
    torch.set_num_threads(1)


@torch.no_grad()
def test_tiles_multiply_numbers_that_are_not_rounded_to_bfloat16() -> None:
    """Oracle: vectors, whose products are float32. Weights are read where they are: no copy of them is made."""
    if not use_tiles(wanted=True):
        pytest.skip("this CPU has no AMX, or the system does not let a process use it")
    decoder = fresh_decoder(UNEVEN, seed=2, dtype=torch.bfloat16).eval()
    first_step = CompiledStep(decoder)
    weight_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    ids = [[token] for token in range(20)]
    logits: list[Tensor] = []
    assert (
        peak_bytes(lambda: logits.append(CompiledStep(decoder)(ids, 0, Cache(UNEVEN, 2, slots=20))))
        < weight_bytes / 2
    )
    use_tiles(wanted=False)
    try:
        expected = first_step(ids, 0, Cache(UNEVEN, 2, slots=20))
    finally:
        use_tiles(wanted=True)
    # A key that is kept a step of bfloat16 away moves a few logits by 1e-4; rounded inputs move all by 1e-3.
    differences = (logits[0] - expected).abs()
    assert 0 < differences.mean() < 1e-5 and differences.max() < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("number", range(7))
def test_every_kind_of_router_and_experts_gives_the_logits_of_the_decoder(number: int) -> None:
    experts = MIXTURES[number]
    config = replace(MIXTURE, experts=experts, gated_mlp=number != 0, activation=ACTIVATION[number])
    decoder = fresh_decoder(config, seed=1).eval()
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    rows = (torch.arange(48).view(2, 24) * 7 % 61).tolist()
    expected = decoder(torch.tensor(rows)).head
    step = CompiledStep(decoder)
    cache = Cache(config, capacity=24, slots=2)
    for at in range(0, 24, 4):
        logits = step([row[at : at + 4] for row in rows], 0, cache, every=True)
        assert_close(logits.view(2, 4, -1), expected[:, at : at + 4], atol=2e-4, rtol=1e-4)


def test_no_fact_of_experts_is_unknown_to_the_step() -> None:
    """A new one must be computed by `step.cpp`, or refused there."""
    refused = {"normed_router", "own_norms"}
    known = set(COMPUTED_FACTS) | refused | {"layers", "balance", "float32_router"}
    assert {field.name for field in fields(Experts)} == known


@torch.no_grad()
def test_layers_of_several_sizes_and_windows_give_the_logits_of_the_decoder() -> None:
    sizes = [
        LayerSizes(num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128),
        LayerSizes(
            num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=64, rotary_share=0.5
        ),
        LayerSizes(num_heads=8, num_kv_heads=2, head_dim=16, intermediate_size=192),
    ]
    config = ModelConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.2,
        layer_sizes=tuple(sizes),
        sliding_window=(None, 8, None),
    )
    decoder = fresh_decoder(config, seed=1).eval()
    row = torch.arange(24)[None] * 7 % 61
    step = CompiledStep(decoder)
    cache = Cache(config, capacity=24)
    logits = torch.cat([step([[token]], 0, cache) for token in row[0].tolist()])
    assert_close(logits, decoder(row).head[0], atol=2e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3.5", "lfm2"])
def test_a_state_goes_from_one_way_of_computing_to_the_other_and_begins_anew(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long pieces of a text are PyTorch's, and a slot serves one text after another."""
    decoder = load_wide(case, tmp_path, monkeypatch)
    first, second = torch.randint(
        3, 131, (2, 40), generator=torch.Generator().manual_seed(4)
    ).tolist()
    expected = decoder(torch.tensor([first])).head[0]
    decoder.step = CompiledStep(decoder)
    past = Past(decoder, 2, 60)
    assert past.max_guesses(1) == 0, "a state has no token to take out"
    pieces = (first[:3], first[3:36], first[36:38], first[38:])  # 33 tokens are more than a step
    for end, ids in zip((3, 36, 38, 40), pieces, strict=True):
        assert_close(past.read([ids], 1)[0], expected[end - 1], atol=2e-4, rtol=1e-4)
    assert past.reuse(second, 40, slot=1) == second
    logits = torch.cat([past.read([second[at : at + 20]], 1) for at in (0, 20)])
    assert_close(logits, decoder(torch.tensor([second])).head[0, [19, 39]], atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_logits_with_adapters_equal_those_of_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_wide("llama3-gqa-tied", tmp_path, monkeypatch)
    row = tokens(rows=1)[0].tolist()
    adapt(decoder, Lora(kind="lora", rank=3, target_modules=["all-linear"]))
    init_adapters(decoder, 0)
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    step = CompiledStep(decoder)
    cache = Cache(decoder.config, 40)
    logits = torch.cat([step([row[at : at + 20]], 0, cache, every=True) for at in (0, 20)])
    assert_close(logits, decoder(torch.tensor([row])).head[0], atol=2e-4, rtol=1e-4)


def test_weights_are_moved_once_and_updates_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_wide("qwen2", tmp_path, monkeypatch)
    adapt(decoder, Lora(kind="lora", rank=8, target_modules=["q_proj"]))
    init_adapters(decoder, seed=0)
    CompiledStep(decoder)
    addresses = [tensor.data_ptr() for tensor in decoder.parameters()]
    with torch.no_grad():
        for parameter in decoder.parameters():  # as an optimizer does, in place
            parameter += 0.01
    weight_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    steps = list[CompiledStep]()
    assert peak_bytes(lambda: steps.append(CompiledStep(decoder))) < weight_bytes / 2
    assert [tensor.data_ptr() for tensor in decoder.parameters()] == addresses
    row = tokens(rows=1)[0].tolist()
    expected = decoder(torch.tensor([row])).head[0, -1]
    logits = steps[0]([row], 0, Cache(decoder.config, capacity=40, slots=2))
    assert_close(logits[0], expected, atol=1e-4, rtol=0)


def test_batches_decode_with_the_compiled_step_to_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_wide("qwen2", tmp_path, monkeypatch)
    prompts = tokens(rows=6, length=7).tolist()
    expected = [list(sample_tokens(decoder, ids, COLD)) for ids in prompts]
    monkeypatch.setattr(compiled_step, "LEAST", 0)
    lines: list[str] = []
    compile_step(decoder, lines.append)
    assert lines == ["decoding: compiled for this CPU"]
    batch = RunningBatch(Past(decoder, 7, 100), piece=3)
    texts = [batch.add(ids, COLD) for ids in (*prompts, [*prompts[0], *prompts[1]] * 3)]
    first_results = batch.step()
    # 28 of at most 32 tokens; the long prompt waits
    assert [result.text for result in first_results] == texts[:4]
    assert [result.text for result in batch.step()] == texts[:6]
    while batch.texts:
        batch.step()
    assert len(texts.pop().new) == COLD.max_new_tokens
    assert [text.new for text in texts] == expected
    decoder.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(NotFinite):
        list(sample_tokens(decoder, prompts[0], COLD))


def test_a_model_that_the_step_cannot_compute_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Uncompiled, match="depend"):
        CompiledStep(load_wide("llama-dynamic", tmp_path / "dynamic", monkeypatch))
    decoder = load_wide("qwen2", tmp_path, monkeypatch)
    quantize_model(decoder, Quantize(kind="nf4"))
    with pytest.raises(Uncompiled, match="stored"):
        CompiledStep(decoder)
    decoder = load_wide("qwen3-moe", tmp_path / "mixture", monkeypatch)
    adapt(decoder, Lora(kind="lora", rank=8, target_modules=["all-linear"]))
    with pytest.raises(Uncompiled, match=r"experts\.lora"):
        CompiledStep(decoder)
    for fact in ("normed_router", "own_norms"):
        experts = replace(MIXTURES[-1], **{fact: True})
        placed = replace(MIXTURE, experts=experts, norm_placement="both")
        with pytest.raises(Uncompiled, match="norms"):
            CompiledStep(fresh_decoder(placed, seed=0))
    # It would move weights out of the memory that they stream from.
    with torch.device("meta"):
        streamed = Decoder(decoder.config)
    streamed.weight_stream = StreamedWeights(streamed, torch.device("cpu"))
    streamed.weight_stream.allocate()
    with pytest.raises(Uncompiled, match="stream"):
        CompiledStep(streamed)
    monkeypatch.setattr(compiled_step, "LEAST", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled_step._code.cache_clear()
    library.cache_clear()
    decoder = load_wide("qwen3", tmp_path, monkeypatch)
    lines: list[str] = []
    compile_step(decoder, lines.append)
    assert decoder.step is None and "C++ compiler" in lines[0]
    compiled_step._code.cache_clear()
    library.cache_clear()
