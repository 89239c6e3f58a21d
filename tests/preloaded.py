"""Processes of Bloomery that need not import torch: they are forked by one that has, instead of started from nothing.

A start from nothing takes five seconds of a processor, a fork a twentieth of one. `Popen` is `subprocess.Popen` for
`python -m bloomery ...` and `python -c ...`: a process of its own with its own session, environment, streams and
command line, which starts its children (`CHILDREN`) the same way and is their parent. Whatever else is asked for
(another command, a variable that Python, torch or a library reads when it starts) is a start from nothing, as is
everything on other systems than Linux. A training process that a test starts without the command line is a child of the
process that forks.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Children by `core.child`: their second argument is their parent.
TALKING = (
    "bloomery.simulate.child",
    "bloomery.bench.child",
    "bloomery.check.attention_probes",
    "bloomery.hardware.probe_worker",
    "bloomery.data.prepare.workers",
    "bloomery.sweep.scoring_worker",
)
CHILDREN = (
    "bloomery.launch.worker",
    "dying_worker",
    "faulty_links_worker",
    "killed_worker",
    "paper_worker",
    "paper_rank_worker",
    "ranks",
    *TALKING,
)
MODULES = (
    "torch",
    "torch._dynamo",
    "bloomery.train.loop",
    "bloomery.runs.lifecycle",
    "bloomery.launch.worker",
    "bloomery.simulate.step",
    "bloomery.infer.generate",
    "bloomery.export.layouts",
    "bloomery.bench.rig",
)
# Read when an interpreter or a library starts: only a process that would start with the same ones may be forked.
EARLY = (
    "PYTHON",
    "LC_",
    "LANG",
    "LD_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "HIP_",
    "ROC",
    "HSA_",
    "NCCL_",
    "ATEN_",
    "DNNL_",
    "ONEDNN_",
    "GLIBC_",
)
# Of those, what is read later, by processes of their own or when something is compiled.
LATER = ("PYTHONPATH", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCHINDUCTOR_CACHE_DIR")
# And what a process that runs already can take over.
TAKEN_OVER = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_")
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
ROOM = 8192  # bytes for the command line that the system shows, and for the variables
SHARED = (
    "BLOOMERY_TESTS_PRELOADED"  # the process that forks for all processes of the tests, as JSON
)


def early(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(EARLY) and name not in LATER
    }


def alike(environment: Any, here: dict[str, str]) -> bool:
    """Whether a process with the variables `here`, forked, is one that would have started with `environment`."""
    there = early(environment)
    return here.keys() & set(TAKEN_OVER) <= there.keys() and all(
        there.get(name) == here.get(name) for name in {*there, *here} - set(TAKEN_OVER)
    )


def job_of(bound: dict[str, Any], modules: tuple[str, ...], here: Any) -> dict[str, Any] | None:
    """What a forked process has to know of arguments to `Popen._execute_child`; None if it is to start from nothing."""
    words = (
        [os.fspath(word) for word in bound["args"]]
        if isinstance(bound["args"], list | tuple)
        else []
    )
    environment = dict(os.environ if bound["env"] is None else bound["env"])
    how = next((word for word in words[1:6] if word in ("-m", "-c")), "none")
    flags = words[1 : words.index(how)] if how in words else ["none"]
    module = words[len(flags) + 2] if how == "-m" else how
    fit = (
        sys.platform == "linux"
        and words[:1] == [sys.executable]
        and set(flags) <= {"-P", "-X", "faulthandler"}
        and module in modules
        and alike(environment, here)
        and bound["preexec_fn"] is None
        and not bound["shell"]
    )
    if not fit:
        return None
    return {
        "words": words,
        "flags": flags,
        "module": module,
        "arguments": words[len(flags) + 3 :],
        "environment": environment,
        "cwd": os.fspath(bound["cwd"] or Path.cwd()),
        "session": bool(bound["start_new_session"]),
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "passed": list(bound["pass_fds"]),
    }


def bound_arguments(names: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    order = (
        "args",
        "executable",
        "preexec_fn",
        "close_fds",
        "pass_fds",
        "cwd",
        "env",
        "startupinfo",
        "creationflags",
        "shell",
        "p2cread",
        "p2cwrite",
        "c2pread",
        "c2pwrite",
        "errread",
        "errwrite",
        "restore_signals",
        "gid",
        "gids",
        "uid",
        "umask",
        "start_new_session",
        "process_group",
    )
    return dict(zip(order, names, strict=False)) | values


# In a process of the tests


class Server:
    """The process that has imported torch. It ends with this one."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="bloomery-preloaded-")
        self.address = f"{self.folder}/socket"
        self.early = early(os.environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-X", "faulthandler", __file__),
                    *(str(listener.fileno()), "-" * ROOM),
                ],
                stdin=subprocess.PIPE,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env=os.environ | {"ROOM": "-" * ROOM},
            )
        atexit.register(self.end)

    def share(self) -> None:
        """The processes that this one starts from now on connect to it instead of starting their own."""
        fields = {"address": self.address, "pid": self.process.pid, "early": self.early}
        os.environ[SHARED] = json.dumps(fields)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Client:
    """The connection of a process of the tests to the process that has imported torch."""

    def __init__(self, address: str, pid: int, early: dict[str, str]) -> None:
        self.pid, self.early = pid, early
        self.talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.talk.connect(address)

    @property
    def alive(self) -> bool:
        return not select.select([self.talk], [], [], 0)[0]  # nothing comes but its end

    def fork(self, job: dict[str, Any], streams: list[int]) -> tuple[int, socket.socket]:
        """The number of the new process, and where its ending will be told."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = json.dumps(job).encode("utf-8", "surrogatepass")
        self.talk.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(text) + 2**16)
        socket.send_fds(self.talk, [text], [theirs.fileno(), *streams])
        theirs.close()
        return int(ours.recv(64)), ours


_shared: dict[str, Any] | None = json.loads(os.environ.get(SHARED, "null"))
_client: Client | None = None
_starting = threading.Lock()


def client() -> Client:
    """Of the process that all tests share, or else, as where it has ended, of one for this process."""
    global _client
    with _starting:
        if _client is None and _shared is not None:
            with suppress(OSError):
                _client = Client(**_shared)
        if _client is None or not _client.alive:
            server = Server()
            _client = Client(server.address, server.process.pid, server.early)
        return _client


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, forked where that makes no difference (see the top)."""

    _ending: socket.socket | None = None
    _told: int | None = None  # the status, once it has been told

    def _execute_child(self, *names: Any, **values: Any) -> None:
        bound = bound_arguments(names, values)
        here = early(os.environ) if _shared is None else _shared["early"]
        job = job_of(
            bound,
            ("-c", "bloomery", *CHILDREN),
            here if _client is None else _client.early,
        )
        if job is None:
            super()._execute_child(*names, **values)
            return
        streams = [bound["p2cread"], bound["c2pwrite"], bound["errwrite"]]
        chosen = [number if given == -1 else given for number, given in enumerate(streams)]
        if "--parent" in job["arguments"]:  # which ends when this process does
            job["arguments"][job["arguments"].index("--parent") + 1] = str(client().pid)
        elif job["module"] in TALKING:
            job["arguments"][1] = str(client().pid)
        self.pid, self._ending = client().fork(job, [*chosen, *job["passed"]])
        self._child_created = True
        self._close_pipe_fds(
            *[
                bound[name]
                for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            ]
        )

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._ending is None:
            return super()._try_wait(wait_flags)
        # Kept: a time limit's signal may end this call before its result is noted, and it is asked again.
        if self._told is None:
            if wait_flags & os.WNOHANG and not select.select([self._ending], [], [], 0)[0]:
                return 0, 0
            told = self._ending.recv(64)
            if not told:
                raise ChildProcessError("the process that forks has ended")
            self._told = int(told)
        self._ending.close()
        return self.pid, self._told

    def _internal_poll(
        self, _deadstate: int | None = None, *defaults: Any, **values: Any
    ) -> int | None:
        if self._ending is None:
            return super()._internal_poll(_deadstate, *defaults, **values)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    number, status = self._try_wait(os.WNOHANG)
                    if number == self.pid:
                        self._handle_exitstatus(status)
            except (
                ChildProcessError
            ):  # as when the tests have ended and nobody waits: `__del__` gives a state
                if _deadstate is None:
                    raise
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    words: list[str],
    *,
    popen: type["subprocess.Popen[Any]"] = Popen,
    input: Any = None,
    timeout: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run` that captures the output."""
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    streams["stdin"] = subprocess.DEVNULL if input is None else subprocess.PIPE
    with popen(words, **streams, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.wait(), out, err)


# In the process that forks, and in those that it has forked


# streams of the parent: closing one would write what the parent has not written yet
_kept: list[Any] = []


def serve(clients: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks until the tests end. Returns in each forked process: what it is to be, its streams."""
    wake, endings = select.poll(), dict[int, tuple[int, socket.socket]]()
    talks = dict[int, socket.socket]()
    wake.register(clients, select.POLLIN)
    wake.register(0, select.POLLIN)
    while True:
        for ready, _ in wake.poll():
            if ready == 0:
                os._exit(0)
            if ready == clients.fileno():
                talk, _ = clients.accept()
                talks[talk.fileno()] = talk
                wake.register(talk, select.POLLIN)
                continue
            if ready in endings:
                number, listener = endings.pop(ready)
                wake.unregister(ready)
                os.close(ready)
                with listener, suppress(OSError):  # nobody waits for it any more
                    listener.send(str(os.waitpid(number, 0)[1]).encode())
                continue
            text, given, _, _ = socket.recv_fds(talks[ready], 2**20, 32)
            if not text:  # a process of the tests has ended
                wake.unregister(ready)
                talks.pop(ready).close()
                continue
            listener = socket.socket(fileno=given[0])
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            if not (number := os.fork()):
                return json.loads(text.decode("utf-8", "surrogatepass")), given[1:]
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            listener.send(str(number).encode())
            for descriptor in given[1:]:
                os.close(descriptor)
            watched = os.pidfd_open(number)
            endings[watched] = number, listener
            wake.register(watched, select.POLLIN)


def show(words: list[str], environment: dict[str, str]) -> None:
    """As the command line and the variables of this process, which tests look for."""
    begin, end, first, last = map(
        int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    )
    lines = [f"{name}={value}" for name, value in environment.items()]
    for start, size, texts in ((begin, end - begin, words), (first, last - first, lines)):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)[: size - 1]
        ctypes.memmove(start, shown.ljust(size, b"\0"), size)


def become(job: dict[str, Any], given: list[int]) -> NoReturn:
    """Runs the module or code as a new interpreter would. What this process had open, handled, registered is no more.

    `given`: its streams and what is passed on, which keeps its numbers. All signals are blocked until here, as between
    a fork and an exec: a handler of the parent would swallow those that come at once. From here on those are blocked
    that are in the process that asked for it, and not those of the one that forks, which may have been started while a
    signal was held back.
    """
    if job["session"]:
        os.setsid()
    kept = [0, 1, 2, *job["passed"]]
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1 + max(kept)) for descriptor in given]
    for descriptor, copy in zip(kept, copies, strict=True):
        os.dup2(copy, descriptor)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            with suppress(OSError):  # that of the listing itself
                os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS", ""):
        sys.modules["torch"].set_num_threads(int(threads))
    if threshold := os.environ.get("MALLOC_MMAP_THRESHOLD_", ""):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(threshold))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, job["blocked_signals"])
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    show(job["words"], job["environment"])
    atexit._clear()
    _kept.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            raw: Any = io.FileIO(descriptor, "r" if name == "stdin" else "w", closefd=False)
        except OSError:
            setattr(sys, name, None)
            continue
        buffer = io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffer,
            encoding=sys.__stdout__.encoding,
            errors=getattr(sys, f"__{name}__").errors,
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.disable()
    if "faulthandler" in job["flags"]:
        faulthandler.enable()
    sys.excepthook = sys.__excepthook__
    extra = [path for path in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    first = [] if "-P" in job["flags"] else [job["cwd"]]
    sys.path[:] = [*first, *extra, *(path for path in SYSTEM_PATH if path not in extra)]
    sys.argv = [job["module"], *job["arguments"]]
    code: Any = 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            if job["module"] == "-c":
                sys.modules["__main__"] = main = ModuleType("__main__")
                exec(compile(job["words"][len(job["flags"]) + 2], "<string>", "exec"), vars(main))
            else:
                runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = 0 if code is None else code if isinstance(code, int) else 1
    except BaseException as raised:
        # without this function
        raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
        sys.excepthook(type(raised), raised, raised.__traceback__)
        if isinstance(raised, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    for written in (sys.stdout, sys.stderr):
        try:
            if written is not None and not written.closed:
                written.flush()
        except OSError:
            code = code or 120  # as at the end of an interpreter
    os._exit(code & 0xFF)


def fork_children() -> None:
    """From now on the children of this process are forked where that makes no difference."""
    start, here = subprocess.Popen._execute_child, early(os.environ)

    def execute(self: Any, *names: Any, **values: Any) -> None:
        bound = bound_arguments(names, values)
        job = job_of(bound, CHILDREN, here)
        if job is None:
            start(self, *names, **values)
            return
        streams = [bound["p2cread"], bound["c2pwrite"], bound["errwrite"]]
        chosen = [number if given == -1 else given for number, given in enumerate(streams)]
        for written in (sys.stdout, sys.stderr):
            written.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if not self.pid:
            try:
                subprocess.Popen._execute_child = start  # type: ignore[method-assign]
                become(job, [*chosen, *job["passed"]])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        self._close_pipe_fds(
            *[
                bound[name]
                for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            ]
        )

    subprocess.Popen._execute_child = execute  # type: ignore[method-assign]


if __name__ == "__main__":
    clients = socket.socket(fileno=int(sys.argv[1]))
    SYSTEM_PATH = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    if 0 in select.select([clients, 0], [], [])[0]:
        sys.exit()  # the tests have ended, and nobody asked for anything
    gc.disable()
    for module in MODULES:
        __import__(module)
    gc.freeze()
    gc.enable()
    job, given = serve(clients)
    fork_children()
    become(job, given)
