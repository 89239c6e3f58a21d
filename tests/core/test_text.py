"""Pages of 100 columns on narrower terminals."""

import pytest

from bloomery.core.text import fitted

PAGE = """\
Fits. About 3 min.                                                                   nothing was run

model     Qwen2 architecture, 7.62 B parameters, context 2,048, from Qwen/Qwen2.5-7B-Instruct
batch     65,536 tokens = 32 sequences x 2,048 (micro-batch 1, gradient accumulation 32)
          steps unknown until a dataset is here
memory    activations     1.5  ███▎              (limit: the memory that is free now)
settings  float32                 this CPU has no bf16 instructions, and fp16 is 5 to 9 times slower
                                  on any CPU
next      bloomery train qwen2.5-7b-qlora data.path=conversations.jsonl optimizer.learning_rate=1e-4"""
NARROW = """\
Fits. About 3 min.                                               nothing was run

model     Qwen2 architecture, 7.62 B parameters, context 2,048, from
          Qwen/Qwen2.5-7B-Instruct
batch     65,536 tokens = 32 sequences x 2,048 (micro-batch 1, gradient
          accumulation 32)
          steps unknown until a dataset is here
memory    activations     1.5  ███▎              (limit: the memory that is free
                                                 now)
settings  float32                 this CPU has no bf16 instructions, and fp16 is
                                  5 to 9 times slower on any CPU
next      bloomery train qwen2.5-7b-qlora data.path=conversations.jsonl \\
              optimizer.learning_rate=1e-4"""


def test_a_page_is_folded_below_its_columns():
    assert "\n".join(fitted(PAGE.splitlines(), 80)) == NARROW


@pytest.mark.parametrize("width", [100, 1000])
def test_a_page_that_fits_stays(width):
    assert "\n".join(fitted(PAGE.splitlines(), width)) == PAGE


@pytest.mark.parametrize("width", [20, 40, 60])
def test_no_word_is_lost(width):
    folded = " ".join("\n".join(fitted(PAGE.splitlines(), width)).replace("\\\n", "\n").split())
    assert folded == " ".join(PAGE.split())


WRAPPED = """\
GPU       1 x GeForce RTX 4070 · 12 GiB
1  note   no supported GPU: training runs on the CPU, which is enough for models of a few million
          parameters
warnings  the claims contradict each other: 10 B tokens at 5 tokens/s take 63 years, not 5.0 to 7.0
            days
next      bloomery plan llama3.1-8b-lora --gpu all --a-longer-option      which GPUs of the table fit it"""


def test_a_paragraph_that_the_page_wrapped_is_wrapped_once():
    lines = fitted(WRAPPED.splitlines(), 80)
    text = " ".join(" ".join(lines).split())
    assert "for models of a few million parameters" in text and "\\" not in text
    assert not [line for line in lines if line.strip() in ("parameters", "days")]
    assert lines[-1] == " " * 14 + "which GPUs of the table fit it"


def test_a_remark_without_room_gets_a_line_of_its_own():
    headline = (
        f"{'Fits. About 32 h. Trains on 3.19 B tokens, not the claimed 10 B.':<85}nothing was run"
    )
    assert fitted([headline], 80) == [headline[:85].rstrip(), "nothing was run"]
