"""Actors of this process: what `actor.method.remote(...)` is to Ray, without Ray."""

import asyncio


class LocalActor:
    """Wraps an object of coroutines. `die()` makes it answer as an actor whose process was killed."""

    def __init__(self, target):
        self.target = target
        self.calls = []
        self._tasks = set()
        self._killed = set()
        self._death = None

    def die(self, error=None):
        from ray.exceptions import ActorDiedError

        self._death = error or ActorDiedError()
        for task in self._tasks:
            task.cancel()
        self._killed |= self._tasks
        self._tasks = set()

    def revive(self, target):
        self.target, self._death = target, None

    def __getattr__(self, name):
        if name.startswith("_") and name != "__ray_ready__":
            raise AttributeError(name)
        return _Method(self, name)


class _Method:
    def __init__(self, actor, name):
        self._actor, self._name = actor, name

    def remote(self, *args, **kwargs):
        self._actor.calls.append((self._name, args, kwargs))
        return asyncio.ensure_future(self._run(args, kwargs))

    async def _run(self, args, kwargs):
        from ray.exceptions import ActorDiedError

        if self._actor._death is not None:
            raise self._actor._death
        if self._name == "__ray_ready__":
            return True
        task = asyncio.ensure_future(getattr(self._actor.target, self._name)(*args, **kwargs))
        self._actor._tasks.add(task)
        try:
            return await asyncio.shield(task)  # as with Ray, a caller that goes away stops nothing
        except asyncio.CancelledError:
            if task in self._actor._killed:
                raise ActorDiedError() from None
            raise
        finally:
            if task.done():
                self._actor._tasks.discard(task)


class FakeServer:
    """A server of a replica: answers turns after `delay_s`, and counts what an engine would."""

    def __init__(self, delay_s=0.0, kv_capacity_tokens=100_000):
        self.delay_s = delay_s
        self.kv_capacity_tokens = kv_capacity_tokens
        self.running = {}
        self.served = []
        self.aborted = []
        self.engine_steps = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self.answer = None
        self.reading_error = None
        self.is_mute = False
        self.is_hung = False
        self.peers = []
        self.speculation = None

    async def generate(self, request_id, prompt_ids, sampling_params, priority=0, **_):
        from verl.workers.rollout.replica import TokenOutput

        self.served.append({"prompt_ids": list(prompt_ids), "priority": priority, "sampling": sampling_params})
        self.running[request_id] = len(prompt_ids)
        try:
            await asyncio.sleep(3600 if self.is_hung else self.delay_s)
            answer = self.answer(len(self.served)) if self.answer else None
            if isinstance(answer, Exception):
                raise answer
            return answer or TokenOutput(token_ids=[7, 8], log_probs=[0.0, 0.0], stop_reason="completed",
                                         extra_fields={"global_steps": 3, "num_cached_tokens": 64})  # fmt: skip
        finally:
            self.engine_steps += 20
            self.computed_tokens += 20
            self.busy_s += self.delay_s
            self.running.pop(request_id, None)

    async def war_share_with(self, peers):
        self.peers = peers

    async def war_history_reward(self, session_id, reward):
        pass

    async def war_speculation_stats(self):
        while self.is_mute:
            await asyncio.sleep(0.01)
        return self.speculation

    async def abort_request(self, request_id, reset_prefix_cache=True):
        assert not reset_prefix_cache, "it would cost all others their cache"
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    async def war_wait_for_engine(self):
        while self.is_mute or self.is_hung:
            await asyncio.sleep(0.01)

    async def war_snapshot(self):
        from verl_war.core.types import ReplicaSnapshot

        while self.is_mute:
            await asyncio.sleep(0.01)
        if self.reading_error:
            raise self.reading_error
        usage = min(1.0, sum(self.running.values()) / self.kv_capacity_tokens)
        return ReplicaSnapshot(running_requests=len(self.running), waiting_requests=0, kv_usage=usage,
                               kv_usage_peak=usage, kv_capacity_tokens=self.kv_capacity_tokens, preemptions=0,
                               engine_steps=self.engine_steps, computed_tokens=self.computed_tokens,
                               busy_s=self.busy_s)  # fmt: skip
