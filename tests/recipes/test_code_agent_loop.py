"""The agent loop with verl's own state machine, a scripted model and real tools, sandbox and scoring."""

import asyncio
import json
import time

import pytest

pytest.importorskip("verl", reason="needs verl installed")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from recipes.code_agent import agent_loop, scratch, tools
from recipes.code_agent.actions import TOOLS_PATH, tool_schemas
from recipes.code_agent.agent_loop import CodeAgentLoop
from recipes.code_agent.generate import generate
from recipes.code_agent.sandbox import SandboxError, SandboxLimits
from recipes.code_agent.tasks import prompt_messages
from recipes.code_agent.workspace import Workspace
from recipes.demo_model.tokenizer import train_tokenizer

pytestmark = pytest.mark.upstream
GENERATED = next(task for task in map(generate, range(100)) if task.bug.line.startswith("return "))
BUG = GENERATED.bug
FIX = {"path": BUG.path, "search": BUG.broken, "replace": BUG.line}


@pytest.fixture(scope="module")
def tokenizer():
    texts = [json.dumps(tool_schemas()), json.dumps(GENERATED.task.files)]
    return train_tokenizer(texts, vocab_size=300, max_context_tokens=20_000)


@pytest.fixture(scope="module")
def loaded_tools():
    return load_all_tools(str(TOOLS_PATH), None)


class ScriptedModel:
    """Stands in for the inference server: one given text per turn; what the model was shown is kept."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.shown = tokenizer, list(turns), []

    async def generate(self, *, prompt_ids, **_kwargs):
        self.shown.append(self.tokenizer.decode(prompt_ids))
        turn = self.turns.pop(0)
        if callable(turn):
            turn = await turn()
        token_ids = self.tokenizer.encode(turn + "<|im_end|>", add_special_tokens=False)
        return TokenOutput(token_ids=token_ids, log_probs=[0.0] * len(token_ids))


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_loop(tokenizer, loaded_tools, turns, max_response_chars=1000, **config):
    multi_turn = {
        "format": "hermes", "max_user_turns": None, "max_assistant_turns": 8, "max_parallel_calls": 1,
        "max_tool_response_length": max_response_chars, "tool_response_truncate_side": "middle",
    }  # fmt: skip
    rollout = {"prompt_length": 4000, "response_length": 12_000, "full_determinism": False, "multi_turn": multi_turn}
    trainer_config = OmegaConf.create({"data": {}, "actor_rollout_ref": {"rollout": rollout}})
    return CodeAgentLoop(
        trainer_config=DictConfigWrap(trainer_config),
        server_manager=ScriptedModel(tokenizer, turns),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(trainer_config.data),
        hf_model_type="qwen2",
        tools=ToolListWrap(loaded_tools),
        **config,
    )


def row(task=GENERATED.task):
    return {"raw_prompt": prompt_messages(task), "extra_info": {"index": 0, "task": task.to_json()}}


async def play(tokenizer, loaded_tools, turns, **config):
    loop = make_loop(tokenizer, loaded_tools, turns, **config)
    output = await loop.run({}, **row())
    assert open_workspaces() == []
    return output, loop.server_manager.shown


def open_workspaces():
    return list(scratch.base_directory().glob("*/workspace-*"))


@pytest.fixture(autouse=True)
def own_scratch(monkeypatch, tmp_path_factory):
    """Directories of other processes on this machine don't count."""
    place = tmp_path_factory.mktemp("scratch")
    for folder in [place, *place.parents][:3]:
        folder.chmod(0o755)
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(place))


# --- trajectories -----------------------------------------------------------------------------------------------------


async def test_a_solved_trajectory(tokenizer, loaded_tools):
    turns = [
        call("run_tests", {}),
        call("list_files", {}),
        call("read_file", {"path": BUG.path}),
        call("edit_file", FIX),
        call("run_tests", {}),
        "Fixed.",
    ]
    output, shown = await play(tokenizer, loaded_tools, turns)
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {
        "score": 1.0, "acc": 1.0, "tests_passed": 1.0, "num_edits": 1, "num_test_runs": 2, "num_tool_errors": 0,
        "num_assistant_turns": 6,
    }  # fmt: skip
    for turn, sign in ((1, f"FAIL {GENERATED.task.fail_to_pass[0]}"), (3, BUG.broken), (4, f"edited {BUG.path}")):
        assert sign in shown[turn]
    assert f"{len(GENERATED.task.required_tests)} passed" in shown[5]
    assert output.metrics.compute_score > 0
    assert len(output.response_ids) == len(output.response_mask)
    fields = output.as_dict()
    assert fields["rm_scores"].sum() == 1.0
    assert fields["extra_fields"]["reward_extra_info"]["acc"] == 1.0


