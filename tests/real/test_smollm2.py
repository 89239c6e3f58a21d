"""A real model of 135 M parameters: logits as in transformers, and steps that take the memory that was planned."""

import pytest
import torch

from bloomery.bench.measuring import Bench
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.gguf import export_gguf
from bloomery.export.gguf_import import import_gguf
from bloomery.hardware.detect import detect
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import load_decoder, model_state

PARTS = {
    "full": "",
    "lora": "adapter: {kind: lora, rank: 16, alpha: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}",
    "qlora": "adapter: {kind: lora, rank: 16, alpha: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}\n"
    "quantize: {kind: nf4, double_quant: true}",
    "dpo": "adapter: {kind: lora, rank: 16, alpha: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}",
}
WITHIN = 0.10


def test_logits_match_transformers(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.model.io.weights import load_decoder

    text = "Bloomery: a furnace once used widely for smelting iron.\n\tdef f(x): return 12345 + x"
    ids = load_tokenizer(smollm2 / "model").encode(text)
    assert (
        ids
        == AutoTokenizer.from_pretrained(smollm2 / "model")(text, add_special_tokens=False)[
            "input_ids"
        ]
    )
    theirs = AutoModelForCausalLM.from_pretrained(smollm2 / "model", dtype=torch.float32)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        ours = load_decoder(smollm2 / "model", dtype=torch.float32)(tokens).head
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=2e-4, rtol=0)


@pytest.mark.soak
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("part", PARTS)
def test_planned_and_measured_memory_agree(smollm2, pairs, tmp_path, monkeypatch, part, compiled):
    monkeypatch.chdir(tmp_path)
    kind, data = ("dpo", pairs) if part == "dpo" else ("sft", smollm2 / "train.jsonl")
    (tmp_path / "real.yaml").write_text(
        f"model: {{from: {smollm2 / 'model'}}}\ndata: {{path: {data}, sequence_length: 512}}\n"
        f"objective: {{kind: {kind}}}\n{PARTS[part]}\n"
        "train: {max_steps: 20, tokens_per_step: 2048, micro_batch_size: 4}\n"
    )
    bench = Bench(recipe="real.yaml", overrides=(), machine=detect())
    row = bench.point(f"train.compile={compiled}", on_phase=print)
    assert row.outcome == "ok", row.message
    assert row.peak_gib is not None and row.planned_gib is not None
    assert row.peak_gib == pytest.approx(row.planned_gib, rel=WITHIN)


@pytest.mark.soak  # test_sampling.py compares tiny models, alone and in one batch
def test_greedy_texts_are_those_of_transformers_alone_and_together(smollm2):
    """Of several lengths, in float32, decoded one by one and in one batch."""
    from transformers import AutoModelForCausalLM

    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.infer.decode import RunningBatch, sample_tokens
    from bloomery.infer.past import Past
    from bloomery.infer.sampling import Sampling
    from bloomery.model.io.weights import load_decoder

    tokenizer = load_tokenizer(smollm2 / "model")
    theirs = AutoModelForCausalLM.from_pretrained(smollm2 / "model", dtype=torch.float32)
    ours = load_decoder(smollm2 / "model", dtype=torch.float32)
    prompts = [
        tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):", "Once")
    ]
    cold = Sampling(max_new_tokens=16, temperature=0.0)
    expected = []
    for ids in prompts:
        row = theirs.generate(
            torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        expected.append(row[0, len(ids) :].tolist())
    assert [list(sample_tokens(ours, ids, cold)) for ids in prompts] == expected
    batch = RunningBatch(Past(ours, 3, 64), piece=3)
    texts = [batch.add(ids, cold) for ids in prompts]
    while batch.texts:
        batch.step()
    assert [text.new for text in texts] == expected


@pytest.mark.soak
def test_gguf_comes_back_bitwise_and_quantized_answers_alike(smollm2, tmp_path):
    files = find_model(smollm2 / "model")
    whole = export_gguf(files, tmp_path / "whole.gguf", kind="f32")
    assert any("64 of 64 tokens" in proof for proof in whole.proofs)
    import_gguf(whole.folder, tmp_path / "back", dtype="bfloat16")
    theirs, ours = (
        model_state(load_decoder(folder)) for folder in (smollm2 / "model", tmp_path / "back")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(values, ours[name]) for name, values in theirs.items())
    text = (smollm2 / "test.jsonl").read_text()[:20_000]
    one, other = (
        load_tokenizer(folder).encode(text) for folder in (smollm2 / "model", tmp_path / "back")
    )
    assert one == other
    for kind, most in (("q8_0", 0.02), ("q4_0", 1.0)):
        proofs = export_gguf(files, tmp_path / f"{kind}.gguf", kind=kind).proofs
        found = next(float(proof.split()[3]) for proof in proofs if proof.startswith(kind))
        assert 0 < found < most
