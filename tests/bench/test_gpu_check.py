"""`bloomery doctor --gpu-check`: what happens to a part whose process hangs, dies or meets wrong numbers, and its file.

The parts themselves run on the simulated device (tests/device).
"""

import copy
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

from bloomery.bench import rig
from bloomery.bench.gpu_check import kernels, ranks, speed, supervise, use
from bloomery.bench.gpu_check.child import PartJob
from bloomery.bench.gpu_check.parts import PARTS, chosen_parts, limits
from bloomery.bench.gpu_check.results import (
    Card,
    CheckResult,
    PartResult,
    Row,
    outcome_of,
    page,
    read_result,
    without_paths,
    write_result,
)
from bloomery.bench.gpu_check.small_runs import SmallRuns
from bloomery.bench.gpu_check.supervise import Check, run_check
from bloomery.cli import doctor
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.model.attention import tiles
from bloomery.model.attention.tiles import KERNELS, tile_candidates, tile_shape
from bloomery.monitor.events import StepChecked, to_json
from bloomery.train.state import build_state

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import cards_page  # noqa: E402
import missing_packages  # noqa: E402


def check_of(file: Path, *names: str, seconds: float = 60.0) -> Check:
    parts = chosen_parts(names)
    return Check(
        parts=parts,
        limits=dict.fromkeys((part.name for part in parts), seconds),
        tiny=True,
        by="Ada",
        file=file,
        public=doctor.without_names,
    )


