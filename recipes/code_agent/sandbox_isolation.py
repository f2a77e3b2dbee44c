"""What a process gives up before it becomes the sandboxed program: Linux system calls without any package.

Used by :mod:`sandbox_launcher` in a bare interpreter, so it imports only the standard library and little of it.

Sources: seccomp(2), landlock(7), capabilities(7), prctl(2); numbers from the kernel's uapi headers, version 6.12.
"""

import ctypes
import os
import resource
import struct

AF_UNIX = 1
_CLONE_NEWUSER = 0x10000000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 8, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name, *arguments):
    """Call a libc function; raise OSError naming it when it returns -1."""
    result = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments[:1]}: {os.strerror(number)}")
    return result


def become_subreaper():
    """Make orphaned descendants children of this process, so that none escapes by outliving its parent."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent():
    """Let the kernel kill this process when its parent dies; a change of user undoes that."""
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def forbid_new_privileges():
    """Make set-user-id programs powerless for this process and its descendants."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# --- user id and capabilities -----------------------------------------------------------------------------------------

_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION = 0x20080522


def change_user(uid, keep_reading):
    """Become the user and group ``uid`` for good.

    With ``keep_reading`` the right to read what belongs to others is kept (the caller then limits it to chosen
    directories with Landlock): an interpreter below a private home directory could not be started otherwise.
    """
    if keep_reading:
        _call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_reading:
        _keep_capability(_reading_capability())


def _capabilities():
    """Return the (effective, permitted, inheritable) bit sets of this process."""
    header, data = struct.pack("Ii", _CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _call("capget", ctypes.create_string_buffer(header), data)
    low = struct.unpack("6I", data.raw)
    return tuple(low[i] | low[i + 3] << 32 for i in range(3))


def _reading_capability():
    permitted = _capabilities()[1]
    for number in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE):
        if permitted >> number & 1:
            return number
    raise OSError(_EPERM, "neither CAP_DAC_READ_SEARCH nor CAP_DAC_OVERRIDE is permitted")


def _keep_capability(number):
    bits = 1 << number
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    _call("capset", header, ctypes.create_string_buffer(struct.pack("6I", bits, bits, bits, 0, 0, 0)))
    _call("prctl", _PR_CAP_AMBIENT, 2, number, 0, 0)


# --- resource limits --------------------------------------------------------------------------------------------------


def set_resource_limits(memory_bytes, file_bytes, cpu_s, num_files):
    """Set the limits that the kernel keeps for each process by itself."""
    limits = {
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
        # The soft limit sends SIGXCPU, the hard one a second later SIGKILL.
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NOFILE: (num_files, num_files),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (65536, 65536),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def limit_processes(num_processes, num_present):
    """Limit the user's processes to ``num_present`` (those that exist already) plus ``num_processes``.

    The kernel counts per user id, and also processes that a container can't see; the limit is raised until one fork
    works.
    """
    ceiling = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    for unseen in (0, 500, 2000, 8000, 32000, 128000):
        limit = num_present + unseen + num_processes
        if ceiling != resource.RLIM_INFINITY:
            limit = min(limit, ceiling)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, ceiling))
        try:
            pid = os.fork()
        except BlockingIOError:
            continue
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        return
    raise OSError(_EPERM, "the user has too many processes already")


