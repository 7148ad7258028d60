"""The process that runs a program of a model's: limits itself, gives up everything, then runs it (rewards.md 7).

Started by `sandbox.py` as `python -I -B sandbox_child.py <limits as JSON>`, alone in its process: it imports nothing of
Headway. The program comes on one descriptor; to another one goes READY when the program is about to begin, then what
became of it, as one word and a text.

What the kernel keeps from the program: memory (RLIMIT_AS), processor time, by a seccomp filter every system call that
is not named here, and by Landlock, where the kernel has it, every file that is neither Python's nor the system's. So it
starts no process, opens no socket, creates, changes and removes no file, reads no memory of another process and sends
it no signal. None of it needs root or a namespace. Linux on x86_64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence

READY = "ready\n"
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_DUMPABLE = 1, 22, 38, 4
FILTER = 2
"""SECCOMP_MODE_FILTER"""
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH_X86_64 = 0xC000003E
NUMBER, ARCH, ARGUMENTS = 0, 4, 16
"""Offsets in seccomp_data; an argument has 8 bytes, the lower half first."""
X32 = 0x40000000

ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "ioctl": 16, "pread64": 17, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37,
    "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "chdir": 80, "fchdir": 81,
    "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115, "getsid": 124,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137,
    "fstatfs": 138, "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145, "arch_prctl": 158,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217,
    "set_tid_address": 218, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "newfstatat": 262, "readlinkat": 267, "faccessat": 269,
    "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "get_robust_list": 274, "epoll_pwait": 281, "eventfd2": 290,
    "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "getcpu": 309, "getrandom": 318, "membarrier": 324,
    "statx": 332, "rseq": 334, "faccessat2": 439, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47,
    "shutdown": 48, "getsockname": 51, "getpeername": 52, "setsockopt": 54, "getsockopt": 55}
FORK, VFORK, CLONE, CLONE3, EXECVE, EXECVEAT = 57, 58, 56, 435, 59, 322
OPEN, OPENAT, CREAT, OPENAT2, PRLIMIT, KILL_CALL, TKILL, TGKILL = 2, 257, 85, 437, 302, 62, 200, 234
SOCKETS = (41, 42, 43, 49, 50, 288)
"""socket, connect, accept, bind, listen, accept4"""
SOCKETPAIR, AF_UNIX = 53, 1
WRITES = (18, 76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 188, 190, 235, 258, 259, 260, 261, 263,
          264, 265, 266, 268, 280, 285, 296, 316, 319, 326, 437)
"""pwrite64, truncate, ftruncate, rename, mkdir, rmdir, creat, link, unlink, symlink, chmod ... and their *at forms,
fallocate, pwritev, memfd_create, copy_file_range, openat2"""
THREAD = 0x00010000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
"""The last one is O_TMPFILE without O_DIRECTORY."""

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, PATH_BENEATH = 444, 445, 446, 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache",
            "/etc/localtime", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu")
"""What may be read beside the libraries of the interpreter; one that a machine does not have is left out."""

BY_ERRNO = {errno.EAGAIN: "processes", errno.ENETUNREACH: "network", errno.EROFS: "files", errno.EACCES: "files",
            errno.ENOMEM: "memory"}
"""What an uncaught error of the program says that it has tried."""


class _Instructions:
    """A classic BPF program over seccomp_data: `test` and `end` for each rule, `end` for the default."""

    def __init__(self) -> None:
        self.code = b""

    def add(self, code: int, jt: int, jf: int, k: int) -> None:
        self.code += struct.pack("HBBI", code, jt, jf, k)

    def load(self, offset: int) -> None:
        self.add(0x20, 0, 0, offset)

    def end(self, action: int) -> None:
        self.add(0x06, 0, 0, action)

    def if_equal(self, value: int, action: int) -> None:
        self.add(0x15, 0, 1, value)
        self.end(action)

    def if_argument(self, number: int, argument: int, code: int, value: int, then: int, otherwise: int) -> None:
        """Of this system call: `then` where the lower half of the argument passes the jump `code` (0x15 equal, 0x45
        any bit set), else `otherwise`."""
        self.add(0x15, 0, 4, number)
        self.load(ARGUMENTS + 8 * argument)
        self.add(code, 0, 1, value)
        self.end(then)
        self.end(otherwise)


def rules(pid: int) -> bytes:
    """The filter for the process of this id."""
    made = _Instructions()
    made.load(ARCH)
    made.add(0x15, 1, 0, AUDIT_ARCH_X86_64)
    made.end(KILL)
    made.load(NUMBER)
    made.add(0x35, 0, 1, X32)
    made.end(ERRNO | errno.EPERM)
    for number in ALLOWED.values():
        made.if_equal(number, ALLOW)
    for number in (FORK, VFORK, EXECVE, EXECVEAT):
        made.if_equal(number, ERRNO | errno.EAGAIN)
    made.if_equal(CLONE3, ERRNO | errno.ENOSYS)  # its flags lie in memory: libraries use clone then
    for number in SOCKETS:
        made.if_equal(number, ERRNO | errno.ENETUNREACH)
    for number in WRITES:
        made.if_equal(number, ERRNO | errno.EROFS)
    made.if_argument(OPEN, 1, 0x45, WRITING, ERRNO | errno.EROFS, ALLOW)
    made.if_argument(OPENAT, 2, 0x45, WRITING, ERRNO | errno.EROFS, ALLOW)
    made.if_argument(SOCKETPAIR, 0, 0x15, AF_UNIX, ALLOW, ERRNO | errno.ENETUNREACH)  # event loops wake up by one
    made.if_argument(CLONE, 0, 0x45, THREAD, ALLOW, ERRNO | errno.EAGAIN)
    for number in (KILL_CALL, TGKILL):
        made.if_argument(number, 0, 0x15, pid, ALLOW, ERRNO | errno.EPERM)
    made.if_argument(PRLIMIT, 2, 0x15, 0, ALLOW, ERRNO | errno.EPERM)  # reading a limit, not setting one
    made.end(ERRNO | errno.EPERM)
    return made.code


def close_files(libc: ctypes.CDLL) -> None:
    """From now on only libraries are read. Nothing is done where the kernel has no Landlock."""
    handled = struct.pack("Q", READ_FILE | READ_DIR)
    ruleset = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if ruleset < 0:
        return
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    for path in (*READABLE, *(os.path.join(prefix, lib) for prefix in prefixes for lib in ("lib", "lib64"))):
        try:
            place = os.open(path, os.O_PATH)
        except OSError:  # not on this machine
            continue
        rights = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        failed = libc.syscall(LANDLOCK_ADD, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
        os.close(place)
        if failed:
            raise OSError(ctypes.get_errno(), f"Landlock takes no rule for {path}")
    if libc.syscall(LANDLOCK_RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock restricts nothing")
    os.close(ruleset)


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Give up everything, for good. Raises OSError where the kernel does not take it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, *arguments: object) -> None:
        whole = [*arguments, 0, 0, 0, 0][:4]
        if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in whole)):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({option}): {os.strerror(number)}")

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    code = rules(os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    prctl(PR_SET_DUMPABLE, 0)
    limits: Sequence[tuple[int, int]] = (
        (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_MEMLOCK, 0))
    for which, limit in limits:
        resource.setrlimit(which, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU first, which has a name of its own
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    close_files(libc)
    prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program))


def ended_by(error: BaseException) -> str:
    """The word for an error that the program did not catch."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes"
    return BY_ERRNO.get(error.errno or 0, "error") if isinstance(error, OSError) else "error"


