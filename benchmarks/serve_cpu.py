"""Serving on a CPU: `python benchmarks/serve_cpu.py MODEL [--clients 8] [--tokens 64] [--rounds 5]`.

Starts `bloomery serve` in a process of its own. In each round the same prompts come first one at a time, then all at
once from as many clients. Prints total tokens per second of both, their ratio, and the time to the first token.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time

WORDS = "the quick brown fox jumps over a lazy dog while it rains in Spain".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--quantize")
    asked = parser.parse_args()
    words = [
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        asked.model,
        "--port",
        str(asked.port),
        "-d",
        "cpu",
    ]
    words += ["--quantize", asked.quantize] if asked.quantize else []
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                print(line.rstrip())
                if line.startswith("serving"):
                    break
            measure(asked)
        finally:
            server.terminate()


def measure(asked: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {"one at a time": [], f"{asked.clients} clients": []}
    firsts: dict[str, list[float]] = {name: [] for name in rates}
    for turn in range(asked.rounds + 1):
        prompts = [
            f"{turn} {at} " + " ".join(WORDS[at % 8 : at % 8 + 6]) for at in range(asked.clients)
        ]
        for name in rates:
            took: list[float] = []
            began = time.perf_counter()
            threads = [
                threading.Thread(target=lambda p=p, took=took: took.append(ask(asked, p)))
                for p in prompts
            ]
            for thread in threads:
                thread.start()
                if name == "one at a time":
                    thread.join()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - began
            assert len(took) == asked.clients, "a request failed"
            if turn:  # the first round warms up
                rates[name].append(asked.clients * asked.tokens / seconds)
                firsts[name] += took
    for name in rates:
        print(
            f"{name:16} {statistics.median(rates[name]):8.1f} tokens/s   first token: median "
            f"{1e3 * statistics.median(firsts[name]):.0f} ms, slowest {1e3 * max(firsts[name]):.0f} ms"
        )
    alone, together = (statistics.median(each) for each in rates.values())
    print(
        f"{asked.clients} clients decode {together / alone:.2f} times the tokens per second of one at a time"
    )


def ask(asked: argparse.Namespace, prompt: str) -> float:
    """Seconds to the first token of a greedy completion, all of whose tokens are read."""
    body = {
        "prompt": prompt,
        "max_tokens": asked.tokens,
        "min_tokens": asked.tokens,
        "temperature": 0.0,
        "stream": True,
        "logprobs": 0,
    }
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=600)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    first, tokens = 0.0, 0
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            tokens += 1
    connection.close()
    assert tokens >= asked.tokens
    return first


if __name__ == "__main__":
    main()
