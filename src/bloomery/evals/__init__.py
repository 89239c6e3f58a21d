"""Evaluation of a model or a run: `bloomery eval`.

  evaluate.py     loss, perplexity and bits per byte of texts; the accuracy of a reward model
  items.py        task files: multiple choice and exact match
  harness.py      tasks of lm-evaluation-harness
  rewards.py      a run that trains with rewards, on held-out prompts
  statistics.py   intervals and paired tests of what the others measure

`tasks.py` asks tasks of a model, and compares two models on tasks or texts. Why it is so: docs/decisions/evals.md.
"""
