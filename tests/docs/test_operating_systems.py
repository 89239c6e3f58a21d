"""The page of what needs Linux lists every module that uses it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/bloomery"
PAGE = ROOT / "docs/reference/operating-systems.md"
# Row of the page -> functions, constants and keywords of Python's library; and its modules.
NEEDS = {
    "locks, limits": "posix_fadvise posix_fallocate preadv statvfs O_NOFOLLOW O_DIRECTORY O_CLOEXEC",
    "users": "getuid geteuid getgid getgroups fchmod",
    "fork": "fork forkpty register_at_fork",
    "child processes": "setsid start_new_session process_group preexec_fn pass_fds killpg"
    " waitstatus_to_exitcode WNOHANG",
    "signals": "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGQUIT pthread_sigmask setitimer",
    "Linux calls": "memfd_create prctl unshare pidfd_open sched_getaffinity sched_setaffinity",
    "Unix sockets": "AF_UNIX send_fds recv_fds",
}
ROWS = {name: row for row, names in NEEDS.items() for name in names.split()}
MODULES = {"fcntl": "locks, limits", "resource": "locks, limits", "pwd": "users", "grp": "users"}
KERNEL_FILES = "kernel files"
# Files without any of these need not be parsed, which takes seconds for all.
ANY_NEED = re.compile(rf"\b({'|'.join([*ROWS, *MODULES])})\b|[\"']/?(proc|sys|dev)/")


def needs_of(source: str) -> set[str]:
    """The rows of the page to which a file belongs."""
    found = set()
    for node in ast.walk(ast.parse(source)) if ANY_NEED.search(source) else ():
        match node:
            case ast.Import(names=names):
                found |= {MODULES[alias.name] for alias in names if alias.name in MODULES}
            case ast.ImportFrom(module=str(name)) if name in MODULES:
                found.add(MODULES[name])
            case ast.Attribute(attr=name) | ast.keyword(arg=name):
                found |= {ROWS[name]} if name in ROWS else set()
            case ast.Constant(value=str(text)):
                found |= {ROWS[text]} if text in ROWS else set()
                found |= {KERNEL_FILES} if re.match(r"/?(proc|sys|dev)/[^ ]+$", text) else set()
    return found


def test_a_use_is_seen():
    assert needs_of('import fcntl\nos.kill(1, signal.SIGKILL)\nopen("/proc/self/status")') == {
        "locks, limits",
        "signals",
        KERNEL_FILES,
    }
    assert needs_of('run("a/proc/x", "see /proc/cpuinfo for it")') == set()


def test_the_page_lists_every_module_that_needs_posix_or_linux():
    used: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for row in needs_of(path.read_text()):
            used.setdefault(row, set()).add(path.relative_to(SOURCE).as_posix())
    listed = {
        row: set(re.findall(r"`([\w/]+\.py)`", files))
        for row, files in re.findall(r"^\| ([^|`]+?) \|[^|]*\|([^|]*)\|", PAGE.read_text(), re.M)
    }
    assert {row: listed.get(row) for row in used} == used