def run(source: str, tests: str) -> None:
    """The program, then its tests in the names that it has made."""
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(source, "answer.py", "exec"), names)
    if tests:
        exec(compile(tests, "tests.py", "exec"), names)


def main() -> None:
    """On the command line {memory_bytes, cpu_s, given, saying}, the last two descriptors: one has {source, tests,
    token}, and to the other one READY is said, then the token of a program and tests that came to their end."""
    limits = json.loads(sys.argv[1])
    with os.fdopen(limits["given"], encoding="utf-8") as given:
        task = json.load(given)
    said = os.fdopen(limits["saying"], "w", encoding="utf-8")
    try:
        confine(limits["memory_bytes"], limits["cpu_s"])
    except (OSError, ValueError) as error:
        said.write(f"unconfined {error}")
        said.flush()
        os._exit(3)
    said.write(READY)
    said.flush()
    word = task["token"]
    try:
        run(task["source"], task["tests"])
    except SystemExit as error:
        word = "left" if task["tests"] or error.code not in (None, 0) else word
    except BaseException as error:
        word = f"{ended_by(error)} {type(error).__name__}: {str(error)[:200]}"
    with contextlib.suppress(OSError, ValueError):  # a program that closed it
        sys.stdout.flush()
    said.write(word)
    said.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
