"""Grammars that keep a text to JSON of a schema, or to a grammar in llguidance's own form."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.grammar_trials import GrammarTrials, unsupported_schema


@final
class JsonGrammars:
    """Grammars over a tokenizer's vocabulary. `ends`: tokens that end a text; `vocab_size`: of the logits.

    `close` ends the child process in which they are tried.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """Raises UserError without an end token, or for a SentencePiece tokenizer."""
        from llguidance import LLTokenizer

        content = tokenizer.json
        if content is None or not ends:
            problem = "JSON output needs a tokenizer.json and an end-of-text token"
            raise UserError(problem, where="the tokenizer", fix="use a model with both")
        self.vocab_size = vocab_size
        self._tokens = LLTokenizer(content, n_vocab=vocab_size, eos_token=list(ends))
        self._trials = GrammarTrials(content, vocab_size, ends)

    def close(self) -> None:
        self._trials.close()

    def start(self, schema: dict[str, Any]) -> "JsonText":
        """For one text. Raises UserError for a schema that is not valid or not supported."""
        from llguidance import LLMatcher

        # Free white space is where small models never end.
        form: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=form)
        except ValueError as error:  # half a character
            raise unsupported_schema(str(error)) from error
        return self.follow(grammar)

    def follow(self, grammar: str) -> "JsonText":
        """For one text of a grammar in llguidance's own form. Raises UserError for one that is not valid."""
        from llguidance import LLMatcher

        self._trials.refuse_too_complex(grammar)
        try:
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some schemas fail at the first token
            reason = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            reason = str(error)
        if reason:
            raise unsupported_schema(reason)
        return JsonText(matcher, self.vocab_size)


class GrammarFailed(UserError):
    """The grammar of one text cannot be satisfied, which only shows while the text is written."""


@final
class JsonText:
    """How far a text has come in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "JsonText":
        """For another text: compiling a grammar takes longer."""
        return JsonText(self._matcher.deep_copy(), self._vocab_size)

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [V], -inf of tokens that the grammar excludes. Raises UserError where the library gives up."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            problem = f"the grammar failed: {self._matcher.get_error().splitlines()[0][:200]}"
            raise GrammarFailed(problem, where="the JSON schema", fix="simplify the schema")
        # In numpy: torch would wake its threads, which costs far more than the work on a busy machine.
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(bool)
        return torch.from_numpy(np.where(allowed, logits.numpy(), np.float32("-inf")))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
