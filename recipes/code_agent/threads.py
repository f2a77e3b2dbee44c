"""Blocking work beside an event loop, with a deadline that also holds when the work hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], deadline_s: float | None = None) -> Result:
    """Run ``work`` in a thread of its own and return its result; exceptions of the work are raised here.

    The thread is a daemon: unlike one of an executor, it keeps neither a pool's place nor the process's exit waiting
    when it hangs. When the deadline passes or the caller is cancelled, its result is dropped.

    Raises:
        TimeoutError: ``work`` took longer than ``deadline_s``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # handed to the waiting coroutine, whatever it is
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="code-agent", daemon=True).start()
    try:
        # Not wait_for: a TimeoutError of the work itself must stay distinguishable.
        finished, _ = await asyncio.wait([future], timeout=deadline_s)
        if not finished:
            raise TimeoutError(f"took more than {deadline_s:g} s")
        return future.result()
    finally:
        future.cancel()
