"""What people read of a rollout: metrics under TRL's names, and a file of its completions."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from bloomery.core.files import write_durably
from bloomery.data.prompts import Prompt
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.completions import Completion, Episode
from bloomery.monitor.events import stamped_line
from bloomery.train.rl.policy_loss import deviation_of, mean_of, share_without_variance
from bloomery.train.rl.rewards import ScoredCompletions
from bloomery.train.rl.rollout import TARGETS, Rollout
from bloomery.train.rl.scoring import prompt_value


def completion_metrics(
    completions: Sequence[Completion], scored: ScoredCompletions, *, num_generations: int
) -> dict[str, float]:
    """TRL's names."""
    lengths = torch.tensor([text.num_sampled for text in completions], dtype=torch.float32)
    is_truncated = torch.tensor([text.truncated for text in completions])
    ended_lengths = lengths[~is_truncated]
    totals = torch.tensor(scored.totals, dtype=torch.float64)
    # Completions are compared with those of their prompt; one that is alone in its own, with all.
    groups = totals.view(-1, num_generations if num_generations > 1 else len(totals))
    deviations = [deviation_of(group) for group in groups]
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(is_truncated.float().mean()),
    }
    if scored.by_name:
        metrics["reward"] = mean_of(totals)
        metrics["reward_std"] = mean_of(torch.tensor(deviations, dtype=torch.float64))
    if scored.by_name and num_generations > 1:
        share = share_without_variance(scored.totals, num_generations)
        metrics["frac_reward_zero_std"] = share
    if len(ended_lengths):
        metrics["completions/mean_terminated_length"] = float(ended_lengths.mean())
    metrics |= _of_tools([text.episode for text in completions if text.episode is not None])
    for name, rewards in scored.by_name.items():
        known_rewards = [reward for reward in rewards if reward is not None]
        if known_rewards:
            numbers = torch.tensor(known_rewards, dtype=torch.float64)
            metrics[f"rewards/{name}/mean"] = mean_of(numbers)
            metrics[f"rewards/{name}/std"] = deviation_of(numbers, correction=0)
    return metrics


def _of_tools(episodes: Sequence[Episode]) -> dict[str, float]:
    """Calls of an episode, the share of calls that failed, and answers of an episode. TRL has the first two."""
    if not episodes:
        return {}
    num_calls = sum(episode.calls for episode in episodes)
    num_failed = sum(episode.failed for episode in episodes)
    of_environment = dict[str, list[float]]()
    for episode in episodes:
        for name, value in episode.metrics.items():
            of_environment.setdefault(f"environment/{name}", []).append(value)
    return {
        **{name: sum(values) / len(values) for name, values in of_environment.items()},
        "tools/call_frequency": num_calls / len(episodes),
        "tools/failure_frequency": num_failed / num_calls if num_calls else 0.0,
        "tools/turns": sum(episode.turns for episode in episodes) / len(episodes),
    }


def write_completions(
    run_dir: Path,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scored: ScoredCompletions,
    tokenizer: Tokenizer,
) -> None:
    """completions/step-00000001.jsonl, named after the first step that trains on them."""
    folder = run_dir / "completions"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{rollout.first_step + 1:08d}.jsonl"
    lines = []
    for index, (text, sample) in enumerate(zip(completions, rollout.samples, strict=True)):
        total = scored.totals[index]
        entry = {
            "prompt_ids": list(sample.prompt_ids),
            "completion_ids": text.ids,
            "prompt": prompt_value(prompts[text.prompt]),
            "completion": tokenizer.decode(text.ids),
            "rewards": {name: rewards[index] for name, rewards in scored.by_name.items()},
            "reward": None if total != total else total,
            "advantage": sample.advantage,
            "logps": text.logps,
            "truncated": text.truncated,
        }
        if prompts[text.prompt].pictures:  # which pages about the run read in the prepared dataset
            entry["prompt_number"] = sample.prompt_number
        if text.episode is not None:
            entry |= {"messages": text.episode.messages, "given": text.episode.given}
        if sample.targets is not None:
            # Of each token, in place of one for all of them.
            del entry["advantage"]
            entry |= {name: list(getattr(sample.targets, name)) for name in TARGETS}
        lines.append(stamped_line(json.dumps(entry, ensure_ascii=False)))
    write_durably(path, b"".join(lines))
