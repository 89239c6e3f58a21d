"""Checks a machine with a GPU in under 9 minutes: `scripts/gpu_check.sh [--tiny] [--only PART,PART] [RESULT.json]`.

The doctor's probes; full training, LoRA and QLoRA of the real shapes under a capped allocator, plan beside measurement;
the same through TRL, transformers and PEFT where they are installed; every attention backend, forward and backward, at
512 to 8,192 tokens, packed and not; one training step in each precision against float32 on the CPU.
Each part is a process of its own with its own time; one that fails is written down, and the others go on. `--tiny` runs
the same code with small shapes on whatever is here.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOTAL_SECONDS = 525.0
SECONDS = {  # the most that each part may take; together less than nine minutes
    "probes": 90,
    "full": 90,
    "lora": 85,
    "qlora": 85,
    "theirs-lora": 50,
    "theirs-qlora": 55,
    "theirs-full": 50,
    "attention": 240,
    "use": 180,
    "pipeline": 60,
    "step": 240,
}
MODULES = {  # as they are imported: what pip calls them
    "click": "click",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pynvml": "nvidia-ml-py",
    "pydantic": "pydantic",
    "rich": "rich",
    "ruamel.yaml": "ruamel.yaml",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "uvicorn": "uvicorn",
}
TARGETS = {"full": 22.0, "lora": 17.0, "qlora": 7.5}  # GiB
TITLES = {
    "full": "Llama-2-7B, every weight, 2,048 tokens",
    "lora": "Llama-3.1-8B, LoRA, 2,048 tokens",
    "qlora": "Llama-3.1-8B, QLoRA (nf4), 2,048 tokens",
}
# torchtune's README, not measured by us: Llama-3.1-8B, 2 packed rows of 2,048 tokens, compiled
PUBLISHED = [
    {
        "who": "torchtune",
        "method": "full",
        "card": "RTX 4090",
        "gib": 18.9,
        "tokens_per_second": 1650,
    },
    {
        "who": "torchtune",
        "method": "full",
        "card": "RTX A6000",
        "gib": 37.4,
        "tokens_per_second": 2579,
    },
    {
        "who": "torchtune",
        "method": "lora",
        "card": "RTX 4090",
        "gib": 16.2,
        "tokens_per_second": 3083,
    },
    {
        "who": "torchtune",
        "method": "lora",
        "card": "RTX A6000",
        "gib": 30.3,
        "tokens_per_second": 4699,
    },
    {
        "who": "torchtune",
        "method": "qlora",
        "card": "RTX 4090",
        "gib": 7.4,
        "tokens_per_second": 2413,
    },
]


def missing() -> list[str]:
    """Packages that the check needs and this python lacks; torch first."""
    lacking = [] if importlib.util.find_spec("torch") else ["torch"]
    for module, package in MODULES.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the parent of a dotted name
            found = False
        lacking += [] if found else [package]
    return lacking


def refuse(lacking: list[str]) -> int:
    """Says what to install. PyTorch has many builds, and which one fits is not for pip to choose."""
    print(f"missing: {', '.join(lacking)}", file=sys.stderr)
    if "torch" in lacking:
        print(
            "PyTorch first: https://pytorch.org/get-started names the build for this GPU",
            file=sys.stderr,
        )
    if rest := [package for package in lacking if package != "torch"]:
        print(f"{sys.executable} -m pip install {' '.join(rest)}", file=sys.stderr)
    return 2


def run_part(name: str, folder: Path, *, tiny: bool, seconds: float) -> dict[str, Any]:
    """One child from its start to its end, whatever that is."""
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [
        sys.executable,
        str(HERE / "gpu_check_parts.py"),
        name,
        str(out),
        *(["--tiny"] if tiny else []),
    ]
    begun = time.perf_counter()
    with log.open("w") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(child)
    told = {"part": name, "seconds": round(time.perf_counter() - begun, 1)}
    if code == 0 and out.is_file():
        return told | json.loads(out.read_text())
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code is None:
        return told | {
            "outcome": "timeout",
            "message": f"no end within {seconds:.0f} s",
            "last": lines[-3:],
        }
    return told | {
        "outcome": "failed",
        "message": (lines or [f"exit code {code}"])[-1][:300],
        "last": lines[-12:],
    }


def stop(child: "subprocess.Popen[bytes]") -> None:
    """The child and all that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def verdicts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target beside what was measured; `met` None: it could not be measured."""
    by_name = {part["part"]: part for part in parts}
    found = []
    for name, target in TARGETS.items():
        ours, theirs = by_name.get(name, {}), by_name.get(f"theirs-{name}", {})
        held = ours.get("reserved_gib") or ours.get("peak_gib")
        rates = ours.get("tokens_per_second"), theirs.get("tokens_per_second")
        ratio = rates[0] / rates[1] if rates[0] and rates[1] else None
        found.append(
            {
                "what": TITLES[name],
                "part": name,
                "target_gib": target,
                "measured_gib": held,
                "memory_met": None if held is None else held < target,
                "times_theirs": ratio,
                "faster": None if ratio is None else ratio > 1,
            }
        )
    return found


def page(report: dict[str, Any]) -> str:
    """The tables that a person reads."""
    lines = [f"{report['device']}, torch {report['torch']}, {report['seconds']:.0f} s", ""]
    lines.append(
        f"{'part':<14}{'outcome':<9}{'GiB':>7}{'held':>7}{'plan':>7}{'tok/s':>9}{'plan':>9}{'rows':>6}  note"
    )
    for part in report["parts"]:
        cells = [part.get(key) for key in ("peak_gib", "reserved_gib", "planned_gib")]
        rates = [part.get(key) for key in ("tokens_per_second", "planned_tokens_per_second")]
        memory = "".join(f"{value:>7.2f}" if value is not None else f"{'':>7}" for value in cells)
        speed = "".join(f"{value:>9,.0f}" if value is not None else f"{'':>9}" for value in rates)
        rows = f"{part.get('micro_batch_size', ''):>6}"
        lines.append(
            f"{part['part']:<14}{part['outcome']:<9}{memory}{speed}{rows}  {part.get('message', '')[:100]}"
        )
    for part in report["parts"]:
        lines += attention_lines(part)
        lines += step_lines(part)
    lines += [
        "",
        "GiB: what tensors held at the peak (plan: as `bloomery plan` says); held: what the allocator held",
    ]
    for verdict in report["targets"]:
        lines.append(f"{verdict['what']:<42} {_judged(verdict)}")
    lines += ["", "Published by others, on other cards:"]
    for row in report["published"]:
        rate = f"{row['tokens_per_second']:,} tok/s"
        lines.append(
            f"  {row['who']} {row['method']:<6} {row['card']:<10} {row['gib']:>5.1f} GiB {rate:>12}"
        )
    return "\n".join(lines)


def attention_lines(part: dict[str, Any]) -> list[str]:
    """The tables of the part that has them."""
    printed = []
    for row in part.get("lengths", []):
        kind = "packed" if row["packed"] else "one document"
        head = f"  {row['length']:>6} tokens, {kind:<13}"
        if "skipped" in row:
            printed.append(f"{head} {row['skipped']}")
            continue
        by_time = sorted(row["to_the_best"].items(), key=lambda item: item[1])
        cells = [
            f"{name} {row['forward_and_backward_ms'][name]:.2f} ms ({ratio:.2f}x)"
            for name, ratio in by_time
        ]
        cells += [f"{name} failed" for name in row["problems"]]
        unequal = [name for name, equal in row["repeats_have_equal_bits"].items() if not equal]
        cells += [f"bits differ on repeat: {', '.join(unequal)}"] if unequal else []
        printed.append(f"{head} {'; '.join(cells)}")
    for row in part.get("tiles", []):
        time_text = f"{row['ms']:.3f} ms" if "ms" in row else row["problem"][:80]
        tile = " x ".join(map(str, row["tile"]))
        printed.append(f"  {row['kernel']:<12} width {row['width']:<4} tile {tile:<13} {time_text}")
    if printed:
        printed.insert(0, "Attention, forward and backward, fastest first:")
    return printed


def step_lines(part: dict[str, Any]) -> list[str]:
    """Each recipe and precision whose step was compared with the CPU's."""
    printed = []
    for row in part.get("steps", []):
        head = f"  {row['recipe']:<26} {row['precision']:<9} {row['attention']:<12}"
        head += f" {'compiled' if row['compiled'] else 'uncompiled':<10}"
        if row["outcome"] == "ok":
            printed.append(f"{head} equals the CPU's, {row['seconds']:.1f} s")
        else:
            printed.append(f"{head} {row['message']} ({row['detail']})")
        if row["unrepeatable"]:
            printed.append(f"{'':<24}different bits at the second time: {row['unrepeatable']}")
    if printed:
        printed.insert(0, "One training step against float32 on the CPU:")
    return printed


