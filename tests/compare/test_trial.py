"""What a person is told while a trial runs and when it fails; how much memory there is."""

import io
import json

import pytest

from verl_war.compare.failures import TrialFailed, Watchdog, failure_message
from verl_war.compare.machine import available_memory_bytes, describe, require_memory
from verl_war.compare.progress import Display, step_summary

LOG = (
    """starting
UserWarning: engine is not available: ModuleNotFoundError("No module")
(Worker pid=1) ValueError: first cause
Traceback (most recent call last):
  File "x.py", line 1
\x1b[31mray.exceptions.RayTaskError(KeyError): \x1b[0mthe last one
\tMissing key "a"
(raylet) bye: Error: who cares
"""
    + "noise\n" * 50
)


def test_failure_shows_the_drivers_exception_and_where_the_log_is(tmp_path):
    log = tmp_path / "console.log"
    log.write_text(LOG)
    lines = failure_message("stock", 1, log).splitlines()
    assert lines[0] == "stock failed with exit status 1; the end of its log:"
    assert "(Worker pid=1) ValueError: first cause" in lines
    assert lines[-3:] == [
        "ray.exceptions.RayTaskError(KeyError): the last one",
        '\tMissing key "a"',
        f"full log: {log}",
    ]


def test_failure_without_an_exception_shows_the_end(tmp_path):
    log = tmp_path / "console.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    assert failure_message("war", 137, log).splitlines()[-2] == "line 99"


def test_watchdog_counts_from_the_last_step(tmp_path):
    now_s = [0.0]
    log, metrics = tmp_path / "console.log", tmp_path / "metrics.jsonl"
    watchdog = Watchdog("war", log, metrics, 60.0, clock=lambda: now_s[0])
    now_s[0] = 59.0
    metrics.write_text("step\n")
    watchdog.check()
    now_s[0] = 118.0
    watchdog.check()
    now_s[0] = 120.0
    with pytest.raises(TrialFailed, match="war: no step ended within 1 minutes; .* raise --stall-minutes"):
        watchdog.check()
    Watchdog("war", log, metrics, 0.0, clock=lambda: now_s[0]).check()


def test_progress_without_a_terminal_is_a_line_for_each_phase_and_step(tmp_path):
    log, metrics, stream = tmp_path / "console.log", tmp_path / "metrics.jsonl", io.StringIO()
    log.write_text("ray init kwargs: of an earlier attempt\n")
    display = Display("stock", 3, log, metrics, stream)
    display.update()
    with log.open("a") as file:
        file.write("ray init kwargs: {}\n(vLLMHttpServer pid=7) loading\n")
    display.update()
    with log.open("a") as file:
        file.write("(WorkerDict pid=8) also talks later\n")
    display.update()
    for step in (1, 2):
        data = {"training/global_step": step, "critic/score/mean": 0.5, "timing_s/step": 2.0, "timing_s/gen": 1.0}
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "data": data}) + "\n")
        display.update()
        display.update()
    display.close()
    lines = [line.split("] ")[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        "stock: starting up",
        "stock: starting vLLM",
        "stock: step 1/3, reward 0.500, step 2.0 s, rollout 1.0 s",
        "stock: step 2/3, reward 0.500, step 2.0 s, rollout 1.0 s",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_one_bar(tmp_path):
    metrics, stream = tmp_path / "metrics.jsonl", Terminal()
    display = Display("war", 2, tmp_path / "console.log", metrics, stream)
    metrics.write_text(json.dumps({"step": 1, "data": {"training/global_step": 1, "critic/score/mean": 0.5}}) + "\n")
    display.update()
    display.close()
    assert "starting up" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
    assert "step 1/2, reward 0.500" in stream.getvalue().split("\r")[-1]


def test_summary_of_a_step_names_only_what_was_logged():
    assert step_summary({"timing_s/step": 1.25}) == "step 1.2 s"


def test_container_limit_counts_page_cache_as_free(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    assert available_memory_bytes(tmp_path) == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1000


def test_memory_error_states_needed_and_found():
    require_memory(1, "training war")
    with pytest.raises(ValueError, match=r"training war needs 1048576.0 GiB of free memory and \d+\.\d GiB are free"):
        require_memory(2**50, "training war")


def test_description_names_versions_and_hardware(repo):
    facts = describe(repo)
    assert facts["verl"] and facts["python"] and "cores" in facts["machine"]
