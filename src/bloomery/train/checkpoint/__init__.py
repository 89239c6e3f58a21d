"""Checkpoints of a run, written while training goes on.

  saver.py               the folder: its files and their order, writing, reading, what is kept
  checkpointed_model.py  the part MODEL: all weights, LoRA matrices, or a method of PEFT
  rank_writers.py        several ranks write one checkpoint

Which checkpoint is valid is decided in `infer/model_folder.py`, which launchers read without torch.
Why it is so: docs/decisions/train.md.
"""
