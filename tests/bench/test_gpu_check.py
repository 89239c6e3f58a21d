"""The check of a machine with a GPU, run here with small shapes: every part's code, one JSON, a readable table."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check
import gpu_check_attention
import gpu_check_parts

from bloomery.bench import rig
from bloomery.model.attention import tiles
from bloomery.model.attention.tiles import KERNELS, tile_candidates, tile_shape
from bloomery.train.checkpoint.checkpointed_model import InitialWeights

ROOT = Path(__file__).resolve().parents[2]


def good(part):
    assert part["outcome"] == "ok", part
    assert part["tokens_per_second"] > 0 and part["peak_gib"] > 0 and part["planned_gib"] > 0
    return True


def test_a_part_runs_on_a_processor(monkeypatch):
    # a part replaces it in its process
    monkeypatch.setattr(InitialWeights, "fill", InitialWeights.fill)
    # and bounds its memory, which nobody could raise again for the tests after this one
    monkeypatch.setattr(rig, "bound_memory", lambda limit: None)
    assert "qlora" in gpu_check.SECONDS and good(gpu_check_parts.part("qlora", tiny=True))


@pytest.mark.soak  # each part is a process that imports torch, some transformers, too
def test_every_part_runs_on_a_processor(tmp_path):
    out = tmp_path / "found.json"
    environment = dict(
        os.environ, PYTHON=sys.executable, XDG_CACHE_HOME=str(tmp_path), OMP_NUM_THREADS="1"
    )
    command = [str(ROOT / "scripts" / "gpu_check.sh"), "--tiny", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(out.read_text())
    parts = {part["part"]: part for part in report["parts"]}
    assert list(parts) == list(gpu_check.SECONDS)
    assert all(good(parts[name]) for name in ("full", "lora", "qlora"))
    for name in ("theirs-lora", "theirs-full"):
        assert parts[name]["outcome"] == "ok", parts[name]
        assert parts[name]["tokens_per_second"] > 0 and parts[name]["peak_gib"] > 0
    assert parts["theirs-qlora"]["outcome"] in ("ok", "skipped")  # bitsandbytes is no dependency
    assert parts["use"]["outcome"] == "ok", parts["use"]
    assert parts["use"]["figure"] == parts["use"]["of_the_run"]  # a QLoRA run, loaded as it trained
    assert parts["pipeline"]["outcome"] == "ok", parts["pipeline"]
    assert "pipeline through the host, slowest edge rank" in parts["pipeline"]["message"]
    for name in ("probes", "attention"):
        assert parts[name]["probes"] and all(
            probe["error"] is not None for probe in parts[name]["probes"][1:]
        )
    assert parts["step"]["outcome"] == "ok" and len(parts["step"]["steps"]) == 2
    assert set(parts["attention"]["lengths"][0]["to_the_best"]) == {"blockwise", "math"}
    assert set(parts["attention"]["lengths"][1]["to_the_best"]) == {"blockwise", "math", "sdpa"}
    assert "Attention, forward and backward" in ended.stdout
    assert "torchtune" in ended.stdout and str(out) in ended.stdout


def test_attention_backends_are_timed_in_turns(monkeypatch):
    names = ["sdpa", "mask", "blockwise", "math", "triton"]
    rows = gpu_check_attention.timed_backends(names, torch.float32, "cpu", tiny=True)
    assert [(row["length"], row["packed"]) for row in rows] == [
        (64, True),
        (64, False),
        (48, True),
        (48, False),
    ]
    for row in rows:
        # sdpa mixes documents, mask is sdpa without them, and triton has no kernel for this device
        expected = {"mask" if row["packed"] else "sdpa", "blockwise", "math"}
        assert set(row["to_the_best"]) == set(row["forward_ms"]) == expected
        assert min(row["to_the_best"].values()) == 1.0
        assert all(row["repeats_have_equal_bits"].values()) and not row["problems"]
        times = row["forward_and_backward_ms"]
        assert all(times[name] > 0 for name in expected)
        assert max(times, key=times.get) == max(row["to_the_best"], key=row["to_the_best"].get)


def test_a_step_is_compared_and_shown(monkeypatch):
    monkeypatch.setattr(gpu_check_parts, "TINY_STEPS", gpu_check_parts.TINY_STEPS[:1])
    part = gpu_check_parts.part("step", tiny=True)
    assert part["outcome"] == "ok" and len(part["steps"]) == 1, part
    assert "equals the CPU's" in gpu_check.step_lines(part)[1]
    wrong = part["steps"][0] | {
        "outcome": "wrong",
        "message": "this GPU computes wrong results in attention with float16: use blockwise attention",
        "detail": "error 1.6, at most 0.0055 is rounding",
        "unrepeatable": "attention",
    }
    lines = gpu_check.step_lines({"steps": [wrong]})
    assert "use blockwise attention (error 1.6" in lines[1] and "different bits" in lines[2]


def test_attention_that_fails_or_changes_its_bits_is_named(monkeypatch):
    attend = gpu_check_attention.attend

    def faulty(q, *others, backend, **options):
        if backend == "math":
            raise RuntimeError("HIP error: out of memory")
        out = attend(q, *others, backend=backend, **options)
        return out + 1e-3 * torch.rand_like(out) if backend == "blockwise" else out

    monkeypatch.setattr(gpu_check_attention, "attend", faulty)
    monkeypatch.setattr(gpu_check_attention, "TINY_LENGTHS", (64,))
    names = ["mask", "blockwise", "math"]
    rows = gpu_check_attention.timed_backends(names, torch.float32, "cpu", tiny=True)
    assert rows[0]["repeats_have_equal_bits"] == {"mask": True, "blockwise": False}
    assert "out of memory" in rows[0]["problems"]["math"]
    text = "\n".join(gpu_check.attention_lines({"lengths": rows}))
    assert "math failed" in text and "bits differ on repeat: blockwise" in text

    monkeypatch.setattr(gpu_check_attention, "TIMING_SECONDS", -1.0)
    rows = gpu_check_attention.timed_backends(names, torch.float32, "cpu", tiny=True)
    assert all(row["skipped"] == "time limit reached" for row in rows)
    assert "time limit reached" in "\n".join(gpu_check.attention_lines({"lengths": rows}))


def test_every_candidate_tile_is_timed(monkeypatch):
    monkeypatch.setattr(gpu_check_attention, "arch_of", lambda _device: "gfx1030")

    def clock(launch, tile):
        if tile.keys == 32:
            raise RuntimeError("out of resource: shared memory")
        return launch.width * tile.warps / 1e6

    rows = gpu_check_attention.timed_tiles(torch.float16, "cpu", clock)
    expected = [
        (kernel, width, list(tile))
        for width in (64, 128)
        for kernel in KERNELS
        for tile in tile_candidates(kernel, arch="gfx1030", width=width)
    ]
    assert [(row["kernel"], row["width"], row["tile"]) for row in rows] == expected
    for row in rows:
        if row["tile"][1] == 32:
            assert "shared memory" in row["problem"]
        else:
            assert row["ms"] == pytest.approx(row["width"] * row["tile"][2] / 1e3)
    assert len(gpu_check.attention_lines({"tiles": rows})) == len(rows) + 1

    # The backends are then timed with the fastest that can run, as a run would compute.
    monkeypatch.setattr(tiles, "_in_use", {})
    gpu_check_attention.use_fastest(rows, "gfx1030")
    assert tile_shape("forward", arch="gfx1030", width=64) == (32, 16, 4)
    assert tile_shape("backward_kv", arch="gfx1030", width=64) == (16, 16, 4)
    assert tile_shape("forward", arch="gfx1030", width=128) == (32, 16, 8)


def test_a_part_that_fails_is_written_down_and_the_rest_goes_on(tmp_path, monkeypatch):
    broken = tmp_path / "gpu_check_parts.py"
    broken.write_text(
        "import sys, time, json\n"
        "if sys.argv[1] == 'full': raise RuntimeError('HIP error: invalid device function')\n"
        "if sys.argv[1] == 'lora': time.sleep(60)\n"
        "open(sys.argv[2], 'w').write(json.dumps({'outcome': 'ok', 'message': 'fine'}))\n"
    )
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    # a child with torch
    monkeypatch.setattr(gpu_check, "describe", lambda: {"device": "a GPU", "torch": "2.13.0"})
    monkeypatch.setitem(gpu_check.SECONDS, "lora", 0.5)
    report, _ = gpu_check.check(tmp_path / "found.json", tiny=False, only=["full", "lora", "qlora"])
    assert [part["outcome"] for part in report["parts"]] == ["failed", "timeout", "ok"]
    assert "invalid device function" in report["parts"][0]["message"]
    assert json.loads((tmp_path / "found.json").read_text()) == report
    page = gpu_check.page(report)
    assert "invalid device function" in page and "not measured" in page


def test_a_target_is_met_or_not_and_the_speed_compared():
    measured = {"outcome": "ok", "peak_gib": 16.0, "reserved_gib": 17.2, "tokens_per_second": 900.0}
    parts = [
        {"part": "lora"} | measured,
        {"part": "theirs-lora", "outcome": "ok", "tokens_per_second": 600.0},
    ]
    full, lora, _ = gpu_check.verdicts(parts)
    # what is held counts
    assert lora["memory_met"] is False and lora["times_theirs"] == 1.5 and lora["faster"]
    assert full["memory_met"] is None and full["faster"] is None


def test_what_is_missing_is_named_with_the_words_that_install_it(monkeypatch, capsys):
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(gpu_check.MODULES.values()) == sorted(
        re.split(r"[<>=~ ]", each)[0] for each in told
    )
    assert gpu_check.missing() == []
    monkeypatch.setitem(gpu_check.MODULES, "nowhere.to_be_found", "nowhere")
    assert gpu_check.missing() == ["nowhere"]
    assert gpu_check.refuse(["torch", "nowhere"]) == 2
    message = capsys.readouterr().err
    assert "-m pip install nowhere" in message and "pip install torch" not in message


def test_parts_take_less_than_nine_minutes_together():
    assert gpu_check.TOTAL_SECONDS < 9 * 60


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_the_shell_script_is_clean():
    subprocess.run(["shellcheck", str(ROOT / "scripts" / "gpu_check.sh")], check=True)