def silent(*_: object) -> None:
    """Nobody watches."""


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Children that go as they are told, for a user whose name and folders must not be in a file."""
    monkeypatch.setattr(supervise, "CHILD", "faulty_gpu_check")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("USER", "ada.lovelace")
    monkeypatch.setenv("NAME", "ada.lovelace")
    monkeypatch.setenv("HOSTNAME", "analytical-engine")
    monkeypatch.setenv("FOLDER", str(tmp_path))

    def plant(**by_part: str) -> None:
        monkeypatch.setenv("FAULTS", ",".join(f"{part}={fault}" for part, fault in by_part.items()))

    return plant


def test_each_bad_end_is_told_apart_and_the_rest_goes_on(faults, tmp_path):
    faults(probes="segfault", step="hangs", same="raises", races="wrong", waits="none")
    file = tmp_path / "gpu-check.json"
    check = check_of(file, "probes", "step", "same", "races", "waits")
    check.limits["step"] = 3.0
    rows_in_file = []

    def on_row(part: str, row: Row) -> None:
        rows_in_file.append((part, row.case))

    result = run_check(check, on_part=silent, on_row=on_row)
    outcomes = {part.part: part.outcome for part in result.parts}
    assert outcomes == {
        "probes": "crashed",
        "step": "timeout",
        "same": "failed",
        "races": "wrong",
        "waits": "ok",
    }
    # A part that ended badly keeps the row that it had sent, and the case in which it ended has a name.
    assert all(part.rows[0].numbers == {"losses": [1.0, 2.0]} for part in result.parts)
    by_name = {part.part: part for part in result.parts}
    assert "SIGSEGV" in by_name["probes"].message and "in second" in by_name["probes"].message
    assert by_name["step"].message == "no end within 3 s in second"
    assert "invalid device function" in by_name["same"].message
    assert by_name["step"].seconds < 20
    assert result.failed == ("probes", "step", "same", "races")
    assert result.passed == ("waits",)
    assert rows_in_file == [
        (part, case)
        for part, cases in (
            ("probes", ["first"]),
            ("step", ["first"]),
            ("same", ["first"]),
            ("races", ["first", "second"]),
            ("waits", ["first", "second"]),
        )
        for case in cases
    ]
    assert read_result(file) == result
    text = "\n".join(page(result))
    assert "invalid device function" in text and "no end within 3 s" in text


def test_the_table_is_a_page_of_aligned_columns_and_cuts_no_reason(faults, tmp_path):
    faults(step="none")
    result = run_check(check_of(tmp_path / "result.json", "step"), on_part=silent, on_row=silent)
    reason = "word " * 60 + "end"
    rows = (
        Row(case="a case of forty characters, more or less", message="x"),
        Row(case="b", message="y"),
    )
    part = result.parts[0].model_copy(update={"message": reason, "rows": rows})
    lines = list(page(result.model_copy(update={"parts": (part,)})))
    assert max(map(len, lines)) <= 100
    assert reason in " ".join(" ".join(lines).split())
    assert (
        len({line.index(" ok ") for line in lines if line.startswith("  ") and " ok " in line}) == 1
    )


def test_the_file_has_each_row_before_the_next_part_begins(faults, tmp_path):
    """Whoever switches the machine off in the middle has what was found until then."""
    faults(probes="none", step="none")
    file = tmp_path / "gpu-check.json"
    contents = []

    def on_row(_part: str, _row: Row) -> None:
        contents.append(len(read_result(file).parts))

    def on_part(_name: str) -> None:
        contents.append([len(part.rows) for part in read_result(file).parts])

    run_check(check_of(file, "probes", "step"), on_part=on_part, on_row=on_row)
    assert contents == [[], 0, 1, [2], 1, 2]


def test_a_file_names_no_user_host_or_path(faults, tmp_path):
    faults(probes="none", step="raises")
    file = tmp_path / "gpu-check.json"
    result = run_check(check_of(file, "probes", "step"), on_part=silent, on_row=silent)
    text = file.read_text()
    assert result.parts[0].rows[1].message == "read weights.bin of user"
    for private in ("ada.lovelace", "analytical-engine", str(tmp_path), str(Path.home()) + "/"):
        assert private not in text
    # What a traceback printed is in the file, with names of files alone.
    assert any("faulty_gpu_check.py" in line for line in result.parts[1].printed)
    assert not re.search(r"(?<![\w.:])/\w+/", text)
    assert result.by == "Ada"


@pytest.mark.parametrize(
    ("text", "public_text"),
    [
        ("in /opt/venv/lib/torch/nn/linear.py line 3", "in linear.py line 3"),
        ("File ~/models/a.bin", "File a.bin"),
        ("at https://example.org/a/b, 3/4 of 12", "at https://example.org/a/b, 3/4 of 12"),
        ("12.5 tokens/s", "12.5 tokens/s"),
    ],
)
def test_of_a_path_the_last_name_stays(text, public_text):
    assert without_paths(text) == public_text


def test_limits_are_what_is_promised():
    """Half an hour for all, and for any time that the user has, in the same shares."""
    assert sum(limits(PARTS, tiny=False).values()) == 30 * 60
    assert sum(limits(PARTS, tiny=True).values()) < 20 * 60
    half = limits(PARTS, tiny=False, total_seconds=900.0)
    assert sum(half.values()) == pytest.approx(900.0)
    assert half["step"] == pytest.approx(120.0)
    # What proves that numbers are right comes before what is timed.
    names = [part.name for part in PARTS]
    assert max(map(names.index, ("step", "same", "races", "resume"))) < names.index("attention")
    assert [part.name for part in chosen_parts(["same", "step"])] == ["step", "same"]
    with pytest.raises(UserError, match="no such part: sane") as caught:
        chosen_parts(["sane"])
    assert "same" in caught.value.fix


def test_the_worst_row_is_the_outcome_of_a_part():
    rows = [Row(case="a"), Row(case="b", outcome="skipped")]
    assert outcome_of(rows) == "ok"
    assert outcome_of(rows[1:]) == "skipped"
    assert outcome_of([*rows, Row(case="c", outcome="failed")]) == "failed"
    assert outcome_of([*rows, Row(case="c", outcome="failed"), Row(case="d", outcome="wrong")]) == (
        "wrong"
    )


@pytest.mark.parametrize("starts", ["ranks", "serve"])
def test_what_a_part_starts_is_in_its_session_and_dies_with_it(starts, tmp_path, monkeypatch):
    """A part is killed with its process group; a rank or a server in another one would keep the card."""
    answer = tmp_path / ("rank-{}.json" if starts == "ranks" else "group.json")
    code = (
        "import json, os, pathlib, sys;"
        f"pathlib.Path({str(answer)!r}.format(os.environ.get('RANK'))).write_text("
        "json.dumps({'group': os.getpgid(0)}))"
    )

    def own_program(*_: str) -> list[str]:
        return [sys.executable, "-c", code]

    if starts == "ranks":
        monkeypatch.setattr(ranks, "python_module", own_program)
        groups = [each["group"] for each in ranks._run_ranks(["collectives"], tmp_path, 30.0)]
    else:
        monkeypatch.setattr(use, "python_module", own_program)
        assert use._Commands(tmp_path, ()).serve_row("run").outcome == "failed"
        groups = [json.loads(answer.read_text())["group"]]
    assert set(groups) == {os.getpgid(0)}


# The command


def test_what_will_happen_is_said_before_anybody_is_asked(faults, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults(step="none", same="none")
    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "bloomery",
            "doctor",
            "--gpu-check",
            "--tiny",
            "--only",
            "step,same",
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert refused.returncode == 2 and "add --yes" in refused.stderr
    tiny_minutes = sum(part.tiny_seconds for part in chosen_parts(["step", "same"])) / 60
    assert f"together {tiny_minutes:.1f} min" in " ".join(refused.stderr.split())
    assert "nothing leaves this machine" in refused.stderr
    assert "gpu-check.json" in refused.stderr
    assert not Path("gpu-check.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tiny"], "--tiny is a setting of --gpu-check"),
        (["--gpu-check", "--probe"], "cannot be combined"),
        (["--gpu-check", "--docker"], "cannot be combined"),
        (["--gpu-check", "--only", "stepp"], "no such part: stepp"),
        (["--gpu-check", "--limit", "10"], "not a time"),
        (["--gpu-check", "--limit", "5s"], "too few"),
        (["--gpu-check", "--by", "<b>"], "not an author name"),
        (["--gpu-check", "--output", "notes.txt"], "not an earlier result"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        doctor.command.main(words, standalone_mode=False)
    assert caught.value.code == 2
    assert Path("notes.txt").read_text() == "mine"


def test_a_check_from_the_command_line_writes_its_file_and_is_repeated(
    faults, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    faults(step="wrong")
    words = ["--gpu-check", "--yes", "--only", "step", "--limit", "2m", "--by", "Ada L."]
    assert doctor.command.main(words, standalone_mode=False) == 1
    assert "wrong" in capsys.readouterr().out
    result = read_result(Path("gpu-check.json"))
    assert result.by == "Ada L." and result.limit_seconds == 120.0
    # The second time the file is an earlier result, which may be replaced.
    faults(step="none")
    assert doctor.command.main([*words, "--json"], standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["outcome"] == "ok"


# Kernels


def timed(names, *, length=64, packed=True, dtype=torch.float32) -> Row:
    return kernels._timed_row("case", names, length, 1, dtype, "cpu", packed=packed)


def test_attention_backends_are_timed_in_turns():
    names = ["sdpa", "mask", "blockwise", "math", "triton"]
    for packed in (True, False):
        row = timed(names, packed=packed)
        # sdpa mixes documents, mask is sdpa without them, and triton has no kernel for this device.
        expected = {"mask" if packed else "sdpa", "blockwise", "math"}
        times = row.numbers["forward_and_backward_ms"]
        assert set(times) == set(row.numbers["forward_ms"]) == expected
        assert list(times.values()) == sorted(times.values()) and min(times.values()) > 0
        assert all(row.numbers["same_bits"].values()) and row.outcome == "ok"


def test_attention_that_fails_or_changes_its_bits_is_named(monkeypatch):
    attend = kernels.attend

    def faulty(q, *others, backend, **options):
        if backend == "math":
            raise RuntimeError("HIP error: out of memory")
        out = attend(q, *others, backend=backend, **options)
        return out + 1e-3 * torch.rand_like(out) if backend == "blockwise" else out

    monkeypatch.setattr(kernels, "attend", faulty)
    row = timed(["mask", "blockwise", "math"])
    assert row.numbers["same_bits"] == {"mask": True, "blockwise": False}
    assert "out of memory" in row.numbers["problems"]["math"] and row.outcome == "failed"
    assert "math failed" in row.message and "bits differ on repeat: blockwise" in row.message


def test_attention_that_computes_something_else_than_the_others_is_named(monkeypatch):
    attend = kernels.attend

    def faulty(*inputs, backend, **options):
        out = attend(*inputs, backend=backend, **options)
        return 1.1 * out if backend == "blockwise" else out

    monkeypatch.setattr(kernels, "attend", faulty)
    for dtype in (torch.float32, torch.bfloat16):
        row = timed(["mask", "blockwise", "math"], dtype=dtype)
        assert row.outcome == "wrong" and "blockwise computes what no other" in row.message
        assert "math computes" not in row.message


def test_of_two_backends_that_differ_both_are_named():
    one, other = torch.ones(4, 4), torch.full((4, 4), 1.5)
    assert kernels.differing_backends({"a": [one], "b": [other]}, 0.1) == ["a", "b"]
    assert kernels.differing_backends({"a": [one], "b": [other], "c": [one]}, 0.1) == ["b"]
    assert kernels.differing_backends({"a": [one]}, 0.1) == []
    assert kernels.differing_backends({"a": [one], "b": [one * torch.nan], "c": [one]}, 9.0) == [
        "b"
    ]


def test_every_candidate_tile_is_timed(monkeypatch):
    monkeypatch.setattr(kernels, "arch_of", lambda _device: "gfx1030")

    def clock(launch, tile):
        if tile.keys == 32:
            raise RuntimeError("out of resource: shared memory")
        return launch.width * tile.warps / 1e6

    rows = list(kernels.timed_tiles(torch.float16, "cpu", clock))
    expected = [
        (kernel, width, list(tile))
        for width in (64, 128)
        for kernel in KERNELS
        for tile in tile_candidates(kernel, arch="gfx1030", width=width)
    ]
    assert [
        (row.numbers["kernel"], row.numbers["head_dim"], row.numbers["tile"]) for row in rows
    ] == expected
    for row in rows:
        if row.numbers["tile"][1] == 32:
            assert "shared memory" in row.message and row.outcome == "skipped"
        else:
            milliseconds = row.numbers["head_dim"] * row.numbers["tile"][2] / 1e3
            assert row.numbers["ms"] == pytest.approx(milliseconds)

    # The backends are then timed with the fastest that can run, as a run would compute.
    monkeypatch.setattr(tiles, "_in_use", {})
    kernels.use_fastest(rows, "gfx1030")
    assert tile_shape("forward", arch="gfx1030", width=64) == (32, 16, 4)
    assert tile_shape("backward_kv", arch="gfx1030", width=64) == (16, 16, 4)
    assert tile_shape("forward", arch="gfx1030", width=128) == (32, 16, 8)


def test_a_device_without_streams_or_counts_is_skipped_with_the_reason(tmp_path):
    """As a CPU: a part that cannot prove anything says so, and does not pass."""
    from bloomery.bench.gpu_check import endurance, streamed, streams

    job = PartJob(tiny=True, folder=tmp_path, device="cpu", seconds=60.0, begin=silent)
    for part in (streams.races, streams.waits, streamed.streamed, endurance.memory_as_planned):
        (row,) = part(job)
        assert row.outcome == "skipped" and "cpu" in row.message


def test_a_slow_card_takes_shorter_sequences_and_a_small_one_skips(tmp_path, monkeypatch):
    """By the plan: fourteen micro-batches must fit into the limit of the part."""
    lengths = {}
    for gpu in ("RTX 4090", "RX 6700 XT"):
        machine = with_gpu(detect(), find_gpu(gpu))
        monkeypatch.setattr(speed, "machine_of", lambda _device, machine=machine: machine)
        job = PartJob(tiny=False, folder=tmp_path, device="cuda", seconds=90.0, begin=silent)
        plan = speed.capped_plan("qlora", job)
        lengths[gpu] = plan.data.sequence_length
        assert speed.planned_seconds(plan) <= 90.0
        assert plan.memory.limit <= 7.5 * GIB
    assert lengths == {"RTX 4090": 2048, "RX 6700 XT": 512}
    (row,) = speed.full(job)
    assert row.outcome == "skipped" and "the card has 12.0" in row.message


def test_a_large_model_has_as_many_layers_as_the_host_takes(tmp_path, monkeypatch):
    """8.03 billion parameters, of which each of 32 layers has 218 million: 46 GiB with gradients and states."""
    from bloomery.bench.gpu_check import streamed

    layers = {}
    for host_gib in (12, 32, 64):
        machine = with_gpu(detect(), find_gpu("RX 6700 XT"))
        host = machine.host.model_copy(
            update={"memory_bytes": host_gib * GIB, "memory_free_bytes": host_gib * GIB}
        )
        machine = machine.model_copy(update={"host": host})
        monkeypatch.setattr(streamed, "machine_of", lambda _device, machine=machine: machine)
        job = PartJob(tiny=False, folder=tmp_path, device="cuda", seconds=90.0, begin=silent)
        plan = streamed.large_plan(job)
        layers[host_gib] = plan.model.config.num_layers
        assert plan.memory.limit <= streamed.LARGE_CAP_GIB * GIB
        assert plan.train.stream == "layers" and plan.adapter.kind == "none"
    assert layers == {12: 1, 32: 17, 64: 32}


def test_weights_that_a_measurement_draws_are_those_of_its_own_model(tmp_path, monkeypatch):
    """A model that the same process builds later has the weights that it would have had alone."""
    monkeypatch.setattr(rig, "bound_memory", lambda _limit: None)  # of this process, for good
    job = PartJob(tiny=True, folder=tmp_path, device="cpu", seconds=60.0, begin=silent)
    plan = speed.capped_plan("qlora", job)
    before = build_state(plan).model.state_dict()
    losses = []
    for _ in range(2):
        (row,) = speed.qlora(job)
        assert row.outcome == "ok"
        losses.append((row.numbers["loss_before"], row.numbers["loss_after"]))
    after = build_state(plan).model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert losses[0] == losses[1]  # drawn in place, and yet from the seed


# Use


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A decoder with random weights, and the tokenizer of its vocabulary."""
    place = Path.cwd()
    plan = SmallRuns(tmp_path_factory.mktemp("model"), "cpu").plan("texts")
    os.chdir(place)
    return build_state(plan).model.eval(), load_tokenizer(plan.data.prepared)


