import statistics

from verl_war.sim.workload import SHAPES, generate


def test_same_seed_same_work():
    assert generate(SHAPES["default"], 50, 7) == generate(SHAPES["default"], 50, 7)
    assert generate(SHAPES["default"], 50, 7) != generate(SHAPES["default"], 50, 8)


def test_more_trajectories_begin_with_the_same_groups():
    assert generate(SHAPES["default"], 100, 1)[:50] == generate(SHAPES["default"], 50, 1)


def test_default_is_heavy_tailed_and_agentic():
    specs = generate(SHAPES["default"], 4000, 1)
    turns = [len(spec.turns) for spec in specs]
    assert 15 <= statistics.fmean(turns) <= 20
    assert max(turns) >= 40
    assert statistics.median(turns) < statistics.fmean(turns)
    outputs = [turn.output_tokens for spec in specs for turn in spec.turns]
    assert 220 <= statistics.fmean(outputs) <= 260
    tools = [turn.tool_s for spec in specs for turn in spec.turns]
    assert 2.7 <= statistics.fmean(tools) <= 3.3
    assert max(tools) > 30
    assert all(2816 <= spec.prompt_tokens <= 5888 for spec in specs)
    assert max(spec.final_tokens for spec in specs) <= 32_768


def test_siblings_resemble_each_other():
    specs = generate(SHAPES["default"], 4000, 2)
    groups = {}
    for spec in specs:
        groups.setdefault(spec.group_id, []).append(len(spec.turns))
    assert {len(turns) for turns in groups.values()} == {8}
    assert len({spec.prompt_tokens for spec in specs if spec.group_id == "g3"}) == 1
    within = statistics.fmean(statistics.pvariance(turns) for turns in groups.values())
    overall = statistics.pvariance([len(spec.turns) for spec in specs])
    assert within < 0.7 * overall


def test_fast_tools_differ_only_in_their_tools():
    slow, fast = (generate(SHAPES[name], 40, 1) for name in ("default", "fast_tools"))
    assert [len(spec.turns) for spec in slow] == [len(spec.turns) for spec in fast]
    mean = statistics.fmean(turn.tool_s for spec in fast for turn in spec.turns)
    assert 0.2 < mean < 0.4


def test_last_group_may_be_smaller():
    assert [spec.trajectory_id for spec in generate(SHAPES["small"], 10, 1)][-2:] == ["g1-0", "g1-1"]
