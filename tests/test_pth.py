"""Folders as Meta publishes Llama, against Meta's own forward pass; and pickles that harm."""

import base64
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.pth import import_meta, tiktoken_of
from bloomery.model.io.weights import load_decoder
from models_for_tests import make_tokenizer

DIM, HEADS, KV, LAYERS, HIDDEN, VOCAB = 32, 4, 2, 2, 48, 320
PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "norm_eps": 1e-5, "vocab_size": -1}
TOKENS = torch.arange(24)[None] * 7 % VOCAB


def weights() -> dict[str, torch.Tensor]:
    random, width = torch.Generator().manual_seed(0), DIM // HEADS * KV
    shapes = {"tok_embeddings.weight": (VOCAB, DIM), "output.weight": (VOCAB, DIM), "norm.weight": (DIM,)}
    for n in range(LAYERS):
        shapes |= {f"layers.{n}.attention.wq.weight": (DIM, DIM), f"layers.{n}.attention.wk.weight": (width, DIM),
                   f"layers.{n}.attention.wv.weight": (width, DIM), f"layers.{n}.attention.wo.weight": (DIM, DIM),
                   f"layers.{n}.feed_forward.w1.weight": (HIDDEN, DIM), f"layers.{n}.ffn_norm.weight": (DIM,),
                   f"layers.{n}.feed_forward.w2.weight": (DIM, HIDDEN), f"layers.{n}.attention_norm.weight": (DIM,),
                   f"layers.{n}.feed_forward.w3.weight": (HIDDEN, DIM)}  # fmt: skip
    return {name: torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}


