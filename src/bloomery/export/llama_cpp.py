"""A GGUF file continued by llama.cpp where it is installed, or by the numpy implementation of its graph.

`python -m bloomery.export.llama_cpp` is the child that runs llama-cpp-python: native code may crash.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bloomery.core.child import Child, accept, reply
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer

MODULE = "bloomery.export.llama_cpp"
SECONDS = 120.0  # that llama.cpp may take
PROGRAMS = ("llama-completion", "llama-cli")  # the first one since the second one only chats


@dataclass(frozen=True)
class Continued:
    """`program`: what computed the text. `real`: llama.cpp itself did."""

    program: str
    text: str
    real: bool


def continue_greedily(
    path: Path, prompt: Sequence[int], tokenizer: Tokenizer, *, most: int, ends: Sequence[int] = ()
) -> Continued:
    """The likeliest next tokens of a file, at most `most`, up to one of `ends`: by llama-cpp-python, by a program of
    llama.cpp on the PATH, or else in numpy. Raises UserError where an installed llama.cpp fails.
    """
    if find_spec("llama_cpp") is not None:
        job = {"path": str(path), "prompt": list(prompt), "most": most, "ends": list(ends)}
        with Child(MODULE, job, environment=os.environ) as child:
            answer = child.next(SECONDS)
            if isinstance(answer, str):
                problem = (
                    f"no answer within {SECONDS:.0f} s" if answer == "silent" else child.ending()
                )
                raise UserError(f"llama-cpp-python failed: {problem}", where=str(path), fix=_FIX)
        return Continued(
            f"llama.cpp (llama-cpp-python {answer['version']})",
            tokenizer.decode(answer["ids"]),
            True,
        )
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is not None:
        # llama.cpp puts the BOS token before a text
        given = prompt[1:] if prompt[0] == tokenizer.bos_id else prompt
        text = _printed(program, path, tokenizer.decode(list(given)), most)
        return Continued(f"llama.cpp ({Path(program).name})", text, True)
    from bloomery.export.verify import Graph

    graph = Graph(path)
    ids = list[int]()
    read = list(prompt)
    while len(ids) < most:
        token = int(graph.forward(read)[-1].argmax())
        if token in ends:
            break
        ids.append(token)
        read = [token]
    return Continued("llama.cpp's graph in numpy", tokenizer.decode(ids), False)


_FIX = "run the file by hand: llama-cli -m FILE"


def _printed(program: str, path: Path, prompt: str, most: int) -> str:
    """What a program of llama.cpp writes after the prompt."""
    words = [
        program,
        "-m",
        str(path),
        "-p",
        prompt,
        "-n",
        str(most),
        "--temp",
        "0",
        "-no-cnv",
        "--no-display-prompt",
        "--no-escape",
        "--no-warmup",
        "--simple-io",
    ]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{Path(program).name} failed: {error}", where=str(path), fix=_FIX
        ) from error
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{Path(program).name} failed: {last[:200]}", where=str(path), fix=_FIX)
    return done.stdout.decode(errors="replace").removesuffix("\n\n").removesuffix(" [end of text]")


def main() -> None:
    """The child: continues the prompt of its job."""
    job = accept()
    import llama_cpp

    threads = min(4, os.cpu_count() or 1)
    model = llama_cpp.Llama(
        job["path"],
        n_ctx=len(job["prompt"]) + job["most"],
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        n_gpu_layers=0,
    )
    ids: list[int] = []
    for token in model.generate(job["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
        if token in job["ends"] or len(ids) == job["most"]:
            break
        ids.append(int(token))
    reply(job, {"ids": ids, "version": llama_cpp.__version__})


if __name__ == "__main__":
    main()
