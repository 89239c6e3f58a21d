"""Reinforcement learning: completions of the model that trains are rewarded, and trained on.

  sample:   rollout_source -> sampler -> `infer/completions.py`
  score:    scoring -> rewards (functions and verifiers, each in a rewards_worker), reward_models
  train on: policy_scores (log-probabilities, values) -> advantages -> rollout, a part of checkpoints -> policy_loss
  PPO:      ppo: rewards and advantages of tokens, and its loss

`verifiers.py` is the table of rewards without code (json_answers, program_answers); `reward_files.py` tells a resume
what changed; `rollout_records.py` is what people read. Follow a step in docs/contributing/one-grpo-step.md.
"""
