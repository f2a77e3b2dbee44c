"""One vLLM replica on a virtual clock: continuous batching, chunked prefill, preemption by recompute.

Follows vLLM V1's scheduler (vllm/v1/core/sched/scheduler.py, 0.27.1): running requests first, each decode one token,
prefill chunks share what is left of the token budget; then waiting requests in order, as long as their whole prompt
fits (`scheduler_reserve_full_isl`); without a free block the last request is preempted and recomputed. While nothing
but decoding happens, many steps are one event.
"""

from __future__ import annotations

import heapq

from verl_war.sim.hardware import HardwareProfile
from verl_war.sim.kv_cache import BLOCK_TOKENS, PrefixCache, blocks_for
from verl_war.sim.request import Counters, Request
from verl_war.sim.speculation import Batch, Drafter, StepDrafts


class Replica:
    """A replica and its clock. The caller runs it: `submit`, then `end_steps` whenever `event_s` has come.

    Args:
        hardware: Step times and sizes.
        host_tokens: Capacity of the host tier; 0 for none.
        by_priority: vLLM's `scheduling_policy=priority`.
        slowdown: All steps take this many times longer.
        max_steps_per_event: 1 turns the summing up of decode steps off; for tests.
        drafter: Decides what is drafted; None for an engine without speculation.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        host_tokens: int = 0,
        by_priority: bool = False,
        slowdown: float = 1.0,
        max_steps_per_event: int = 1 << 30,
        drafter: Drafter | None = None,
    ) -> None:
        self.hardware = hardware
        self.slowdown = slowdown
        self.cache = PrefixCache(hardware.kv_capacity_tokens // BLOCK_TOKENS, host_tokens // BLOCK_TOKENS)
        self.counters = Counters()
        self.drafter = drafter
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
        self._batch: Batch | None = None
        self._batch_key = (0, 0, True)
        self._drafts: StepDrafts | None = None

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
        self._batch = self._drafts = None
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
        if self.drafter is not None:
            self._propose(self.drafter)
        # After a preemption nothing was admitted in this step; the next one tries again.
        self._planned = 1 if self._chunks or preempted or self._drafts is not None else self._plan()
        self.counters.used_blocks_peak = max(self.counters.used_blocks_peak, self.cache.used_blocks)
        self._set_event(now_s + self._steps_s(self._planned))

    def _propose(self, drafter: Drafter) -> None:
        self._batch = self._drafts = None
        last, self._batch_key = self._batch_key, (self._admissions, self._decodes, bool(self._chunks))
        if not self._decodes:
            return
        self._batch = Batch(
            requests=self._decodes + len(self._chunks),
            kv_tokens=self._kv_tokens,
            decoding=(request for request in self._running.values() if request.decoding),
            step=self._step,
            free_blocks=self.cache.available_blocks,
            is_steady=last == self._batch_key and not self._chunks,
            now_s=self._begin_s,
        )
        self._drafts = drafter.propose(self._batch)

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
            context = request.context(self._step)
            request.generated = request.position(self._step)
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

    def _stop_decoding(self, request: Request, context: int) -> None:
        request.decoding = False
        self._decodes -= 1
        self._kv_tokens -= context
        self._crossings[(request.decode_begin - request.decode_context) % BLOCK_TOKENS] -= 1

    def _plan(self) -> int:
        """How many pure decode steps nothing can interrupt but an arrival."""
        while self._finish and not self._is_current(self._finish[0]):
            heapq.heappop(self._finish)
        most = self._max_steps if self.drafter is None else min(self._max_steps, self.drafter.plain_steps)
        steps = min(self._finish[0][0] - self._step, most)
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
        if self._chunks or self._drafts is not None:
            tokens = sum(chunk for _, chunk in self._chunks)
            pairs = sum(chunk * (request.computed + (chunk + 1) / 2) for request, chunk in self._chunks)
            if self._drafts is not None:
                return self._draft_step_s(self._drafts, tokens, pairs)
            return self.slowdown * self.hardware.step_s(self._decodes, self._kv_tokens, tokens, pairs)
        return self.slowdown * self.hardware.decode_steps_s(self._decodes, self._kv_tokens, steps)

    def _draft_step_s(self, drafts: StepDrafts, tokens: int, pairs: float) -> float:
        hardware = self.hardware
        seconds = hardware.step_s(self._decodes, self._kv_tokens, tokens + drafts.tokens, pairs + drafts.pairs)
        return self.slowdown * (seconds + hardware.draft_s(self._decodes, drafts.tokens))

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
        seconds = self._steps_s(steps)
        counters.busy_s += seconds
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
        if self.drafter is not None and self._batch is not None:
            self.drafter.observe(self._batch, self._drafts, steps, seconds)
        if self._drafts is not None:
            self._accept(self._drafts)
        finished = self._finish_decodes()
        for request, chunk in self._chunks:
            counters.prefill_tokens += chunk
            request.computed += chunk
            if request.computed == request.target:
                self._end_prefill(request, finished)
        if self.drafter is not None:
            for request in finished:
                self.drafter.on_end(request.output_tokens)
        return finished

    def _accept(self, drafts: StepDrafts) -> None:
        """Accepted tokens take no iteration of their own: their requests go on as if they had begun with them."""
        self.counters.drafted_tokens += drafts.tokens
        self.counters.accepted_tokens += drafts.accepted
        self.counters.decode_tokens += drafts.accepted
        for draft in drafts.drafts:
            request, accepted = draft.request, draft.accepted
            if not accepted:
                continue
            context = request.context(self._step)
            self.cache.take(blocks_for(context + accepted) - blocks_for(context))
            self._crossings[(request.decode_begin - request.decode_context) % BLOCK_TOKENS] -= 1
            request.decode_context += accepted
            self._crossings[(request.decode_begin - request.decode_context) % BLOCK_TOKENS] += 1
            request.generated += accepted
            self._kv_tokens += accepted
            heapq.heappush(self._finish, (self._finish_step(request), request.admission, request))
        self._drafts = None

    def _finish_step(self, request: Request) -> int:
        """Step counter at which it has sampled all its tokens, without further drafts."""
        return request.decode_begin + request.output_tokens - request.generated

    def _finish_decodes(self) -> list[Request]:
        finished = []
        while self._finish and self._finish[0][0] <= self._step:
            entry = heapq.heappop(self._finish)
            if not self._is_current(entry):
                continue
            request = entry[2]
            context = request.context(self._step)
            request.generated = request.position(self._step)
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
        heapq.heappush(self._finish, (self._finish_step(request), request.admission, request))