def of_meta(w: dict[str, torch.Tensor], theta: float = 10000.0) -> torch.Tensor:
    """The forward pass of the published reference: neighbors turn together, as complex numbers."""

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + PARAMS["norm_eps"]).rsqrt() * w[name]

    width, (count,) = DIM // HEADS, TOKENS.shape[1:]
    angles = torch.outer(torch.arange(count).float(), theta ** -(torch.arange(0, width, 2).float() / width))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)

    x = w["tok_embeddings.weight"][TOKENS[0]]
    for n in range(LAYERS):
        h = norm(x, f"layers.{n}.attention_norm.weight")
        q, k, v = (F.linear(h, w[f"layers.{n}.attention.w{each}.weight"]).view(count, -1, width) for each in "qkv")
        q, k = rotated(q).transpose(0, 1), rotated(k).transpose(0, 1).repeat_interleave(HEADS // KV, 0)
        v = v.transpose(0, 1).repeat_interleave(HEADS // KV, 0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(count, DIM)
        x = x + F.linear(mixed, w[f"layers.{n}.attention.wo.weight"])
        h = norm(x, f"layers.{n}.ffn_norm.weight")
        gate, up = (F.linear(h, w[f"layers.{n}.feed_forward.{each}.weight"]) for each in ("w1", "w3"))
        x = x + F.linear(F.silu(gate) * up, w[f"layers.{n}.feed_forward.w2.weight"])
    return F.linear(norm(x, "norm.weight"), w["output.weight"])


def published(folder: Path, files: int = 1, *, by_tokens: bool = False, **params: object) -> Path:
    """The model split over files as Llama 2 splits it, or, `by_tokens`, Llama 3."""
    make_tokenizer(folder)
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    parts: list[dict[str, torch.Tensor]] = [{"rope.freqs": torch.ones(4)} for _ in range(files)]
    for name, whole in weights().items():
        axis = 1 if name.endswith((".wo.weight", ".w2.weight")) or (name[:3] == "tok" and not by_tokens) else 0
        pieces = whole.chunk(files, axis) if whole.ndim == 2 else [whole] * files
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    return folder


@pytest.mark.parametrize(("files", "by_tokens"), [(1, False), (2, False), (2, True)])
def test_an_imported_llama_computes_what_the_reference_does(tmp_path, files, by_tokens):
    done = import_meta(published(tmp_path / "meta", files, by_tokens=by_tokens), tmp_path / "out", trusted=True)
    with torch.no_grad():
        mine = load_decoder(done.folder)(TOKENS)[0]
    torch.testing.assert_close(mine, of_meta(weights()), atol=1e-4, rtol=0)
    assert (mine - of_meta(weights(), theta=500.0)).abs().max() > 1e-3, "the comparison sees the rotation"
    assert f"{files} pickle files" in done.proofs[0]
    assert "files, network" in done.proofs[0] or os.uname().sysname != "Linux"


def test_the_config_follows_params_json(tmp_path):
    folder = published(tmp_path / "meta", rope_theta=500000.0, use_scaled_rope=True)
    done = import_meta(folder, tmp_path / "out", trusted=True, dtype="bfloat16")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["rope_theta"] == 500000.0 and config["rope_scaling"]["factor"] == 32.0
    assert config["max_position_embeddings"] == 131072 and config["dtype"] == "bfloat16"
    stored = load_file(done.folder / "model.safetensors")
    assert stored["model.embed_tokens.weight"].equal(weights()["tok_embeddings.weight"].bfloat16())


def test_the_context_that_params_json_leaves_open_is_that_of_code_llama(tmp_path):
    done = import_meta(published(tmp_path / "meta", rope_theta=1000000), tmp_path / "out", trusted=True)
    assert json.loads((done.folder / "config.json").read_text())["max_position_embeddings"] == 16384


def test_pickles_are_refused_by_default(tmp_path):
    folder = published(tmp_path / "meta")
    done = CliRunner().invoke(cli, ["import", str(folder), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError) and done.exception.code == 2
    assert "--unsafe-pickle" in done.exception.fix and "run code" in done.exception.problem
    done = CliRunner().invoke(cli, ["import", str(folder), "--unsafe-pickle", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and (tmp_path / "out" / "config.json").is_file()


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def hostile(kind: str, path: Path, mark: Path) -> None:
    """A file in the place of consolidated.00.pth."""
    if kind == "system":
        torch.save({"tok_embeddings.weight": Evil(os.system, f"touch {mark}")}, path)
    elif kind == "eval":
        path.write_bytes(pickle.dumps(Evil(eval, f"open({str(mark)!r}, 'w')"), protocol=2))
    elif kind == "bomb":  # two gigabytes of zeros in megabytes
        torch.save({"tok_embeddings.weight": torch.zeros(2**20)}, path)
        with zipfile.ZipFile(path) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
            for name, content in entries.items():
                with new.open(name, "w", force_zip64=True) as file:
                    for _ in range(1 if not name.endswith("data/0") else 2**9):
                        file.write(content)
    elif kind == "claim":  # 2^40 numbers that share one
        torch.save(weights() | {"tok_embeddings.weight": torch.zeros(1).expand(2**40)}, path)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "noise":
        path.write_bytes(os.urandom(5000))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["system", "eval", "bomb", "claim", "cut", "noise"])
def test_a_hostile_pickle_does_nothing(tmp_path, kind):
    folder, mark = published(tmp_path / "meta"), tmp_path / "mark"
    hostile(kind, folder / "consolidated.00.pth", mark)
    with pytest.raises(UserError) as caught:
        import_meta(folder, tmp_path / "out", trusted=True)
    reasons = {"system": "runs code", "eval": "runs code", "bomb": "more memory", "claim": "claim 4,"}
    assert reasons.get(kind, "not opened") in caught.value.problem
    assert not mark.exists() and not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


PROBE = """
import ctypes, errno, os, signal, socket, subprocess, sys
from bloomery.export.pth_worker import lock_down
libc, about = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(128)
about[8:12] = b"\\xff\\xff\\xff\\xff"  # si_code: SI_QUEUE
def queued():
    if libc.syscall({"x86_64": 129, "aarch64": 138}[os.uname().machine], os.getppid(), 0, about):
        raise OSError(ctypes.get_errno(), "")
locked = lock_down(2**34)
def refused(call):
    try:
        call()
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES, errno.EFBIG)
    return False
calls = {
    "read": lambda: open("/etc/hostname"), "write": lambda: open(sys.argv[1], "w"), "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]), "socket": socket.socket, "kill": lambda: os.kill(os.getppid(), 0),
    "system": lambda: subprocess.run(["true"]), "delete": lambda: os.unlink(sys.argv[1]),
    "truncate": lambda: os.truncate(sys.argv[2], 0), "link": lambda: os.link(sys.argv[2], sys.argv[1]),
    "symlink": lambda: os.symlink(sys.argv[2], sys.argv[1]), "pipe": lambda: os.mkfifo(sys.argv[1]),
    "rmdir": lambda: os.rmdir(sys.argv[3]), "times": lambda: os.utime(sys.argv[2], (0, 0)), "signal": queued,
    "owner": lambda: os.chown(sys.argv[2], os.getuid(), os.getgid()), "pidfd": lambda: os.pidfd_open(os.getppid()),
    "attribute": lambda: os.setxattr(sys.argv[2], "user.a", b"b"),
}
print(locked, sorted(name for name, call in calls.items() if not refused(call)))
"""


def test_the_locked_process_can_do_nothing_else(tmp_path):
    import subprocess
    import sys

    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    places = [str(tmp_path / name) for name in ("x", "file", "folder")]
    done = subprocess.run([sys.executable, "-c", PROBE, *places], capture_output=True, text=True)
    assert done.stdout == "True []\n", done.stdout + done.stderr
    assert (tmp_path / "file").read_text() == "kept" and (tmp_path / "folder").is_dir()


RANKED = [bytes([each]) for each in range(256)] + [
    b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"aa", b"aaaa", b"aaa", "é".encode(), "東".encode()[:2],
    "東".encode(),
]


def tiktoken(word: bytes) -> list[int]:
    """tiktoken's algorithm: the neighbors that join to the token of the lowest rank, the first of equal ones."""
    parts, ranks = [word[at : at + 1] for at in range(len(word))], {token: n for n, token in enumerate(RANKED)}
    while len(parts) > 1 and word not in ranks:
        joined = [ranks.get(parts[at] + parts[at + 1], len(ranks)) for at in range(len(parts) - 1)]
        if min(joined) == len(ranks):
            break
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[word]] if word in ranks else [ranks[part] for part in parts]


def test_llama_3_has_its_tokens_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr("test_pth.VOCAB", len(RANKED) + 256)
    folder = published(tmp_path / "meta", use_scaled_rope=True, rope_theta=500000.0)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(RANKED)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    tokenizer = load_tokenizer(import_meta(folder, tmp_path / "out", trusted=True).folder)
    words = ["the", " the", " then", "aaaaaaa", "aaa", "inging", " thing", "é", "東東", "a"]
    assert tokenizer.encode("".join(words[:3])) == [each for word in words[:3] for each in tiktoken(word.encode())]
    assert [tokenizer.encode(word) for word in words] == [tiktoken(word.encode()) for word in words]
    names = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|finetune_right_pad_id|>": 4, "<|eom_id|>": 8,
             "<|eot_id|>": 9, "<|python_tag|>": 10, "<|reserved_special_token_247|>": 255}  # fmt: skip
    assert {name: tokenizer.id_of(name) - len(RANKED) for name in names} == names
    ids = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert ids["eos_token_id"] == [len(RANKED) + each for each in (1, 8, 9)] and tokenizer.prefix == [len(RANKED)]
    earlier = tiktoken_of(folder / "tokenizer.model", later=False)
    assert earlier.id_of("<|eot_id|>") == len(RANKED) + 9 and earlier.vocab_size == len(RANKED) + 256
    monkeypatch.setattr("test_pth.VOCAB", len(RANKED) + 200)
    with pytest.raises(UserError, match="the model 469"):
        import_meta(few(folder, tmp_path / "few"), tmp_path / "none", trusted=True)


def few(folder: Path, to: Path) -> Path:
    made = published(to, use_scaled_rope=True)
    (made / "tokenizer.json").unlink()
    shutil.copy(folder / "tokenizer.model", made / "tokenizer.model")
    return made


@pytest.mark.parametrize("what", ["params", "tokenizer", "tiktoken", "shape", "files", "none"])
def test_what_does_not_fit_is_named(tmp_path, what):
    folder, problem = published(tmp_path / "meta"), ""
    if what == "params":
        (folder / "params.json").unlink()
        problem = "params.json is missing"
    elif what in ("tokenizer", "tiktoken"):
        (folder / "tokenizer.json").unlink()
        problem = "tokenizer.model is missing"
        if what == "tiktoken":
            (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
            problem = "ranks 0, 1, 2"
    elif what == "shape":
        (folder / "params.json").write_text(json.dumps(PARAMS | {"dim": 64}))
        problem = "params.json makes it"
    elif what == "files":
        shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.01.pth")
        problem = "params.json makes it"
    else:
        (folder / "consolidated.00.pth").unlink()
        problem = "no consolidated"
    with pytest.raises(UserError, match=problem):
        import_meta(folder, tmp_path / "out", trusted=True)
    assert not (tmp_path / "out").exists()