def test_a_completion_is_compared_with_what_the_cpu_says_of_its_tokens(small_model):
    decoder, tokenizer = small_model
    numbers = use._compared_completions(decoder, decoder, tokenizer)
    assert use._problem_of_completion(numbers) == ""
    assert numbers["logp_error"] < 1e-4 and numbers["completion"] == numbers["on_the_cpu"]

    # A device that multiplies wrong takes other tokens, or is surer of the same ones.
    faulty = copy.deepcopy(decoder)
    faulty.lm_head.weight = torch.nn.Parameter(decoder.lm_head.weight.roll(1, 0))
    numbers = use._compared_completions(faulty, decoder, tokenizer)
    assert "the CPU" in use._problem_of_completion(numbers) and numbers["logp_loss"] > 0.1
    faulty.lm_head.weight = torch.nn.Parameter(decoder.lm_head.weight * 4)
    numbers = use._compared_completions(faulty, decoder, tokenizer)
    assert "log-probabilities" in use._problem_of_completion(numbers)
    faulty.lm_head.weight.data.fill_(torch.nan)
    numbers = use._compared_completions(faulty, decoder, tokenizer)
    assert "not finite" in use._problem_of_completion(numbers)


def test_of_two_equally_likely_tokens_the_device_may_take_another_one():
    numbers = {"completion": "ab", "on_the_cpu": "ac", "logp_loss": 0.01, "logp_error": 0.01}
    assert use._problem_of_completion(numbers) == ""
    assert use._problem_of_completion(numbers | {"logp_loss": 0.5}) == (
        "it completed 'ab', the CPU 'ac'"
    )


