"""Texts of a decoder whose attention is Triton's, in Triton's interpreter: test_decoding_triton.py runs it.

Oracle: SDPA, and math attention with soft-capping. Texts of several lengths share a cache and join at different times.
Prints how often the kernel ran for texts of one length and of several.
"""

import json

import torch

from bloomery.facts.config import ModelConfig
from bloomery.infer.decode import RunningBatch
from bloomery.infer.decoding_kernel import decoding_problem
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling
from bloomery.model.attention import attend
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder

PROMPTS = ([5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6])
calls = {"one": 0, "several": 0}
launch = attend.triton_decode


def count_and_launch(q, k, v, num_keys, *options):
    calls["one" if num_keys is None else "several"] += 1
    return launch(q, k, v, num_keys, *options)


def decoder_of(attention: str | None = None, **changes) -> Decoder:
    facts = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
    return fresh_decoder(ModelConfig(**facts | changes), seed=1, attention=attention).eval()


def texts(decoder: Decoder) -> list[list[int]]:
    """As `bloomery serve` decodes them: together, each in a slot."""
    batch = RunningBatch(Past(decoder, slots=3, capacity=30))
    added_texts = [batch.add(PROMPTS[0], Sampling(max_new_tokens=9, temperature=0.0))]
    for _ in range(3):
        batch.step()
    for prompt in PROMPTS[1:]:
        added_texts.append(batch.add(prompt, Sampling(max_new_tokens=7, temperature=0.0)))
    while batch.texts:
        batch.step()
    return [text.new for text in added_texts]


torch.set_num_threads(1)
attend.triton_decode = count_and_launch
for changes in ({}, {"sliding_window": (4, None), "attention_softcap": 5.0}):
    calls_before = dict(calls)
    expected = texts(decoder_of(**changes))
    assert calls == calls_before
    assert texts(decoder_of("triton", **changes)) == expected, changes
    assert all(calls[kind] > calls_before[kind] for kind in calls), calls

    # A model that is loaded to decode: its sequences keep SDPA, and the kernel is compared before it is used.
    loaded_decoder = decoder_of(**changes)
    assert decoding_problem(loaded_decoder) is None
    calls_before = dict(calls)
    assert texts(loaded_decoder) == expected, changes
    assert all(calls[kind] > calls_before[kind] for kind in calls), calls
    assert loaded_decoder.model.backend == decoder_of(**changes).model.backend


def raise_kernel_failed(*_):
    raise KernelFailed("the Triton kernel decode failed: PermissionError")


# A kernel that fails, or is wrong for texts of several lengths alone: SDPA decodes.
calls_before = dict(calls)
for broken_kernel, problem in (
    (raise_kernel_failed, "PermissionError"),
    (lambda q, k, v, num_keys, *options: launch(q, k, v, None, *options), "differ from SDPA's by"),
):
    attend.triton_decode = broken_kernel
    loaded_decoder = decoder_of()
    assert problem in decoding_problem(loaded_decoder)
    attend.triton_decode = count_and_launch
    assert texts(loaded_decoder) == texts(decoder_of())
    assert calls == calls_before
print(json.dumps(calls))
