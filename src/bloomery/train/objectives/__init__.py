"""Objectives: what a micro-batch is trained for.

  build.py            BUILDERS: an objective for each kind
  objective.py        what an objective is: the head that the decoder runs, and the loss of its output
  pairs.py            objectives on pairs of texts, and KTO
  policies.py         objectives of reinforcement learning
  distillation.py     objectives with a teacher
  teacher.py          the teacher
  losses.py           losses of tokens, preference pairs, KTO and distillation, as sums; RL's are in `train/rl/`
  reference_files.py  the reference model's log-probabilities, computed before the first step
  reference_model.py  its frozen copy, where a rollout asks it at every step

Names and recipe facts of objectives are in `facts/objectives.py`. Why it is so: docs/decisions/train.md.
"""
