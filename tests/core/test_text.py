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
