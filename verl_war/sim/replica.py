"""One vLLM replica on a virtual clock: continuous batching, chunked prefill, preemption by recompute.

Follows vLLM V1's scheduler (vllm/v1/core/sched/scheduler.py, 0.27.1): running requests first, each decode one token,
prefill chunks share what is left of the token budget; then waiting requests in order, as long as their whole prompt
fits (`scheduler_reserve_full_isl`); without a free block the last request is preempted and recomputed. While nothing
but decoding happens, many steps are one event.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.kv_cache import BLOCK_TOKENS, Path, PrefixCache, blocks_for


class Request:
    """One turn on a replica.

    Attributes:
        path: Its context in the prefix cache; the last part is its own.
        cached_tokens: Prompt tokens found cached when it was first scheduled, vLLM's `num_cached_tokens`.
        generated: Tokens sampled so far; they survive a preemption.
        computed: Tokens of the context whose KV is computed, valid while it prefills.
        context_at: Context and step counter at which it began to decode.
    """

    __slots__ = (
        "key", "path", "prompt_tokens", "output_tokens", "priority", "order", "cached_tokens", "generated", "computed",
        "decode_context", "decode_begin", "decoding", "admission",
    )  # fmt: skip

    def __init__(self, key: int, path: Path, prompt_tokens: int, output_tokens: int, priority: int = 0) -> None:
        self.key = key
        self.path = path
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.priority = priority
        self.order = 0
        self.cached_tokens = -1
        self.generated = 0
        self.computed = 0
        self.decode_context = 0
        self.decode_begin = 0
        self.decoding = False
        self.admission = -1

    @property
    def target(self) -> int:
        """Tokens to compute before it decodes (again)."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Counters:
    """Totals of a replica since it started."""

    engine_steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_token_steps: float = 0.0
    used_blocks_peak: int = 0


