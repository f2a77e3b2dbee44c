"""Work of the speculation bench: multi-turn agent conversations in groups of 8, played against one vLLM engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GROUP_SIZE = 8
MAX_TURN_TOKENS = 64
MAX_CONTEXT_TOKENS = 1400


@dataclass(frozen=True, slots=True)
class Script:
    """One prompt with what the tools answer between the turns, as tokens; the policy writes the turns."""

    prompt: list[int]
    tool_outputs: list[list[int]]


@dataclass(slots=True)
class Trajectory:
    """A played conversation: context of every turn and what was generated in it."""

    group: int
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)


def scripts_of(tokenizer: Any, count: int, seed: int, hermes: bool) -> list[Script]:
    """Prompts and tool outputs of recorded code agents: files are read, quoted and edited.

    Args:
        tokenizer: The policy's.
        count: Number of prompts.
        seed: Of the tasks.
        hermes: Whether the chat template renders tool calls; if not, they are written out as text.
    """
    from recipes.code_agent.demonstrations import demonstrations

    found = []
    for trace in demonstrations(4 * count, seed):
        script = _rendered(tokenizer, trace) if hermes else _written_out(tokenizer, trace)
        if len(script.tool_outputs) >= 2 and len(script.prompt) + sum(map(len, script.tool_outputs)) < 1000:
            found.append(script)
        if len(found) == count:
            return found
    raise RuntimeError(f"only {len(found)} of {count} recorded conversations are short enough; raise the limit")


def _rendered(tokenizer: Any, trace: dict[str, Any]) -> Script:
    from recipes.demo_model.traces import render

    sequence = render(tokenizer, trace)
    parts: list[list[int]] = [[]]
    for token, generated, after in zip(
        sequence.token_ids, sequence.is_generated, [*sequence.is_generated[1:], True], strict=True
    ):
        if not generated:
            parts[-1].append(token)
            if after:
                parts.append([])
    return Script(parts[0], [part for part in parts[1:] if part])


def _written_out(tokenizer: Any, trace: dict[str, Any]) -> Script:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    parts, text = [], ""
    for message in trace["messages"]:
        if message["role"] == "assistant":
            parts.append(encode(text + "<|im_start|>assistant\n"))
            text = ""
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return Script(parts[0], parts[1:])


def play(
    engine: Any,
    scripts: list[Script],
    *,
    batch: int,
    tokens: int,
    temperature: float,
    label: str,
    logprobs: list[float] | None = None,
    enough: Callable[[list[Trajectory]], bool] = lambda ended: False,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Keep ``batch`` trajectories live, one group of 8 after the other, until ``tokens`` tokens were generated.

    Args:
        engine: vLLM's `LLMEngine` in this process.
        scripts: Prompts; trajectory k belongs to group ``k // 8`` and so to script ``(k // 8) % len(scripts)``.
        batch: Live trajectories.
        tokens: Generated tokens to stop at.
        temperature: Of the policy.
        label: Makes trajectory names unique.
        logprobs: Receives the log-probability of every sampled token, if given.
        enough: Whether the trajectories that ended are all that is wanted; then it stops earlier.

    Returns:
        The trajectories that ended, and seconds, tokens, steps, turns of the run.
    """
    players = _Players(engine, scripts, temperature, label, logprobs is not None)
    for _ in range(batch):
        players.begin_next()
    generated = steps = 0
    begin = time.perf_counter()
    while generated < tokens and not enough(players.ended):
        for output in engine.step():
            if output.finished:
                answer = output.outputs[0]
                players.end_turn(output.request_id, list(answer.token_ids))
                if logprobs is not None:
                    logprobs.extend(p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True))
        generated = players.ended_tokens
        steps += 1
    seconds = time.perf_counter() - begin
    generated += players.cut_short()
    return players.ended, {"seconds": seconds, "tokens": generated, "steps": steps, "turns": players.turns}