@pytest.mark.parametrize(
    "turns",
    [
        ["I give up."],
        [call("edit_file", FIX | {"replace": "return undefined_name"}), "Fixed."],
        [call("edit_file", FIX | {"replace": "import os; os._exit(0)"}), "Fixed."],
        [call("edit_file", {"path": GENERATED.task.test_files[0], "search": "assert", "replace": "0 ="}), "Fixed."],
    ],
)
async def test_unsolved_trajectories(tokenizer, loaded_tools, turns):
    output, _ = await play(tokenizer, loaded_tools, turns)
    assert output.reward_score == 0.0
    assert output.extra_fields["reward_extra_info"]["acc"] == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('<tool_call>\n{"name": "read_file", "arguments": {"path": \n</tool_call>', "Invalid JSON in arguments"),
        ('<tool_call>\n{"name": "run_tests"}\n</tool_call>', "has no argument 'name'"),
        ("<tool_call>\nread it\n</tool_call>", "Unknown function ''"),
        ('<tool_call>\n{"name": "read_file", "arg', "Invalid JSON in arguments for 'read_file'"),
        (call("delete_all", {}), "Unknown function 'delete_all'. Available tools"),
        (call("read_file", {}), "Error: read_file needs path"),
        (call("read_file", "pkg"), "Error: arguments of read_file must be an object"),
        (call("read_file", [1]), "Error: arguments of read_file must be an object"),
        (call("read_file", {"path": 7}), "Error: path must be a string"),
        (call("read_file", {"path": "../../etc/passwd"}), "is outside of the package"),
    ],
)
async def test_broken_calls_are_answered_and_the_trajectory_goes_on(tokenizer, loaded_tools, text, answer):
    output, shown = await play(tokenizer, loaded_tools, [text, call("edit_file", FIX), "Fixed."])
    assert answer in shown[1].partition(text)[2]
    assert output.reward_score == 1.0


# --- tools that misbehave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "answer"),
    [
        ("raise", "Error: read_file failed: ValueError: on purpose"),
        ("raise much", "Error: read_file failed: ValueError: xxx"),
        ("hang", "Error: read_file took more than 0.3 s"),
        ("10 MB", "yyy...(truncated)...yyy"),
    ],
)
async def test_tools_that_misbehave(tokenizer, loaded_tools, monkeypatch, behaviour, answer):
    def misbehave(_workspace, tool, arguments):
        if tool != "read_file":
            return perform(_workspace, tool, arguments)
        if behaviour == "hang":
            time.sleep(2)
        if behaviour.startswith("raise"):
            raise ValueError("x" * 10**7 if behaviour == "raise much" else "on purpose")
        return "y" * 10**7

    perform = tools.perform
    monkeypatch.setattr(tools, "perform", misbehave)
    for tool in loaded_tools:
        monkeypatch.setattr(tool, "deadline_s", 0.3 if tool.name == "read_file" else 60)
    turns = [call("read_file", {"path": "x"}), call("edit_file", FIX), "Fixed."]
    output, shown = await play(tokenizer, loaded_tools, turns)
    assert answer in shown[1] and len(shown[1]) < 5000
    assert output.reward_score == 1.0


async def test_blocking_tools_leave_the_event_loop_alone(tokenizer, loaded_tools, monkeypatch):
    def slow(*_args):
        time.sleep(1)
        return "done"

    monkeypatch.setattr(tools, "perform", slow)
    gaps_s = []

    async def heartbeat():
        while True:
            start_s = time.monotonic()
            await asyncio.sleep(0.01)
            gaps_s.append(time.monotonic() - start_s)

    beat = asyncio.ensure_future(heartbeat())
    await play(tokenizer, loaded_tools, [call("run_tests", {}), "Done."])
    beat.cancel()
    assert len(gaps_s) > 40 and max(gaps_s) < 0.8


async def test_a_tool_without_a_workspace_says_why(loaded_tools):
    class Data:
        tools_kwargs = {}

    with pytest.raises(RuntimeError, match="set agent_name to code_agent"):
        await loaded_tools[0].execute("id", {}, agent_data=Data())


@pytest.mark.parametrize("deadline_s", [0, -1, "soon"])
def test_impossible_deadlines_are_refused(loaded_tools, deadline_s):
    with pytest.raises(ValueError, match="expected a number of seconds above 0"):
        tools.RunTestsTool({"type": "native", "deadline_s": deadline_s}, loaded_tools[0].tool_schema)


def test_declared_tools_are_what_demonstrations_show(loaded_tools):
    dumped = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in loaded_tools]
    assert json.dumps(dumped) == json.dumps(tool_schemas())
    assert all(isinstance(ToolResponse(text="x"), ToolResponse) for _ in dumped)


# --- the end of a trajectory ------------------------------------------------------------------------------------------


async def _cancelled_in(tokenizer, loaded_tools, turns, reached, num_cancels=1):
    loop = make_loop(tokenizer, loaded_tools, turns)
    running = asyncio.ensure_future(loop.run({}, **row()))
    await asyncio.wait_for(reached.wait(), 30)
    for _ in range(num_cancels):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    for _ in range(500):
        if not open_workspaces():
            break
        await asyncio.sleep(0.01)
    assert open_workspaces() == []


