"""The child process that opens .pth files, `python -m bloomery.export.pth_worker`: it can read them, and nothing else.

A .pth file is a pickle, a program that builds objects. Three walls stand around it: torch's `weights_only` unpickler
calls only functions that make tensors; the process has no environment, may not write files and has bounded memory; and
on Linux the kernel refuses it new programs, processes, files and sockets.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from bloomery.core.child import accept, loading, reply, requests

MARGIN = 2**30  # bytes of memory for Python and torch, without the tensors
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
# What the kernel refuses, by architecture: its audit number, and the numbers (asm/unistd.h) of open, openat, openat2,
# creat, socket, connect, bind, sendto, sendmsg, clone, fork, vfork, clone3, execve, execveat, kill, tkill, tgkill,
# ptrace, process_vm_readv, process_vm_writev, unlink, unlinkat, rename, renameat, renameat2, mkdir, mkdirat, chmod,
# fchmodat, io_uring_setup, memfd_create, mount and bpf, where it has them; then those of truncate, rmdir, link, linkat,
# symlink, symlinkat, mknod, mknodat, chown, lchown, fchownat, utime, utimes, futimesat, utimensat, setxattr, lsetxattr,
# removexattr, lremovexattr, fchmodat2; rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, pidfd_getfd, pidfd_send_signal,
# prlimit64; open_by_handle_at, mq_open, mq_unlink, add_key, request_key, keyctl; unshare, setns, umount2, chroot,
# open_tree, move_mount, fsopen, mount_setattr and perf_event_open.
REFUSED = {
    "x86_64": (0xC000003E, (
        2, 257, 437, 85, 41, 42, 49, 44, 46, 56, 57, 58, 435, 59, 322, 62, 200, 234, 101, 310, 311, 87, 263, 82, 264,
        316, 83, 258, 90, 268, 425, 319, 165, 321,
        76, 84, 86, 265, 88, 266, 133, 259, 92, 94, 260, 132, 235, 261, 280, 188, 189, 197, 198, 452,
        129, 297, 434, 438, 424, 302, 304, 240, 241, 248, 249, 250,
        272, 308, 166, 161, 428, 429, 430, 442, 298,
    )),
    "aarch64": (0xC00000B7, (
        56, 437, 198, 203, 200, 206, 211, 220, 435, 221, 281, 129, 130, 131, 117, 270, 271, 35, 38, 276, 34, 53, 425,
        279, 40, 280,
        45, 37, 36, 33, 54, 88, 5, 6, 14, 15, 452,
        138, 240, 434, 438, 424, 261, 265, 180, 181, 217, 218, 219,
        97, 268, 39, 51, 428, 429, 430, 442, 241,
    )),
}  # fmt: skip


def lock_down(memory: int) -> bool:
    """No files, no processes, no network and at most `memory` bytes from here on; False where the kernel has no such
    filter (only the limits hold then).
    """
    limits = ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0))
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
    if not sys.platform.startswith("linux") or platform.machine() not in REFUSED:
        return False
    audit, calls = REFUSED[platform.machine()]
    # Classic BPF: refuse another architecture, the numbers of x32 calls and those of the list; allow the rest.
    count = len(calls)
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, REFUSE), (0x20, 0, 0, 0)]
    program += [(0x35, count + 1, 0, 0x40000000)]
    program += [(0x15, count - index, 0, call) for index, call in enumerate(calls)]
    program += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    # struct sock_fprog: a length and, aligned, a pointer.
    filter_ = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kept = int(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    return (
        kept == 0 and int(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(filter_), 0, 0)) == 0
    )


def main() -> None:
    """Open the files of the job, answer with the names, dtypes and shapes in each, then with the bytes of tensors."""
    job = accept()
    with loading():
        import torch
    torch.set_num_threads(1)
    small = BytesIO()
    torch.save({"a": torch.zeros(1, dtype=torch.bfloat16)}, small)
    torch.load(BytesIO(small.getvalue()), weights_only=True)  # imports what it needs while files can be opened
    files = [Path(path).open("rb") for path in job["paths"]]  # noqa: SIM115  # they stay open to the end
    largest = sum(os.fstat(file.fileno()).st_size for file in files)
    locked = lock_down(_in_use() + largest + largest // 4 + MARGIN)
    states: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the file is untrusted
            reply(job, {"file": number, "error": f"{type(error).__name__}: {error}"[:2000]})
            return
        entries = state.items() if isinstance(state, dict) else ()
        states.append({name: each for name, each in entries if isinstance(name, str) and torch.is_tensor(each)})
    listing = [
        {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in state.items()}
        for state in states
    ]
    reply(job, {"tensors": listing, "locked": locked})
    for asked in requests(job):
        tensor = states[asked["file"]][asked["name"]].detach().contiguous()
        reply(job, {}, memoryview(tensor.flatten().view(torch.uint8).numpy()))


def _in_use() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