class Replica:
    """A replica and its clock. The caller runs it: `submit`, then `end_steps` whenever `event_s` has come.

    Args:
        hardware: Step times and sizes.
        host_tokens: Capacity of the host tier; 0 for none.
        by_priority: vLLM's `scheduling_policy=priority`.
        slowdown: All steps take this many times longer.
        max_steps_per_event: 1 turns the summing up of decode steps off; for tests.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        host_tokens: int = 0,
        by_priority: bool = False,
        slowdown: float = 1.0,
        max_steps_per_event: int = 1 << 30,
    ) -> None:
        self.hardware = hardware
        self.slowdown = slowdown
        self.cache = PrefixCache(hardware.kv_capacity_tokens // BLOCK_TOKENS, host_tokens // BLOCK_TOKENS)
        self.counters = Counters()
        self.event_s: float | None = None
        self.event_version = 0
        self._by_priority = by_priority
        self._max_steps = max_steps_per_event
        self._orders = 0
        self._admissions = 0
        self._waiting: list[tuple[int, int, Request]] = []
        self._running: dict[int, Request] = {}
        self._prefilling: dict[int, Request] = {}
        self._loading: list[tuple[float, int, Request]] = []
        self._link_free_s = 0.0
        self._chunks: list[tuple[Request, int]] = []
        self._finish: list[tuple[int, int, Request]] = []
        self._step = 0
        self._decodes = 0
        self._kv_tokens = 0
        self._crossings = [0] * BLOCK_TOKENS
        self._begin_s = 0.0
        self._planned = 0

    @property
    def running(self) -> int:
        """Requests admitted, also those whose KV is on the way from the host."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests queued."""
        return len(self._waiting)

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request; it is considered at the next step's beginning."""
        self._orders += 1
        request.order = self._orders
        blocked = bool(self._waiting) and not self._by_priority
        heapq.heappush(self._waiting, (request.priority if self._by_priority else 0, request.order, request))
        if self._planned == 0:
            self._begin_steps(now_s)
        elif self._planned > 1 and not blocked:
            self._planned = self._steps_until(now_s)
            self._set_event(self._begin_s + self._steps_s(self._planned))

    def end_steps(self, now_s: float) -> list[Request]:
        """Complete the steps that end now, begin the next ones, and return the requests that finished."""
        finished = self._complete(self._planned) if self._planned else []
        self._begin_steps(now_s)
        return finished

    def progress(self, now_s: float) -> tuple[int, float, int]:
        """Steps, busy seconds and decoded tokens of the current event that lie before `now_s`."""
        if self._planned == 0:
            return 0, 0.0, 0
        done = self._steps_until(now_s)
        if self._begin_s + self._steps_s(done) > now_s:
            done -= 1
        return done, self._steps_s(done), done * self._decodes

    def drop_all(self) -> list[Request]:
        """The replica dies: forget everything and return the requests that it had."""
        lost = [*self._running.values(), *(entry[2] for entry in self._waiting)]
        self.cache = PrefixCache(self.cache.capacity_blocks)
        self._waiting, self._running, self._prefilling = [], {}, {}
        self._loading, self._chunks, self._finish = [], [], []
        self._decodes = self._kv_tokens = self._planned = 0
        self._crossings = [0] * BLOCK_TOKENS
        self._set_event(None)
        return lost

    # ---- one event: a number of steps ------------------------------------------------------------

    def _begin_steps(self, now_s: float) -> None:
        self._begin_s = now_s
        while self._loading and self._loading[0][0] <= now_s:
            request = heapq.heappop(self._loading)[2]
            self._prefilling[request.admission] = request
        self._chunks = []
        preempted = self._make_room_for_decodes()
        budget = self.hardware.max_num_batched_tokens - self._decodes
        budget, preempted = self._schedule_prefills(budget, preempted)
        if not preempted or not (self._decodes or self._chunks):
            self._admit(budget, now_s)
        if not self._decodes and not self._chunks:
            self._planned = 0
            assert self._loading or not self._waiting, "a waiting request does not fit into an empty replica"
            self._set_event(self._loading[0][0] if self._loading else None)
            return
        self.cache.take(self._crossings[self._step % BLOCK_TOKENS])
        # After a preemption nothing was admitted in this step; the next one tries again.
        self._planned = 1 if self._chunks or preempted else self._plan()
        self.counters.used_blocks_peak = max(self.counters.used_blocks_peak, self.cache.used_blocks)
        self._set_event(now_s + self._steps_s(self._planned))

    def _set_event(self, event_s: float | None) -> None:
        self.event_s = event_s
        self.event_version += 1

    def _make_room_for_decodes(self) -> bool:
        preempted = False
        while self._crossings[self._step % BLOCK_TOKENS] > self.cache.available_blocks:
            self._preempt(self._victim())
            preempted = True
        return preempted

    def _schedule_prefills(self, budget: int, preempted: bool) -> tuple[int, bool]:
        reserved = self._crossings[self._step % BLOCK_TOKENS]
        for request in list(self._prefilling.values()):
            if budget <= 0:
                break
            while request.admission >= 0:
                chunk = min(request.target - request.computed, budget)
                blocks = blocks_for(request.computed + chunk)
                if self.cache.missing_blocks(request.path, blocks) + reserved <= self.cache.available_blocks:
                    self.cache.fill(request.path, blocks)
                    self._chunks.append((request, chunk))
                    budget -= chunk
                    break
                preempted = True
                self._preempt(self._victim())
                reserved = self._crossings[self._step % BLOCK_TOKENS]
        return budget, preempted

    def _admit(self, budget: int, now_s: float) -> None:
        reserved = self._crossings[self._step % BLOCK_TOKENS]
        limit = self.hardware.max_num_seqs - len(self._running)
        while self._waiting and budget > 0 and limit > 0:
            request = self._waiting[0][2]
            match = self.cache.match(request.path, (request.target - 1) // BLOCK_TOKENS)
            needed = blocks_for(request.target) - match.blocks + match.idle_blocks + reserved
            if needed > self.cache.available_blocks:
                break
            heapq.heappop(self._waiting)
            limit -= 1
            self._admissions += 1
            request.admission = self._admissions
            request.computed = (match.blocks + match.host_blocks) * BLOCK_TOKENS
            self._running[request.admission] = request
            if request.cached_tokens < 0:
                request.cached_tokens = request.computed
                self.counters.prompt_tokens += request.prompt_tokens
                self.counters.cached_tokens += request.computed
            self.cache.acquire(request.path)
            if match.host_blocks:
                self._load(request, match.host_blocks, now_s)
                continue
            chunk = min(request.target - request.computed, budget)
            self.cache.fill(request.path, blocks_for(request.computed + chunk))
            self._prefilling[request.admission] = request
            self._chunks.append((request, chunk))
            budget -= chunk

    def _load(self, request: Request, host_blocks: int, now_s: float) -> None:
        """Fetch blocks from the host; vLLM's connector does it beside the steps, one transfer after another."""
        self.cache.fill(request.path, request.computed // BLOCK_TOKENS)
        load_bytes = host_blocks * BLOCK_TOKENS * self.hardware.kv_bytes_per_token
        self._link_free_s = max(self._link_free_s, now_s) + load_bytes / self.hardware.host_bytes_per_s
        heapq.heappush(self._loading, (self._link_free_s, request.admission, request))

    def _victim(self) -> Request:
        if self._by_priority:
            return max(self._running.values(), key=lambda request: (request.priority, request.order))
        return self._running[next(reversed(self._running))]

    def _preempt(self, request: Request) -> None:
        del self._running[request.admission]
        if request.decoding:
            context = self._context(request)
            request.generated += self._step - request.decode_begin
            self._stop_decoding(request, context)
            self.cache.release(request.path, context, blocks_for(context))
        else:
            self._prefilling.pop(request.admission, None)
            self._loading = [entry for entry in self._loading if entry[2] is not request]
            heapq.heapify(self._loading)
            self._chunks = [entry for entry in self._chunks if entry[0] is not request]
            self.cache.release(request.path, request.computed, blocks_for(request.computed))
        request.admission = -1
        self.counters.preemptions += 1
        heapq.heappush(self._waiting, (request.priority if self._by_priority else 0, request.order, request))

    def _context(self, request: Request) -> int:
        return request.decode_context + self._step - request.decode_begin

    def _stop_decoding(self, request: Request, context: int) -> None:
        request.decoding = False
        self._decodes -= 1
        self._kv_tokens -= context
        self._crossings[(request.decode_begin - request.decode_context) % BLOCK_TOKENS] -= 1

    def _plan(self) -> int:
        """How many pure decode steps nothing can interrupt but an arrival."""
        while self._finish and not self._is_current(self._finish[0]):
            heapq.heappop(self._finish)
        steps = min(self._finish[0][0] - self._step, self._max_steps)
        available = self.cache.available_blocks
        if self._decodes * (steps // BLOCK_TOKENS + 1) > available:
            for ahead in range(1, steps):
                available -= self._crossings[(self._step + ahead) % BLOCK_TOKENS]
                if available < 0:
                    steps = ahead
                    break
        if self._loading:
            steps = min(steps, self._steps_until(self._loading[0][0], steps))
        return steps

    def _is_current(self, entry: tuple[int, int, Request]) -> bool:
        return entry[2].decoding and entry[2].admission == entry[1]

    def _steps_s(self, steps: int) -> float:
        if self._chunks:
            tokens = sum(chunk for _, chunk in self._chunks)
            pairs = sum(chunk * (request.computed + (chunk + 1) / 2) for request, chunk in self._chunks)
            return self.slowdown * self.hardware.step_s(self._decodes, self._kv_tokens, tokens, pairs)
        return self.slowdown * self.hardware.decode_steps_s(self._decodes, self._kv_tokens, steps)

    def _steps_until(self, now_s: float, most: int | None = None) -> int:
        """Smallest number of the planned steps, at least 1, that ends at or after `now_s`."""
        low, high = 1, self._planned if most is None else most
        while low < high:
            middle = (low + high) // 2
            if self._begin_s + self._steps_s(middle) >= now_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _complete(self, steps: int) -> list[Request]:
        counters = self.counters
        counters.busy_s += self._steps_s(steps)
        counters.engine_steps += steps
        counters.decode_tokens += steps * self._decodes
        if steps > 1:
            ahead = range(self._step + 1, self._step + steps)
            cycles, rest = divmod(len(ahead), BLOCK_TOKENS)
            crossed = cycles * self._decodes + sum(self._crossings[at % BLOCK_TOKENS] for at in ahead[:rest])
            self.cache.take(crossed)
            counters.used_blocks_peak = max(counters.used_blocks_peak, self.cache.used_blocks)
        counters.kv_token_steps += steps * self.cache.used_blocks * BLOCK_TOKENS
        self._step += steps
        self._kv_tokens += steps * self._decodes
        finished = self._finish_decodes()
        for request, chunk in self._chunks:
            counters.prefill_tokens += chunk
            request.computed += chunk
            if request.computed == request.target:
                self._end_prefill(request, finished)
        return finished

    def _finish_decodes(self) -> list[Request]:
        finished = []
        while self._finish and self._finish[0][0] <= self._step:
            entry = heapq.heappop(self._finish)
            if not self._is_current(entry):
                continue
            request = entry[2]
            context = self._context(request)
            request.generated += self._step - request.decode_begin
            self._stop_decoding(request, context)
            del self._running[request.admission]
            self.cache.release(request.path, context, blocks_for(context))
            finished.append(request)
        return finished

    def _end_prefill(self, request: Request, finished: list[Request]) -> None:
        """The last chunk of a prompt also samples the first token."""
        del self._prefilling[request.admission]
        context = request.computed
        request.generated += 1
        if request.generated == request.output_tokens:
            del self._running[request.admission]
            self.cache.release(request.path, context, blocks_for(context))
            finished.append(request)
            return
        request.decoding = True
        request.decode_context = context
        request.decode_begin = self._step
        self._decodes += 1
        self._kv_tokens += context
        self._crossings[(self._step - context) % BLOCK_TOKENS] += 1
        ends_at = self._step + request.output_tokens - request.generated
        heapq.heappush(self._finish, (ends_at, request.admission, request))
