"""`metrics.json`: the figures of a run for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.core.files import write_durably
from bloomery.core.text import redact_secrets
from bloomery.core.units import JOULES_IN_KWH
from bloomery.monitor.events import read_events
from bloomery.view.devices import device_figures
from bloomery.view.summary import RunSummary, summary_of


def write_metrics(
    run_dir: Path,
    planned: Mapping[str, float | None] | None = None,
    *,
    best_saved: int | None = None,
) -> Path:
    """Writes `metrics.json`: the figures of the run, computed from its events, and those `planned`.

    `best_saved`: the step of the best checkpoint.
    """
    summary = summary_of(read_events(run_dir / "events.jsonl"))
    summary.best_saved = best_saved
    path = run_dir / "metrics.json"
    write_durably(
        path, json.dumps({**metrics_of(summary), "planned": dict(planned or {})}, indent=2) + "\n"
    )
    return path


def metrics_of(summary: RunSummary) -> dict[str, Any]:
    """Figures of the run so far, for programs."""
    joules = summary.devices.joules
    last_step = summary.last_step
    ended = summary.ended
    return {
        "status": ended.status if ended else None,
        "error": redact_secrets(ended.error) if ended and ended.error else None,
        "step": summary.step,
        "max_steps": summary.planned_steps,
        "tokens": summary.tokens,
        "loss": last_step.loss if last_step else None,
        "smoothed_loss": summary.smoothed,
        "reward": summary.reward,
        "smoothed_reward": summary.smoothed_reward,
        "eval": asdict(summary.evaluation) if summary.evaluation else None,
        "best_eval": asdict(summary.best) if summary.best else None,
        "tokens_per_second": summary.tokens_per_second,
        "seconds": summary.seconds,
        "train_seconds": summary.step_seconds_total,
        "peak_memory_gib": summary.peak_gib,
        "energy_kwh": None if joules is None else joules / JOULES_IN_KWH,
        "energy_seconds": round(summary.devices.covered_seconds, 1),
        "joules_per_token": summary.joules_per_token,
        "devices": [device_figures(device) for device in summary.devices.all],
        "skipped_steps": summary.skipped,
        "resumes": summary.resumes,
        "recoveries": summary.recoveries,
        "warnings": [redact_secrets(text) for text in summary.warnings],
    }
