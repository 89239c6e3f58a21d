"""The words of texts that tests write: few, so that a tokenizer of 300 tokens learns them."""

SMALL_WORDS = "the a cat dog sat ran on under mat tree and then it was seen".split()