def _judged(verdict: dict[str, Any]) -> str:
    if verdict["memory_met"] is None:
        return f"under {verdict['target_gib']} GiB: not measured"
    met = "met" if verdict["memory_met"] else "NOT MET"
    said = f"under {verdict['target_gib']} GiB: {verdict['measured_gib']:.2f}, {met}"
    if verdict["times_theirs"] is None:
        return said + "; nothing to compare the speed with"
    return said + f"; {verdict['times_theirs']:.2f} times as fast as theirs"


def check(out: Path | None, *, tiny: bool, only: list[str]) -> tuple[dict[str, Any], Path]:
    """Runs the parts and writes what they found after each one, so that an end from outside costs the rest alone."""
    begun = time.perf_counter()
    device = describe()
    plain = re.sub(r"[^a-z0-9]+", "-", device["device"].lower()).strip("-")
    path = out or HERE / "results" / f"gpu_check-{plain}{'-tiny' if tiny else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = device | {"tiny": tiny, "day": time.strftime("%Y-%m-%d"), "parts": []}
    with tempfile.TemporaryDirectory() as place:
        for name in only or SECONDS:
            left = TOTAL_SECONDS - (time.perf_counter() - begun)
            if left < 5:
                skipped = {
                    "part": name,
                    "outcome": "skipped",
                    "message": "time limit reached",
                    "seconds": 0,
                }
                report["parts"].append(skipped)
                continue
            print(f"{name} ...", flush=True)
            report["parts"].append(
                run_part(name, Path(place), tiny=tiny, seconds=min(SECONDS[name], left))
            )
            report |= {"seconds": round(time.perf_counter() - begun, 1), "published": PUBLISHED}
            report["targets"] = [] if tiny else verdicts(report["parts"])
            path.write_text(json.dumps(report, indent=1) + "\n")
    return report, path


def describe() -> dict[str, Any]:
    """The device and what runs on it; asked of a child, as a driver that was woken keeps memory."""
    code = (
        "import json, platform, torch; gpu = torch.cuda.is_available();"
        "of = torch.cuda.get_device_properties(0) if gpu else None;"
        "print(json.dumps({'device': of.name if gpu else platform.processor() or platform.machine() or 'cpu',"
        "'memory_gib': of.total_memory / 2**30 if gpu else None, 'torch': torch.__version__, 'hip': torch.version.hip,"
        "'cuda': torch.version.cuda, 'python': platform.python_version()}))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", nargs="?", type=Path, help="benchmarks/results/gpu_check-DEVICE.json"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever is here")
    parser.add_argument("--only", default="", metavar="PART,PART", help=", ".join(SECONDS))
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    if unknown := set(only) - SECONDS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(SECONDS)}")
    if lacking := missing():
        return refuse(lacking)
    report, path = check(asked.out, tiny=asked.tiny, only=only)
    print("\n" + page(report) + f"\n\nwritten to {path}")
    return 0 if all(part["outcome"] in ("ok", "skipped") for part in report["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
