"""Grammars are compiled in a child process first: a small JSON schema can need minutes, all memory, or crash.

The library that compiles them cannot be interrupted, and a stack that overflows in it ends the process. A grammar that
the child has compiled within its limits is then compiled by the parent, on a larger stack. No torch.
"""

import hashlib
import os
import resource
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

from bloomery.core.child import Child, Message, accept, reply, requests
from bloomery.core.errors import UserError

MODULE = "bloomery.infer.grammar_trials"
MOST_BYTES = 256 * 1024  # of a grammar
BYTES = "byte"  # in place of a tokenizer: each token is a byte
CPU_SECONDS = 1  # most schemas need a hundredth of it; also of each text
WALL_SECONDS = 3.0  # on a machine that is busy
START_SECONDS = 60.0  # until the child has read a tokenizer of many tokens
MEMORY_BYTES = 2**29
STACK_BYTES = 4 * 2**20  # in the child; the main thread of a process usually has twice as much
TOO_LONG = "it takes too long to compile"
MOST_REMEMBERED = 1024  # grammars that need no second trial


def unsupported_schema(reason: str) -> UserError:
    return UserError(
        f"JSON schema not supported: {reason.splitlines()[0][:200]}",
        where="the JSON schema",
        fix="simplify it, or see https://json-schema.org/learn",
        code=2,
    )


@final
class GrammarTrials:
    """`ends`: tokens that end a text; `vocab_size`: of the logits. The child starts with the first grammar."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int | None = None, ends: Sequence[int] = ()
    ) -> None:
        self._job = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "ends": list(ends)}
        self._child: Child | None = None
        # Why a grammar is refused, by its digest; "" where it is not.
        self._reasons = dict[bytes, str]()

    def refuse_too_complex(self, grammar: str) -> None:
        """Raises UserError for a grammar that does not compile within the limits; not for one that is wrong."""
        content = grammar.encode(errors="replace")
        if len(content) > MOST_BYTES:
            raise unsupported_schema(f"it is longer than {MOST_BYTES:,} bytes")
        digest = hashlib.sha256(content).digest()
        if digest not in self._reasons:
            reason = self._try(grammar)
            if len(self._reasons) == MOST_REMEMBERED:
                self._reasons.clear()
            self._reasons[digest] = reason
        if self._reasons[digest]:
            raise unsupported_schema(self._reasons[digest])

    def accepted(self, grammar: str, texts: Sequence[str]) -> list[bool]:
        """Whether each text is one of the grammar; the tokenizer is BYTES. Raises UserError for a grammar that is wrong
        or does not compile within the limits.
        """
        self.refuse_too_complex(grammar)
        answer = self._ask(grammar, texts)
        reason = answer if isinstance(answer, str) else answer["error"]
        if reason:
            raise unsupported_schema(reason)
        assert not isinstance(answer, str)
        of_texts: list[bool] = answer["accepted"]
        return of_texts

    def _try(self, grammar: str) -> str:
        """Why the grammar is refused; "" where it is not. Raises UserError if the machine may be too busy for it."""
        answer = self._ask(grammar, ())
        return answer if isinstance(answer, str) else ""

    def _ask(self, grammar: str, texts: Sequence[str]) -> Message | str:
        """The child's answer, or why the grammar is too complex. Raises UserError if the machine may be too busy."""
        child = self._child or self._start()
        message = {"grammar": grammar, "texts": list(texts)}
        answer = child.ask(message, seconds=WALL_SECONDS * (1 + len(texts)))
        if not isinstance(answer, str):
            return answer
        out_of_time = answer == "ended" and child.code == -signal.SIGPROF
        self.close()
        if answer == "silent":
            raise unsupported_schema(TOO_LONG)
        return TOO_LONG if out_of_time else "it is too complex to compile"

    def _start(self) -> Child:
        child = self._child = Child(MODULE, self._job, environment=os.environ).start()
        answer = child.next(START_SECONDS)
        if isinstance(answer, str):
            reason = child.ending() if answer == "ended" else "it does not start"
            self.close()
            raise unsupported_schema(f"the process that compiles grammars failed: {reason}")
        return child

    def close(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            child.close()


def _serve() -> None:
    """In the child: answers each grammar once it is compiled."""
    job = accept()
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer(job["tokenizer"], n_vocab=job["vocab_size"], eos_token=job["ends"] or None)
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # elsewhere the limit would have no effect
        used_bytes = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reply(job, {"ready": True})
    for request in requests(job):
        answer: Message = {"compiled": True, "error": "", "accepted": []}
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends this process
        try:
            matcher = LLMatcher(tokens, request["grammar"], log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                answer["error"] = matcher.get_error()
        except ValueError as error:
            answer["error"] = str(error)
        for text in () if answer["error"] else request["texts"]:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            content = list(text.encode(errors="replace"))
            matcher.reset()
            is_whole = matcher.try_consume_tokens(content) == len(content)
            answer["accepted"].append(is_whole and matcher.is_accepting())
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(job, answer)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()
