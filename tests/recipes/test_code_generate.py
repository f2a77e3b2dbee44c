"""Generated packages: deterministic, broken by exactly one line, repaired by exactly that line."""

import dataclasses

import pytest

from recipes.code_agent.generate import SIZES, PackageSize, generate, generate_many
from recipes.code_agent.tasks import Task, prompt_messages
from recipes.code_agent.templates import TEMPLATES, mutations
from recipes.code_agent.testing import InProcessTests
from recipes.code_agent.workspace import Workspace

NUM_SEEDS = 250
FAMILIES = {"operator", "comparison", "constant", "off_by_one", "wrong_variable", "missing_return"}


@pytest.fixture(scope="module")
def demo_tasks():
    return [generate(seed) for seed in range(NUM_SEEDS)]


def test_the_same_seed_gives_the_same_task(demo_tasks):
    assert [generate(seed) for seed in range(20)] == demo_tasks[:20]
    assert len({generated.task.to_json() for generated in demo_tasks}) > NUM_SEEDS * 0.9


def test_each_bug_fails_and_its_fix_passes(demo_tasks):
    for generated in demo_tasks:
        with Workspace(generated.task, InProcessTests()) as workspace:
            before = workspace.score()
            assert before.num_passed(generated.task.fail_to_pass) == 0
            assert before.num_passed(generated.task.pass_to_pass) == len(generated.task.pass_to_pass)
            bug = generated.bug
            assert workspace.edit_file(bug.path, bug.broken, bug.line) == f"edited {bug.path}"
            assert all(workspace.score().passed.values())


def test_all_families_of_bugs_occur(demo_tasks):
    families = [generated.bug.family for generated in demo_tasks]
    assert set(families) == FAMILIES
    assert min(families.count(family) for family in FAMILIES) > NUM_SEEDS / 30


def test_every_template_can_be_broken():
    for template in TEMPLATES:
        assert list(mutations(template.source.format(f=template.name))), template.name


def test_the_prompt_is_short_and_does_not_leak_the_fix(demo_tasks):
    for generated in demo_tasks:
        prompt = " ".join(message["content"] for message in prompt_messages(generated.task))
        assert len(prompt.split()) < 150
        assert generated.bug.line not in prompt and generated.bug.function not in prompt


def test_demo_packages_are_tiny(demo_tasks):
    assert max(sum(map(len, generated.task.files.values())) for generated in demo_tasks) < 4000


@pytest.mark.parametrize("size", ["small", "long"])
def test_other_sizes(size):
    for generated in generate_many(3, seed=1, size=SIZES[size]):
        broken = generated.task.files[generated.bug.path]
        assert broken.count(generated.bug.broken) == 1
        fixed = generated.task.files | {generated.bug.path: broken.replace(generated.bug.broken, generated.bug.line)}
        with Workspace(dataclasses.replace(generated.task, files=fixed), InProcessTests()) as workspace:
            assert all(workspace.score().passed.values())


def test_long_packages_fill_tens_of_thousands_of_tokens():
    files = generate(3, size=SIZES["long"]).task.files
    assert sum(map(len, files.values())) / 4 > 40_000
    assert max(map(len, files.values())) / 4 > 4_000


def test_a_task_survives_its_json_form(demo_tasks):
    task = demo_tasks[0].task
    assert Task.from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "broken JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"task_id": "a", "statement": "b", "fail_to_pass": ["c"], "colour": 1}', "unknown field 'colour'"),
        ('{"task_id": "a", "statement": "b"}', "'fail_to_pass' is missing"),
        ('{"task_id": "a", "statement": "b", "fail_to_pass": "c"}', "fail_to_pass must be a list of texts"),
        ('{"task_id": "a", "statement": "b", "fail_to_pass": [], "files": {"p": "t"}}', "fail_to_pass is empty"),
        ('{"task_id": "a", "statement": " ", "fail_to_pass": ["c"], "files": {"p": "t"}}', "statement is empty"),
        ('{"task_id": "a", "statement": "b", "fail_to_pass": ["c"]}', "neither files nor snapshot"),
    ],
)
def test_malformed_tasks_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Task.from_json(text)


@pytest.mark.parametrize(
    "wrong", [{"num_modules": (3, 2)}, {"functions_per_module": (0, 2)}, {"indirection": -1}, {"filler_lines": -1}]
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PackageSize(**wrong)