@pytest.mark.parametrize("num_cancels", [1, 2, 5])
async def test_cancellation_while_the_model_generates(tokenizer, loaded_tools, num_cancels):
    reached = asyncio.Event()

    async def wait_for_ever():
        assert len(open_workspaces()) == 1
        reached.set()
        await asyncio.sleep(1000)

    await _cancelled_in(tokenizer, loaded_tools, [wait_for_ever], reached, num_cancels)


async def test_cancellation_while_tests_run(tokenizer, loaded_tools):
    reached = asyncio.Event()

    async def run_tests():
        asyncio.get_running_loop().call_later(1, reached.set)
        return call("run_tests", {})

    hanging_line = "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(60)"
    hang = call("edit_file", FIX | {"replace": hanging_line})
    start_s = time.monotonic()
    await _cancelled_in(tokenizer, loaded_tools, [hang, run_tests], reached)
    # The sandbox alone would end the tests after 10 s.
    assert time.monotonic() - start_s < 8


async def test_cancellation_while_the_workspace_opens(tokenizer, loaded_tools, monkeypatch):
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_workspace(*args):
        loop.call_soon_threadsafe(reached.set)
        time.sleep(0.5)
        return Workspace(*args)

    monkeypatch.setattr(agent_loop, "Workspace", slow_workspace)
    await _cancelled_in(tokenizer, loaded_tools, ["never asked"], reached)


async def test_an_error_of_the_server_closes_the_workspace(tokenizer, loaded_tools):
    async def fail():
        raise ConnectionError("server is gone")

    with pytest.raises(ConnectionError, match="server is gone"):
        await make_loop(tokenizer, loaded_tools, [fail]).run({}, **row())
    assert open_workspaces() == []


async def test_without_isolation_there_is_no_reward(tokenizer, loaded_tools, monkeypatch):
    def refuse(*_args):
        raise SandboxError("no isolation on this machine")

    monkeypatch.setattr("recipes.code_agent.sandbox_machine.landlock_version", refuse)
    with pytest.raises(SandboxError, match="no isolation"):
        await make_loop(tokenizer, loaded_tools, [call("run_tests", {}), "Done."]).run({}, **row())
    assert open_workspaces() == []


async def test_many_trajectories_at_a_time(tokenizer, loaded_tools):
    turns = [call("run_tests", {}), call("edit_file", FIX), "Fixed."]
    loops = [make_loop(tokenizer, loaded_tools, turns) for _ in range(16)]
    outputs = await asyncio.gather(*(loop.run({}, **row()) for loop in loops))
    assert [output.reward_score for output in outputs] == [1.0] * 16
    assert open_workspaces() == []


# --- configuration and rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra_info", [None, {}, {"task": None}, {"task": 5}])
async def test_rows_without_a_task_are_refused(tokenizer, loaded_tools, extra_info):
    loop = make_loop(tokenizer, loaded_tools, [])
    with pytest.raises(ValueError, match=r"row 7: extra_info\['task'\].*prepare_data"):
        await loop.run({}, raw_prompt=[], extra_info=extra_info, index=7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"reward": {"partial": 0.1}}, "unknown key reward.partial; allowed are partial_weight"),
        ({"reward": {"partial_weight": 1.0}}, "partial_weight is 1.0"),
        ({"reward": {"partial_weight": "much"}}, "reward.partial_weight is 'much'; expected a value of type float"),
        ({"sandbox": {"wall": 3}}, "unknown key sandbox.wall"),
        ({"sandbox": {"num_processes": 2.5}}, "sandbox.num_processes is 2.5; expected a value of type int"),
        ({"sandbox": {"unix_sockets": 1}}, "sandbox.unix_sockets is 1; expected a value of type bool"),
        ({"sandbox": {"readable_paths": "/opt"}}, "sandbox.readable_paths is '/opt'; expected a value of type list"),
        ({"workspace": {"max_output_chars": 0}}, "max_output_chars is 0"),
    ],
)
def test_wrong_configuration_is_refused(tokenizer, loaded_tools, config, message):
    with pytest.raises(ValueError, match=message):
        make_loop(tokenizer, loaded_tools, [], **{key: OmegaConf.create(value) for key, value in config.items()})


def test_the_shipped_declaration_is_what_verl_instantiates(tokenizer, loaded_tools):
    import hydra

    (declared,) = OmegaConf.load(TOOLS_PATH.with_name("agent_loops.yaml"))
    declared.sandbox = {"wall_s": 3, "readable_paths": ["/srv"]}
    plain = make_loop(tokenizer, loaded_tools, [])
    loop = hydra.utils.instantiate(
        config=declared,
        trainer_config=DictConfigWrap(plain.config),
        server_manager=plain.server_manager,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(plain.config.data),
        tools=ToolListWrap(loaded_tools),
    )
    assert type(loop) is CodeAgentLoop and declared.name == "code_agent"
    assert loop._sandbox_limits == SandboxLimits(wall_s=3.0, readable_paths=("/srv",))
