"""Runs tests on the simulated device: python tests/device/run.py [--device DEVICE] [--current 1] [--stream N] [others].

DEVICE is what `simulated_cards` reads: nvidia,2,4 or "amd:RX 6700 XT,1,12". With --build it only compiles. With
--current 1 the process of the tests uses the second device, as rank 1 does, and the first one must stay empty. With
--stream N weights of plans of tests stream from the host, and N micro-batches share each load of a layer.

Other arguments are pytest's. Of them `sample` is this folder and a test of another, which `make test` runs; `more` is
tests of others; `streamed` is those that hold with --stream.
"""

import os
import sys
from pathlib import Path

import simulated
from simulated_cards import vendor_of

# Tests of other folders that `run.py sample` adds to those of this one: a part of each that computes on a device.
RESUMED = "train/test_loop.py::test_a_resumed_run_equals_the_undisturbed_one_bitwise"
SAMPLE = (f"{RESUMED}[float32-adamw]",)
STAGES = ("1f1b", "interleaved", "tied")
# What `run.py more` adds, for `make soak`.
MORE = (
    "check",
    "infer/test_batched_completions.py",
    "train/test_checkpoint.py",
    "train/test_fine_tuning_options.py",
    RESUMED,
    "train/test_picture_rollouts.py",
    "train/test_picture_runs.py",
    "train/test_rollouts.py",
    "train/test_ppo_runs.py",
    "train/test_preference_runs.py",
    "train/test_profiler.py",
    "train/test_quantized_runs.py",
    "train/test_reward_models.py",
    *(f"train/test_pipeline.py::test_a_pipeline_trains_as_one_rank[{case}]" for case in STAGES),
    "train/test_ranks.py::test_losses_and_weights_are_those_of_one_rank",
    "train/test_ranks.py::test_a_stopped_run_on_the_same_mesh_resumes_to_the_same_bits",
    *(
        f"train/test_rollout_meshes.py::test_stages_train_as_one_rank[{case}-two stages]"
        for case in ("grpo", "ppo")
    ),
    "train/test_sampler.py::test_a_stop_in_a_rollout_makes_it_again",
    "train/test_trained_towers.py::test_a_run_resumes_to_the_same_bits_and_frozen_parts_stay",
    "evals",
)

# What `run.py --stream 2 streamed` runs, for `make soak`: objectives, kinds of models, resumed runs, all bitwise.
STREAMED = (
    "train/test_gemma4_runs.py",
    "train/test_hybrid_runs.py",
    "train/test_mixture_runs.py",
    "train/test_picture_rollouts.py",
    "train/test_ppo_runs.py",
    "train/test_preference_runs.py",
    "train/test_reference_model.py::test_a_resumed_run_has_the_same_reference",
    "train/test_rollouts.py",
    RESUMED,
)
ON_SEVERAL_RANKS = ("ranks", "shards", "copies", "pipeline")  # in the names of tests

arguments = sys.argv[1:]
chosen = "amd,2,4"
if arguments[:1] == ["--device"]:
    chosen = arguments[1]
    arguments = arguments[2:]
if arguments[:1] == ["--current"]:
    os.environ["BLOOMERY_SIMULATED_CURRENT"] = arguments[1]
    arguments = arguments[2:]
if arguments[:1] == ["--stream"]:
    os.environ["BLOOMERY_TESTS_STREAM"] = arguments[1]
    arguments = arguments[2:]
reason = simulated.why_not()
if reason:
    print(f"skipped: tests on the simulated device: {reason}")
    sys.exit(0)
simulated.build(vendor_of(chosen))
if arguments == ["--build"]:
    sys.exit(0)
os.environ.update(simulated.environment(chosen))
here = Path(__file__).parent
os.environ["PYTHONPATH"] += os.pathsep + str(here)  # for the plug-in of pytest
if "sample" in arguments:
    arguments.remove("sample")
    arguments += [str(here), *(str(here.parent / test) for test in SAMPLE), "-rs"]
if "more" in arguments:
    arguments.remove("more")
    arguments += [*(str(here.parent / test) for test in MORE), "-rs"]
if "streamed" in arguments:
    arguments.remove("streamed")
    arguments += [str(here.parent / test) for test in STREAMED]
    arguments += ["-k", " and ".join(f"not {name}" for name in ON_SEVERAL_RANKS)]
arguments = arguments or [str(here)]
plugin = ["-p", "simulated_reports"]
os.execv(sys.executable, [sys.executable, "-m", "pytest", *plugin, *arguments])
