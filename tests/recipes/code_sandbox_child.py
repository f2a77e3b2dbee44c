"""Runs one sandbox for the tests, in a process that has another user id or fewer capabilities than theirs.

stdin: JSON with ``code`` (Python for the sandbox), ``limits``, ``python`` and, optional, ``capabilities`` (numbers to
keep in the bounding set). stdout: JSON of the result, or ``{"sandbox_error": text}``.
"""

import ctypes
import dataclasses
import json
import os
import sys


def _keep_capabilities(kept):
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        if number not in kept:
            libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP; an unknown number is an error without effect
    os.execv(sys.executable, [sys.executable, __file__, "again"])


def _main():
    request = json.loads(os.environ.pop("CODE_SANDBOX_REQUEST"))
    if "capabilities" in request and sys.argv[1:] != ["again"]:
        os.environ["CODE_SANDBOX_REQUEST"] = json.dumps(request)
        _keep_capabilities(request["capabilities"])
    from recipes.code_agent.sandbox import SandboxError, SandboxLimits, run_in_sandbox

    command = [request["python"], "-I", "-S", "-B", "-c", request["code"]]
    try:
        reply = dataclasses.asdict(run_in_sandbox(command, "/usr", SandboxLimits(**request["limits"])))
    except SandboxError as error:
        reply = {"sandbox_error": str(error)}
    print(json.dumps(reply))


_main()