# --- system call filter -----------------------------------------------------------------------------------------------

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Audit architecture, and column of the tables below."""

_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_SIGNAL_CALLS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (434, 434))
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open: the first argument is a process."""
_FORBIDDEN = (
    # Other ways to the network and past this filter: io_uring_setup, _enter, _register.
    *((425, 425), (426, 426), (427, 427)),
    # Other processes: ptrace, process_vm_readv, process_vm_writev, pidfd_getfd.
    *((101, 117), (310, 270), (311, 271), (438, 438)),
    # Namespaces and mounts: unshare, setns, mount, umount2, pivot_root, chroot, open_tree, move_mount, fsopen,
    # fsconfig, fsmount, fspick, mount_setattr, open_by_handle_at.
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51), (428, 428), (429, 429), (430, 430)),
    *((431, 431), (432, 432), (433, 433), (442, 442), (304, 265)),
    # Kernel facilities with a history: bpf, perf_event_open, add_key, request_key, keyctl, userfaultfd.
    *((321, 280), (298, 241), (248, 217), (249, 218), (250, 219), (323, 282)),
    # Memory that outlives its process or counts for none: shmget, semget, msgget, mq_open, memfd_create.
    *((29, 194), (64, 190), (68, 186), (240, 180), (319, 279)),
)

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _errno(number):
    return 0x00050000 | number


def _instruction(code, value, if_true=0, if_false=0):
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _program(machine, allow_network, allow_unix, protected_pids):
    """Return the filter as BPF machine code."""
    audit, column = _ARCHITECTURES[machine]
    code = [_instruction(_LOAD, 4), _instruction(_JUMP_EQUAL, audit, 1, 0), _instruction(_RETURN, _KILL)]
    code.append(_instruction(_LOAD, 0))
    if machine == "x86_64":
        # The x32 interface numbers the same calls differently.
        code += [_instruction(_JUMP_AT_LEAST, 0x40000000, 0, 1), _instruction(_RETURN, _errno(_ENOSYS))]
    for call in _FORBIDDEN:
        code += [_instruction(_JUMP_EQUAL, call[column], 0, 1), _instruction(_RETURN, _errno(_EPERM))]
    # clone3's flags lie in memory, where a filter can't look; the C library then falls back to clone.
    code += [_instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1), _instruction(_RETURN, _errno(_ENOSYS))]
    code += _when(_CLONE[column], _JUMP_BITS, [_CLONE_NEWUSER], _errno(_EPERM), _ALLOW)
    if not allow_network:
        families = [AF_UNIX] if allow_unix else []
        code += _when(_SOCKET[column], _JUMP_EQUAL, families, _ALLOW, _errno(_EACCES))
    for call in _SIGNAL_CALLS if protected_pids else ():
        code += _when(call[column], _JUMP_EQUAL, protected_pids, _errno(_EPERM), _ALLOW)
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def _when(call, test, values, verdict, otherwise):
    """Code for: if this is ``call``, return ``verdict`` if its first argument matches, else ``otherwise``."""
    body = [_instruction(_LOAD, 16)]
    for value in values:
        body += [_instruction(test, value, 0, 1), _instruction(_RETURN, verdict)]
    body.append(_instruction(_RETURN, otherwise))
    return [_instruction(_JUMP_EQUAL, call, 0, len(body)), *body]


def filter_system_calls(allow_network, allow_unix, protected_pids):
    """Deny system calls for this process and its descendants; needs :func:`forbid_new_privileges` first."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(_ENOSYS, f"no system call numbers are known for {machine}")
    program = _program(machine, allow_network, allow_unix, protected_pids)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    _call("prctl", _PR_SET_SECCOMP, 2, header, 0, 0)


# --- file system ------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


def landlock_version():
    """Return the version of Landlock that the kernel offers, 0 for none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def confine_files(version, readable, writable):
    """Leave this process and its descendants only these files; needs :func:`forbid_new_privileges` first.

    Args:
        version: what :func:`landlock_version` returned, at least 1.
        readable: paths below which everything may be read and executed; those that don't exist are passed over.
        writable: directories below which everything may be done.
    """
    everything = (1 << 13) - 1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scope = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", everything, 0, scope)[: 24 if version >= 6 else 8]
    ruleset = _call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in readable:
        _allow_below(ruleset, path, everything & (_EXECUTE | _READ_FILE | _READ_DIR))
    for path in writable:
        _allow_below(ruleset, path, everything)
    for path in _DEVICES:
        _allow_below(ruleset, path, everything & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow_below(ruleset, path, rights):
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
    _call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)
