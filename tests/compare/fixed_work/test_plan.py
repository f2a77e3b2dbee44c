"""Plans: which runs in which order, what is refused before anything starts."""

from collections import Counter

import pytest

from tests.compare.fixed_work.helpers import KV_TOKENS, ROOT, plan, spec
from verl_war.compare.fixed_work import workload
from verl_war.compare.fixed_work.arms import ARMS, find_arms
from verl_war.compare.fixed_work.episodes import read_episodes
from verl_war.compare.fixed_work.plan import episodes_file, plan_from_json
from verl_war.compare.fixed_work.texts import EpisodeTexts, RecordedTexts
from verl_war.sim.policies.registry import POLICIES
from verl_war.sim.trace import write_trace


def test_every_arm_serves_every_case_once(tmp_path):
    runs = plan(tmp_path).runs()
    assert len(runs) == 3 * 2 * 2 == len({run.name for run in runs})
    assert Counter(run.arm for run in runs) == {"stock": 4, "margin": 4, "war": 4}


def test_arms_take_turns_in_changing_order(tmp_path):
    found = plan(tmp_path, repeats=20, loads=(2,))
    orders = [found.order(case) for case in found.cases()]
    for arm in found.arms:
        firsts = sum(order[0] == arm for order in orders)
        assert 2 <= firsts <= 14
    assert plan(tmp_path, arms=("stock", "war")).order(found.cases()[0]) == [
        arm for arm in orders[0] if arm != "margin"
    ]


def test_a_repeat_goes_through_all_loads(tmp_path):
    cases = plan(tmp_path).cases()
    assert [(case.repeat, case.load) for case in cases] == [(1, 2), (1, 8), (2, 2), (2, 8)]
    assert [case.seed for case in cases] == [1, 1, 2, 2]


def test_cases_have_trajectories_of_their_own_that_do_not_depend_on_the_arms(tmp_path):
    found = plan(tmp_path)
    first, second = found.specs(found.cases()[0]), found.specs(found.cases()[2])
    assert len(first) == len(second) == 2 * 2
    assert first != second
    assert first == plan(tmp_path, arms=("war",)).specs(found.cases()[0])


def test_delays_follow_the_clock(tmp_path):
    case = plan(tmp_path).cases()[0]
    once, half = (plan(tmp_path, clock_scale=scale).specs(case) for scale in (1.0, 0.5))
    assert [turn.tool_s for turn in half[0].turns] == [turn.tool_s / 2 for turn in once[0].turns]
    assert half[0].start_s == once[0].start_s / 2
    assert half[0].output_tokens == once[0].output_tokens


def test_a_plan_survives_the_way_to_its_process(tmp_path):
    assert plan_from_json(plan(tmp_path).as_json()) == plan(tmp_path)


def test_a_kind_of_engines_is_started_once_and_memory_counts_each(tmp_path):
    few, many = plan(tmp_path), plan(tmp_path, arms=("stock", "stock_priority", "vllm_suffix", "war", "war_no_moves"))
    assert few.engine_kinds == ("plain", "war")
    assert set(many.engine_kinds) == {"plain", "priority", "suffix", "war"}
    per_kind = (many.needed_bytes - few.needed_bytes) / 2
    assert plan(tmp_path, arms=("stock",)).needed_bytes == pytest.approx(few.needed_bytes - per_kind)
    assert plan(tmp_path, kv_tokens=10**6).needed_bytes > few.needed_bytes + 40 * 2**30
    assert plan(tmp_path, memory_bytes=7).needed_bytes == 7


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"repeats": 0}, "--repeats=0 must be between 1"),
        ({"replicas": 0}, "--replicas=0 must be between 1"),
        ({"kv_tokens": 100}, "--kv-tokens=100 must be between 256"),
        ({"seed": -1}, "--seed=-1 must be between 0"),
        ({"clock_scale": -0.5}, "--clock-scale=-0.5 must be between 0"),
        ({"arms": ("stock", "wra")}, "'wra' is unknown .did you mean 'war'."),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, **changes)


def test_a_trajectory_larger_than_the_kv_is_refused_before_anything_starts(tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [spec("small"), spec("large", prompt=KV_TOKENS)])
    with pytest.raises(ValueError, match=r"trajectory large grows to 4166 tokens .* --kv-tokens=4096"):
        plan(tmp_path, trace=str(trace), loads=(1,)).check_work()
    plan(tmp_path, trace=str(trace), loads=(1,), kv_tokens=4224).check_work()


