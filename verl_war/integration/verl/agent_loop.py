"""Agent loop manager and worker: every trajectory gets an identity; agent loops stay as they are."""

from __future__ import annotations

import logging
from typing import Any

import ray
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_war.integration.verl import step_metrics, worker_watch
from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory, war_client_of
from verl_war.integration.verl.failures import cause_of
from verl_war.integration.verl.link import ROUTER_LOST_ERRORS

logger = logging.getLogger(__name__)

# verl exports the worker only as a Ray actor class, which cannot be subclassed; this is the plain class in it.
_AgentLoopWorkerTQ = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class WarAgentLoopWorker(_AgentLoopWorkerTQ):  # type: ignore[misc, valid-type]
    """verl's worker, telling the client whose turns it sends and the router when a trajectory ended."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        identity = TrajectoryIdentity(
            trajectory_id=f"{kwargs['uid']}_{kwargs['session_id']}",
            group_id=str(kwargs["uid"]),
            policy_step=int(trajectory["step"]),
            validate=bool(trajectory["validate"]),
        )
        token = current_trajectory.set(identity)
        failed = True
        try:
            result = await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
            failed = False
            return result
        finally:
            current_trajectory.reset(token)
            if failed:
                self.llm_client.end_trajectory(identity.trajectory_id, failed=True)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        # The rollout is over here: scoring and storing need no KV cache.
        self.llm_client.end_trajectory(f"{kwargs['uid']}_{kwargs['session_id']}", failed=False)
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        identity = current_trajectory.get()
        if outputs and identity is not None and outputs[-1].reward_score is not None:
            self.llm_client.note_reward(identity, float(outputs[-1].reward_score))


class WarAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with WAR's client and worker. Starts the router's decisions."""

    def __init__(self, *args: Any, llm_client: Any, **kwargs: Any) -> None:
        client = war_client_of(llm_client)
        super().__init__(*args, llm_client=client, **kwargs)
        # Wrapped here: Ray pickles a class by value when its name in the module is the actor class.
        self.agent_loop_workers_class = ray.remote(WarAgentLoopWorker)
        settings = (client.war_config, bool(self.rollout_config.full_determinism))
        ray.get(client.router.configure.remote(*settings))
        step_metrics.attach(client.router, *settings)
        self._worker_watch: worker_watch.WorkerWatch | None = None

    def generate_sequences(self, prompts: TensorDict) -> None:
        """verl's; tells the router what is coming, and remembers which worker gets which prompts."""
        self._announce(prompts)
        if self._worker_watch is None:
            self._worker_watch = worker_watch.WorkerWatch(self.agent_loop_workers, worker_watch.fail_prompts)
        # As verl divides them.
        chunks = prompts.chunk(len(self.agent_loop_workers))
        for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False):
            self._worker_watch.on_dispatch(worker, [str(uid) for uid in chunk["uid"]])
        super().generate_sequences(prompts)

    def _announce(self, prompts: TensorDict) -> None:
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        group_size = int(self.rollout_config.val_kwargs.n if validate else self.rollout_config.n)
        router = self.llm_client.router
        try:
            ray.get(router.begin_step.remote(int(prompts["global_steps"]), len(prompts) * group_size, group_size))
        except ROUTER_LOST_ERRORS as error:
            # The next turn waits for the router to come back; the announcement only helps its first placements.
            logger.warning("router: step was not announced (%s)", cause_of(error))
