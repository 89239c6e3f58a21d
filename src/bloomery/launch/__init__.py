"""The processes of a run: how they start, what they tell each other, and how they end. No torch before `train_stage`.

  start:  supervisor -> worker (the child process) -> train_stage (a rank trains); launchers: torchrun, srun and others
  ask:    stop_flag (stop, or save), pausing, deadline of a rank without progress; rank_messages between hosts
  end:    exit_codes of a child, stage_ends: which rank ended the others
  jobs:   job_script for Slurm, cloud_jobs for rented machines

`runs/` decides what is started; this package keeps it alive. Why it is so: docs/decisions/runs.md.
"""