def test_a_missing_and_a_damaged_trace_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        plan(tmp_path, trace=str(tmp_path / "missing"), loads=(1,)).check_work()
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"group": "g", "prompt_tokens": 100, "turns": [{"output_')
    with pytest.raises(ValueError, match="line 1: not JSON.*was it cut off"):
        plan(tmp_path, trace=str(damaged), loads=(1,)).check_work()


def test_a_missing_or_damaged_recording_is_refused(tmp_path):
    found = plan(tmp_path, repo=tmp_path)
    with pytest.raises(ValueError, match="code_agent.json: cannot be used.*record it anew"):
        found.check_work()
    path = episodes_file(tmp_path, "code_agent")
    path.parent.mkdir(parents=True)
    path.write_bytes(episodes_file(ROOT, "code_agent").read_bytes())
    found.check_work()
    before = found.identity()
    assert before["work"].startswith("recorded 3 ")
    path.write_bytes(episodes_file(ROOT, "search_agent").read_bytes())
    assert found.identity()["work"] != before["work"]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be used"):
        found.check_work()
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [spec("g-0")])
    with pytest.raises(ValueError, match="cannot be used"):
        plan(tmp_path, repo=tmp_path, trace=str(trace), loads=(1,)).check_work()


def test_recorded_work_has_its_own_text_and_a_trace_joined_text(tmp_path):
    found = plan(tmp_path)
    tasks = read_episodes(episodes_file(ROOT, "code_agent"))
    first, *_ = found.specs(found.cases()[0])
    assert isinstance(found.texts(), EpisodeTexts)
    assert found.texts().prompt(first) in [task.prompt for task in tasks]
    texts = plan(tmp_path, trace="x").texts()
    assert isinstance(texts, RecordedTexts)
    assert len(texts.prompt(spec("g-0"))) == 100


def test_loads_by_name_follow_the_kv():
    assert workload.parse_loads("low,middle,high", 8192, 512.0) == (2, 13, 32)
    assert workload.parse_loads("16,4,4", 8192, 512.0) == (4, 16)
    assert workload.parse_loads("sweep", 8192, 512.0) == (1, 2, 4, 8, 13, 19, 32, 48)
    assert workload.parse_loads("middle", 256, 512.0) == (1,)
    for word in ("0", "-3", "2.5", "much", ""):
        with pytest.raises(ValueError, match="--load: .* is neither low, middle, high, sweep nor a number"):
            workload.parse_loads(word, 8192, 512.0)
    assert workload.parse_loads("10000", 8192, 512.0) == (10_000,)
    for word, kv_tokens, load in (("4,10001", 8192, 10_001), ("9" * 30, 8192, "9" * 30), ("high", 10**7, 39_062)):
        with pytest.raises(ValueError, match=f"is {load} trajectories per replica .* must be at most 10000"):
            workload.parse_loads(word, kv_tokens, 512.0)


def test_arms_are_what_they_say():
    assert find_arms("all") == tuple(ARMS.values())
    with pytest.raises(ValueError, match="given twice"):
        find_arms("war,war")
    for arm in ARMS.values():
        assert arm.config  # WAR accepts its settings
        assert not arm.policy or arm.policy in POLICIES
        assert not arm.config.speculation.enabled or arm.engine == "war"
        assert not arm.part or arm.engine == "war"
    stock = {arm.name for arm in ARMS.values() if arm.settings is None}
    assert stock == {"stock", "stock_sync", "stock_priority", "vllm_suffix"}
    assert ARMS["stock"].engine == "plain"


@pytest.mark.parametrize(
    "name,differs_in",
    [
        ("war_no_speculation", {"speculation"}),
        ("war_no_siblings", {"speculation"}),
        ("war_no_history", {"speculation"}),
        ("war_no_budget", {"speculation"}),
        ("war_tail_mode", {"speculation"}),
        ("war_no_admission", {"admission"}),
        ("war_no_moves", {"scheduling"}),
        ("war_no_scheduling", {"scheduling", "admission"}),
        ("war_no_progress", {"scheduling"}),
        ("war_no_groups", set()),
    ],
)
def test_war_without_a_part_lacks_that_part_alone(name, differs_in):
    war, without = ARMS["war"].config, ARMS[name].config
    assert {field for field in war.__slots__ if getattr(war, field) != getattr(without, field)} == differs_in
    assert ARMS[name].announces_groups is (name != "war_no_groups")


def test_parts_of_drafting_are_switched_where_the_engines_look():
    sources = {name: ARMS[name].config.speculation.history.sources for name in ("war_no_siblings", "war_no_history")}
    assert sources == {"war_no_siblings": ("own", "earlier_steps", "global"), "war_no_history": ("own", "siblings")}
    assert not ARMS["war_no_history"].knows_earlier_step
    assert ARMS["war_no_budget"].config.speculation.mode == "always"
    assert ARMS["war_tail_mode"].config.speculation.favour_long_turns
    paper = ARMS["paper_like"].config.speculation
    assert (paper.mode, paper.max_batch, paper.share_peers) == ("always", 16, 0)
