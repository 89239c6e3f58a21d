"""The exit codes of the child process of a run. No torch."""

DONE = 0
FAILED = 1
# Failures that have a fallback.
UNSOUND = 3  # a kernel computes wrong numbers
OUT_OF_MEMORY = 4
DIVERGED = 5  # loss, gradients or weights are not finite
LINK_FAILED = 6  # GPUs cannot send to each other
KERNEL_FAILED = 7  # an attention kernel cannot be compiled, loaded or launched
STOPPED = 75  # saved before the end; `EX_TEMPFAIL` of sysexits.h
