import json

import pytest

from verl_war.sim.trace import read_trace, write_trace
from verl_war.sim.workload import SHAPES, generate

LINE = {"group": "g", "prompt_tokens": 100, "turns": [{"output_tokens": 5}]}


def test_round_trip(tmp_path):
    specs = generate(SHAPES["default"], 20, seed=4)
    path = tmp_path / "trace.jsonl"
    write_trace(path, specs)
    assert read_trace(path) == specs


def test_what_may_be_left_out(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + json.dumps(LINE | {"notes": {"by": "hand"}}) + "\n\n" + json.dumps(LINE) + "\n")
    first, second = read_trace(path)
    assert (first.trajectory_id, second.trajectory_id) == ("g-line2", "g-line4")
    assert (first.system_tokens, first.start_s, first.turns[0].tool_s) == (0, 0.0, 0.0)
    assert first.final_tokens == 105


@pytest.mark.parametrize(
    "change,message",
    [
        ({"group": ""}, "group='' must be a string"),
        ({"prompt_tokens": 0}, "prompt_tokens=0 must be an integer of at least 1"),
        ({"prompt_tokens": True}, "prompt_tokens=True must be an integer"),
        ({"system_tokens": 101}, "system_tokens=101 is more than prompt_tokens=100"),
        ({"start_s": 10**400}, "start_s=1000"),
        ({"start_s": -1}, "start_s=-1 must be a number of seconds"),
        ({"turns": []}, "turns=[] must be a list of at least one turn"),
        ({"turns": [5]}, "turns[0]: is int"),
        ({"turns": [{"output_tokens": 1}, {"output_tokens": 0}]}, "turns[1]: output_tokens=0 must be"),
        ({"turns": [{"output_tokens": 1, "tool_s": float("nan")}]}, "turns[0]: tool_s=nan must be"),
        ({"turns": [{"output_tokens": 1, "tool": 3}]}, "turns[0]: unknown key 'tool'"),
        ({"prompt": 5}, "unknown key 'prompt'"),
    ],
)
def test_damaged_lines_are_named(tmp_path, change, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(ValueError, match="line 2") as error:
        read_trace(path)
    assert message in str(error.value)


def test_cut_off_empty_binary_missing_and_doubled(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE)[:30])
    with pytest.raises(ValueError, match="line 1: not JSON .* was it cut off"):
        read_trace(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="line 1: nested too deeply"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no trajectory"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    named = json.dumps(LINE | {"trajectory": "a"}) + "\n"
    path.write_text(named + named)
    with pytest.raises(ValueError, match="line 2: trajectory='a' is already on line 1"):
        read_trace(path)
