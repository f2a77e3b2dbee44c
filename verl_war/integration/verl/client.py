"""WAR's client of the rollout servers, used by the agent loops in place of verl's `LLMServerClient`.

It differs in what it tells the router (who the turn belongs to and how long it is, never its tokens),
and in what it reports back (what the turn cost). A turn under which a replica breaks is asked again elsewhere with
the same tokens; one that cannot be saved raises, and verl leaves its trajectory out of the training batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorUnavailableError
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_war.core.blocks import block_chain_hashes
from verl_war.core.config import WarConfig, parse_war_config
from verl_war.core.speculation_limits import SPECULATION_KEY
from verl_war.core.types import Turn, TurnResult
from verl_war.integration.verl.failures import (
    GONE_ERRORS,
    TURN_ERRORS,
    ReplicaLostError,
    TurnAbortedError,
    TurnDeadlineError,
    cause_of,
)
from verl_war.integration.verl.link import RouterLink
from verl_war.integration.verl.settings import war_settings
from verl_war.integration.vllm.proposer import EXTRA_ARGS_KEY

logger = logging.getLogger(__name__)

UNVERIFIED_PARAMETERS = ("min_p", "logit_bias")
"""What an engine that speculates refuses (vllm/sampling_params.py:889, 0.27.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryIdentity:
    """Who a generation request belongs to. Set by the agent loop worker around each agent loop."""

    trajectory_id: str
    group_id: str
    policy_step: int
    validate: bool
    prompt_digests: dict[str, str] = field(default_factory=dict, compare=False)
    """Conversation -> digest of its first prompt, by which siblings of all steps know each other."""
    servers: dict[str, Any] = field(default_factory=dict, compare=False)
    """Conversation -> server of its last turn, whose history holds its text."""


current_trajectory: contextvars.ContextVar[TrajectoryIdentity | None] = contextvars.ContextVar(
    "verl_war_current_trajectory", default=None
)
"""verl's agent loops pass no identity to `generate`; a context variable reaches it through any agent loop."""


class WarLLMServerClient(LLMServerClient):
    """Client of the synchronous trainer."""

    resumes_aborted_turns = False
    """Whether somebody above asks again for what an aborted turn lacks."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self.war_config: WarConfig = parse_war_config(war_settings(config))
        self._link: RouterLink | None = None

    @property
    def router(self) -> Any:
        """Handle of the router actor."""
        return self._load_balancer

    @property
    def link(self) -> RouterLink:
        """This process's line to the router. Made when first used: a client is pickled on its way to its process."""
        if self._link is None:
            full_determinism = bool(self.config.actor_rollout_ref.rollout.get("full_determinism", False))
            self._link = RouterLink(self._load_balancer, self.war_config, full_determinism)
        return self._link

    def end_trajectory(self, trajectory_id: str, failed: bool) -> None:
        """Tell the router that a trajectory ended. Does not wait."""
        self.link.end_trajectory(trajectory_id, failed)

    def note_reward(self, identity: TrajectoryIdentity, reward: float) -> None:
        """Tell the servers that hold a trajectory's text what it was worth. Does not wait."""
        if self.war_config.speculation.enabled and not identity.validate:
            for session_id, server in identity.servers.items():
                server.war_history_reward.remote(session_id, reward)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any, int]:
        return await self.link.acquire(extra["turn"])

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate one turn on the replica that the router names. Same contract as verl's client.

        Raises:
            RuntimeError: Replicas failed under the turn `failures.retries` + 1 times, or none is left.
        """
        kwargs.pop("mm_processor_output", None)  # SGLang's payload; vLLM takes the raw frames
        optional = {"audio_data": audio_data, "mm_processor_kwargs": mm_processor_kwargs or None}
        request = {
            **{"prompt_ids": prompt_ids, "sampling_params": sampling_params},
            **{"image_data": image_data, "video_data": video_data},
            **{name: value for name, value in optional.items() if value is not None},
            **kwargs,
        }
        token_ids = normalize_token_ids(prompt_ids)
        turn = self._describe(request_id, token_ids, priority)
        if self.war_config.speculation.enabled:
            request["sampling_params"] = _with_identity(sampling_params, turn, token_ids)
        retries = self.war_config.failures.retries
        for attempt in range(retries + 1):
            replica_id, server, priority = await self._acquire_server(request_id, turn=turn)
            try:
                output = await self._generate_on(replica_id, server, turn, {**request, "priority": priority})
            except TURN_ERRORS as error:
                await self._on_turn_error(turn, replica_id, error, attempt)
                continue
            identity = current_trajectory.get()
            if identity is not None:
                identity.servers[request_id] = server
            global_steps = output.extra_fields.get("global_steps")
            output.extra_fields.setdefault("min_global_steps", global_steps)
            output.extra_fields.setdefault("max_global_steps", global_steps)
            return output
        raise RuntimeError(
            f"a turn of trajectory {turn.trajectory_id} failed {retries + 1} times for want of a working replica "
            f"(failures.retries={retries}); the trajectory is given up. See the log for what happened to the replicas"
        )

    async def _generate_on(self, replica_id: str, server: Any, turn: Turn, request: dict[str, Any]) -> TokenOutput:
        """One attempt. However it ends, the router learns of it."""
        vllm_request_id = self._vllm_request_id(turn.session_id)
        result = TurnResult(failed=True)
        try:
            call = asyncio.ensure_future(server.generate.remote(request_id=vllm_request_id, **request))
            loss = self.link.loss_of(replica_id)
            deadline_s = self.war_config.failures.turn_deadline_s
            try:
                done, _ = await asyncio.wait((call, loss), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not call.done():
                    call.cancel()
                    server.abort_request.remote(vllm_request_id, reset_prefix_cache=False)
            if not done:
                raise TurnDeadlineError(f"no answer within failures.turn_deadline_s={deadline_s}")
            if call not in done:
                raise ReplicaLostError("the router took it out of the pool")
            output: TokenOutput = call.result()
            if output.stop_reason in ("aborted", "abort") and not self.resumes_aborted_turns:
                raise TurnAbortedError(f"the engine gave the turn up after {len(output.token_ids)} tokens")
            result = _result(output)
            return output
        finally:
            # Not awaited: an unresponsive router must not keep a finished turn (verl does the same).
            self.link.end_turn(turn, replica_id, result)

    async def _on_turn_error(self, turn: Turn, replica_id: str, error: Exception, attempt: int) -> None:
        logger.warning(
            "turn of trajectory %s failed on replica %s in attempt %d of %d (%s)",
            *(turn.trajectory_id, replica_id, attempt + 1, self.war_config.failures.retries + 1, cause_of(error)),
        )
        if not isinstance(error, TurnAbortedError | ReplicaLostError):
            is_gone = isinstance(error, GONE_ERRORS) and not isinstance(error, ActorUnavailableError)
            await self.link.report_replica(replica_id, cause_of(error), is_gone)

    def _describe(self, request_id: str, token_ids: list[int], priority: int) -> Turn:
        identity = current_trajectory.get() or TrajectoryIdentity(
            trajectory_id=request_id, group_id="", policy_step=-1, validate=False
        )
        return Turn(
            session_id=request_id,
            trajectory_id=identity.trajectory_id,
            group_id=identity.group_id,
            policy_step=identity.policy_step,
            prompt_tokens=len(token_ids),
            block_hashes=block_chain_hashes(token_ids, self.war_config.block_size_tokens),
            priority=priority,
            validate=identity.validate,
        )


class WarFullyAsyncLLMServerClient(FullyAsyncLLMServerClient, WarLLMServerClient):
    """Client of the asynchronous trainers: verl's resume of aborted turns on top of WAR's single turn."""

    resumes_aborted_turns = True


def war_client_of(stock: LLMServerClient) -> WarLLMServerClient:
    """WAR's client with the same router and the same resume behaviour as `stock`.

    Raises:
        RuntimeError: `stock` is of a class that WAR does not know how to stand in for.
    """
    if type(stock) is LLMServerClient:
        return WarLLMServerClient(config=stock.config, load_balancer_handle=stock._load_balancer)
    if type(stock) is FullyAsyncLLMServerClient:
        return WarFullyAsyncLLMServerClient(
            config=stock.config, load_balancer_handle=stock._load_balancer, only_hybrid=stock._only_hybrid
        )
    raise RuntimeError(
        f"rollout client {type(stock).__qualname__} found; WAR replaces LLMServerClient and "
        f"FullyAsyncLLMServerClient only. Use a trainer of verl 0.9.1 (sync, colocate_async, separate_async)."
    )


def _with_identity(sampling_params: dict[str, Any], turn: Turn, token_ids: Sequence[int]) -> dict[str, Any]:
    """The same parameters, telling the engine's drafter which conversation this turn goes on with.

    Raises:
        ValueError: vLLM cannot verify drafts under one of the parameters.
    """
    for name in UNVERIFIED_PARAMETERS:
        if sampling_params.get(name):
            raise ValueError(
                f"sampling parameter {name}={sampling_params[name]!r} does not go with speculative decoding in vLLM; "
                f"expected none. Drop it, or set {SPECULATION_KEY}.enabled=False"
            )
    told = {"trajectory": turn.session_id, "step": turn.policy_step}
    identity = current_trajectory.get()
    if identity is not None:
        if turn.session_id not in identity.prompt_digests:
            digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8)
            identity.prompt_digests[turn.session_id] = digest.hexdigest()
        told["group"] = identity.prompt_digests[turn.session_id]
    extra_args = {**(sampling_params.get("extra_args") or {}), EXTRA_ARGS_KEY: told}
    return {**sampling_params, "extra_args": extra_args}


def _result(output: TokenOutput) -> TurnResult:
    return TurnResult(
        completion_tokens=len(output.token_ids),
        num_cached_tokens=output.extra_fields.get("num_cached_tokens"),
        aborted=output.stop_reason in ("aborted", "abort"),
    )