class _Players:
    """The agent loops: what is generated goes into the next turn's context, with the recorded tool output."""

    def __init__(self, engine: Any, scripts: list[Script], temperature: float, label: str, logprobs: bool) -> None:
        self.engine, self.scripts, self.label = engine, scripts, label
        self.sampling = {"temperature": temperature, "max_tokens": MAX_TURN_TOKENS, "logprobs": 0 if logprobs else None}
        self.ended: list[Trajectory] = []
        self.ended_tokens = 0
        self.turns = 0
        self._live: dict[str, Trajectory] = {}
        self._next = 0

    def begin_next(self) -> None:
        number, self._next = self._next, self._next + 1
        group = (number // GROUP_SIZE) % len(self.scripts)
        trajectory = Trajectory(group)
        self._send(f"{self.label}:{number}", trajectory, self.scripts[group].prompt)

    def end_turn(self, request_id: str, answer: list[int]) -> None:
        trajectory = self._live.pop(request_id)
        context = trajectory.turns[-1][0]
        trajectory.turns[-1] = (context, answer)
        self.ended_tokens += len(answer)
        self.turns += 1
        outputs = self.scripts[trajectory.group].tool_outputs
        following = (
            context + answer + (outputs[len(trajectory.turns) - 1] if len(trajectory.turns) <= len(outputs) else [])
        )
        if len(trajectory.turns) > len(outputs) or len(following) > MAX_CONTEXT_TOKENS - MAX_TURN_TOKENS:
            self.ended.append(trajectory)
            self.begin_next()
        else:
            self._send(request_id.rpartition("/")[0], trajectory, following)

    def cut_short(self) -> int:
        """Abort what is live; returns the tokens that it had generated."""
        states = self.engine.output_processor.request_states
        live = {state.external_req_id: state for state in states.values()}
        tokens = sum(live[name].detokenizer.num_output_tokens() for name in self._live if name in live)
        self.engine.abort_request(list(self._live))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return tokens

    def _send(self, name: str, trajectory: Trajectory, context: list[int]) -> None:
        from vllm import SamplingParams

        request_id = f"{name}/{len(trajectory.turns)}"
        trajectory.turns.append((context, []))
        self._live[request_id] = trajectory
        identity = {"trajectory": name, "group": f"g{trajectory.group}", "step": 1}
        params = SamplingParams(**self.sampling, extra_args={"war": identity})
        self.engine.add_request(request_id, {"prompt_token_ids": context}, params)


def preload_history(store: Any, trajectories: list[Trajectory], step: int, label: str) -> int:
    """Put finished trajectories of a policy step into a history; returns their tokens."""
    from verl_war.history.index import stable_id

    total = 0
    for number, trajectory in enumerate(trajectories):
        prompt, (context, answer) = trajectory.turns[0][0], trajectory.turns[-1]
        key = stable_id(f"{label}:{number}")
        text = np.asarray(context + answer, dtype=np.int32)
        store.begin(key, stable_id(f"g{trajectory.group}"), step, text[: len(prompt)])
        store.append(key, text[len(prompt) :])
        store.finish(key)
        total += len(text)
    return total


def preload_vllm(cache: Any, trajectories: list[Trajectory], label: str) -> None:
    """The same for vLLM's own cache, turn by turn, as it would have seen them."""
    for number, trajectory in enumerate(trajectories):
        for turn, (context, answer) in enumerate(trajectory.turns):
            request = f"{label}:{number}/{turn}"
            cache.start_request(request, np.asarray(context, dtype=np.int32))
            cache.add_active_response(request, answer)
            cache.stop_request(request)


def corpus(
    engine: Any, scripts: list[Script], per_group: int, temperature: float, label: str, logprobs: list[float]
) -> list[Trajectory]:
    """``per_group`` finished trajectories of every group, generated without speculation.

    Raises:
        RuntimeError: Some groups' trajectories do not end.
    """

    def of_groups(ended: list[Trajectory]) -> list[list[Trajectory]]:
        return [[t for t in ended if t.group == group][:per_group] for group in range(len(scripts))]

    def is_enough(ended: list[Trajectory]) -> bool:
        return all(len(group) == per_group for group in of_groups(ended))

    ended, _ = play(
        engine,
        scripts,
        batch=min(64, GROUP_SIZE * len(scripts)),
        tokens=per_group * len(scripts) * 4 * MAX_CONTEXT_TOKENS,
        temperature=temperature,
        label=label,
        logprobs=logprobs,
        enough=is_enough,
    )
    if not is_enough(ended):
        raise RuntimeError(f"{len(ended)} trajectories ended; expected {per_group} of each of {len(scripts)} groups")
    return [trajectory for group in of_groups(ended) for trajectory in group]


def save_json(path: Any, value: Any) -> None:
    """Write ``value`` readably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def shuffled(items: list[Any], seed: int) -> list[Any]:
    """Items in an order of their own for every repeat, so that no arm always runs first."""
    items = list(items)
    random.Random(seed).shuffle(items)
    return items