def test_the_command_whose_text_is_not_the_models_is_named(tmp_path, monkeypatch):
    printed = "def f(x):\n"

    def program(*_: str) -> list[str]:
        return [sys.executable, "-c", f"print({printed!r}, end='')"]

    monkeypatch.setattr(use, "python_module", program)
    commands = use._Commands(tmp_path, (), completion=("x):", "the CPU"))
    assert commands.generate_row("run").outcome == "ok"
    assert commands._problem_of_text("x):", "serve") == ""
    printed = "def f(y):\n"
    row = commands.generate_row("run")
    assert row.outcome == "wrong" and row.message == "it completed 'y):', the CPU 'x):'"
    # Without the model's own completion, the server is compared with the command.
    commands = use._Commands(tmp_path, ())
    assert commands.generate_row("run").outcome == "ok"
    assert commands._problem_of_text("x):", "serve") == "it completed 'x):', generate 'y):'"


def test_what_needs_a_run_that_failed_is_not_tried(tmp_path):
    commands = use._Commands(tmp_path, ())
    row = commands.if_there("eval", "run/checkpoints/step-*", lambda: Row(case="eval"))
    assert row.outcome == "skipped" and "an earlier command failed" in row.message
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    assert commands.if_there("eval", "run/checkpoints/step-*", lambda: Row(case="eval")) == (
        Row(case="eval")
    )


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_that_found_its_device_wrong_is_wrong(goes_on, tmp_path, monkeypatch):
    """As the event of its check says, also where it went on with other settings."""
    checked = {
        "device": "a GPU",
        "arch": "gfx1030",
        "torch": "2.13",
        "precision": "float16",
        "problem": "this GPU computes wrong gradients in q_proj with float16",
        "detail": "off by 3%",
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").write_text(to_json(StepChecked(**checked)) + "\n")
    program = [sys.executable, "-c", f"raise SystemExit({int(not goes_on)})"]
    monkeypatch.setattr(use, "python_module", lambda *_: program)
    row = use._Commands(tmp_path, ()).train_row("first.yaml", "run")
    assert row.outcome == "wrong"
    assert row.message == f"{checked['problem']} (off by 3%)"


# The page, and the door for a clone


def result_of_a_card(**changes) -> CheckResult:
    card = Card(
        name="AMD Radeon RX 6700 XT",
        device="cuda",
        memory_gib=11.98,
        driver="Linux 6.12.9",
        torch="2.13.0+rocm7.2",
        runtime="7.2",
        python="3.12.4",
    )
    parts = (
        PartResult(part="step", outcome="ok", seconds=100.0, limit_seconds=240.0),
        PartResult(part="same", outcome="wrong", seconds=50.0, limit_seconds=180.0),
        PartResult(part="ranks", outcome="skipped", seconds=5.0, limit_seconds=60.0),
    )
    fields = {
        "bloomery": "1.0",
        "day": "2027-01-31",
        "by": "Ada | L.",
        "tiny": False,
        "card": card,
        "limit_seconds": 1800.0,
        "parts": parts,
    }
    return CheckResult.model_validate(fields | changes)


def test_the_table_of_cards_is_made_of_the_files(tmp_path):
    text = cards_page.PAGE.read_text()
    assert cards_page.refreshed(text, cards_page.results_in(cards_page.RESULTS)) == text, (
        "run make pages"
    )
    assert cards_page.NONE in "\n".join(cards_page.cards_table([]))
    write_result(result_of_a_card(), tmp_path / "a.json")
    write_result(result_of_a_card(day="2027-02-01", by=""), tmp_path / "b.json")
    rows = list(cards_page.cards_table(cards_page.results_in(tmp_path)))[2:]
    assert rows == [
        "| AMD Radeon RX 6700 XT, 12 GiB | Linux 6.12.9 | 2.13.0+rocm7.2 | 2027-02-01 | anonymous | 1 | same | ranks |",
        "| AMD Radeon RX 6700 XT, 12 GiB | Linux 6.12.9 | 2.13.0+rocm7.2 | 2027-01-31 | Ada / L. | 1 | same | ranks |",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tiny": True}, "of --tiny"),
        ({"torch": "2.13.0+cpu"}, "no result of a card"),
        ({"device": "cpu"}, "no result of a card"),
    ],
)
def test_a_file_that_says_nothing_of_a_card_is_in_no_table(tmp_path, change, problem):
    result = result_of_a_card()
    card = result.card.model_copy(update={k: v for k, v in change.items() if k != "tiny"})
    result = result.model_copy(update={"card": card, "tiny": change.get("tiny", False)})
    write_result(result, tmp_path / "a.json")
    with pytest.raises(ValueError, match=problem):
        cards_page.results_in(tmp_path)


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(missing_packages.MODULES.values()) == sorted(
        re.split(r"[<>=~ ]", requirement)[0] for requirement in project["dependencies"]
    )
    assert missing_packages.main() == 0
    monkeypatch.setitem(missing_packages.MODULES, "nowhere.to_be_found", "nowhere")
    assert missing_packages.main() == 2
    message = capsys.readouterr().err
    assert "-m pip install nowhere" in message and "pip install torch" not in message


def test_a_clone_has_the_same_check():
    script = ROOT / "scripts" / "gpu_check.sh"
    ended = subprocess.run(
        [script, "--tiny", "--only", "waits"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert ended.returncode == 2 and "add --yes" in ended.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_the_shell_script_is_clean():
    subprocess.run(["shellcheck", str(ROOT / "scripts" / "gpu_check.sh")], check=True)
