"""The CPU as a platform of verl: detection, what it answers, its environment, and the steps of the plugin."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import verl_war

CPU_SETTINGS = Path(verl_war.__file__).parent / "config" / "war_machine" / "cpu.yaml"

pytestmark = pytest.mark.upstream


@pytest.fixture
def platform_cpu():
    from verl_war.integration.verl import platform_cpu

    return platform_cpu


@pytest.fixture
def environment():
    from verl_war.integration.verl import cpu_environment

    return cpu_environment


@pytest.fixture
def plugin():
    from verl_war.integration.verl import plugin

    return plugin


@pytest.mark.parametrize("first", ["platform_cpu", "plugin", "cpu_environment"])
def test_our_modules_may_be_imported_before_verl(first):
    code = f"import verl_war.integration.verl.{first}; from verl.plugin.platform import get_platform; "
    code += "from verl_war.patches import registry; print(get_platform().device_name, len(registry.armed()) > 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["cpu", "True"], done.stderr


@pytest.fixture
def gpu_build(monkeypatch):
    """Makes torch look as if it was built for an accelerator."""
    import torch

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))


@pytest.fixture
def clean_environment(monkeypatch, environment):
    for name in (*environment.CPU_ENVIRONMENT, "VERL_PLATFORM", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    variables = dict(os.environ)
    monkeypatch.setattr(os, "environ", variables)
    return variables


def test_verl_detects_the_cpu(platform_cpu):
    from verl.plugin.platform import PlatformRegistry, get_platform
    from verl.plugin.platform.platform_manager import _detect_platform_name

    assert _detect_platform_name() == "cpu"
    assert isinstance(get_platform(), platform_cpu.PlatformCPU)
    assert PlatformRegistry.registered_names()[-1] == "cpu", "verl's own platforms must be asked first"


def test_other_builds_of_torch_are_left_to_verl(platform_cpu, environment, gpu_build, monkeypatch):
    from verl.plugin.platform.platform_manager import _detect_platform_name

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert environment.machine() == "gpu"
    assert not platform_cpu.PlatformCPU().is_platform_available(use_smi_check=True)
    assert _detect_platform_name() != "cpu"


@pytest.mark.parametrize(("chosen", "machine"), [("cpu", "cpu"), (" CPU ", "cpu"), ("nvidia", "gpu"), ("", "cpu")])
def test_users_choice_comes_first(environment, monkeypatch, chosen, machine):
    monkeypatch.setenv("VERL_PLATFORM", chosen)
    assert environment.machine() == machine


def test_both_ways_to_find_the_machine_agree(environment, monkeypatch):
    from verl_war.support import installed_machine

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert installed_machine() == environment.machine()


def test_every_call_of_the_platform_answers(platform_cpu):
    platform = platform_cpu.PlatformCPU()
    assert (platform.device_name, platform.current_device(), platform.device_count()) == ("cpu", "cpu", 1)
    assert platform.is_available() and not platform.is_ipc_supported()
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_options(2) == {"num_gpus": 2}
    assert platform.get_device_capability() == (None, None) and platform.cudart() is None
    for call in (platform.synchronize, platform.empty_cache, platform.profiler_start, platform.profiler_stop):
        assert call() is None
    platform.set_device(1)
    platform.set_allocator_settings("expandable_segments:True")
    with platform.nvtx_range("training"):
        pass


def test_seeding_makes_draws_equal(platform_cpu):
    import torch

    platform = platform_cpu.PlatformCPU()
    draws = []
    for seed in (platform.manual_seed, platform.manual_seed_all, platform.device_module.manual_seed):
        seed(7)
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


def test_device_module_speaks_as_cuda_does(platform_cpu):
    import torch

    device = platform_cpu.PlatformCPU().device_module
    assert isinstance(device, types.ModuleType)
    free_bytes, total_bytes = device.mem_get_info()
    assert 0 < device.memory_allocated() < free_bytes + device.memory_allocated() and free_bytes <= total_bytes
    assert device.max_memory_allocated() > 0 and device.memory_reserved(0) > 0
    state = device.get_rng_state()
    first = torch.rand(2)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    with device.stream(device.Stream()):
        pass
    assert device.current_device() == device.get_device_name() == "cpu"


def test_environment_is_complete_and_the_user_wins(platform_cpu, environment, clean_environment):
    clean_environment["VLLM_CPU_KVCACHE_SPACE"] = "4"
    environment.set_environment()
    expected = {**environment.CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "4"}
    assert {name: clean_environment[name] for name in expected} == expected
    assert platform_cpu.PlatformCPU().rollout_env_vars() == expected


def test_training_engine_is_found_for_the_cpu(platform_cpu, clean_environment, environment):
    from verl.workers.engine import EngineRegistry

    environment.set_environment()
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"


@pytest.mark.parametrize(
    ("plugins", "refused"), [(None, False), ("verl_war", False), ("other,verl_war", False), ("other", True)]
)
def test_engines_must_be_allowed_to_load_the_patches(plugin, clean_environment, plugins, refused):
    if plugins is not None:
        clean_environment["VLLM_PLUGINS"] = plugins
    if refused:
        with pytest.raises(SystemExit, match="unset VLLM_PLUGINS or add verl_war to it"):
            plugin.start((plugin._check_engines_load_us,))
    else:
        plugin.start((plugin._check_engines_load_us,))


def test_gpu_machines_get_neither_environment_nor_cpu_patches(plugin, gpu_build, clean_environment, monkeypatch):
    from verl_war.patches import registry

    installed = []
    monkeypatch.setattr(registry, "install", lambda patches, machine: installed.append(machine))
    plugin.start((plugin._prepare_cpu_machine, plugin._install_patches))
    assert installed == ["gpu"]
    assert "VERL_ENGINE_DEVICE" not in clean_environment and "OMP_NUM_THREADS" not in clean_environment


def test_failing_step_ends_the_process_before_the_next(plugin):
    ran = []

    def broken():
        raise KeyError("register")

    with pytest.raises(SystemExit, match="verl_war failed to start:\nTraceback(.|\n)*KeyError: 'register'"):
        plugin.start((lambda: ran.append(1), broken, lambda: ran.append(2)))
    assert ran == [1]


def test_steps_have_an_order(plugin):
    names = [step.__name__ for step in plugin.STEPS]
    assert names[:2] == ["_set_log_level", "_check_versions"] and names[-1] == "_register_war"


def test_cpu_settings_compose_with_stock_verl():
    import verl  # noqa: F401  (its plugin makes the group known to Hydra)
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        stock = OmegaConf.to_container(compose("ppo_trainer"))
        config = compose("ppo_trainer", overrides=["+war_machine=cpu"])
    merged = OmegaConf.merge(OmegaConf.create(stock), OmegaConf.load(CPU_SETTINGS))
    assert OmegaConf.to_container(config) == OmegaConf.to_container(merged), "all of the group, and nothing else"
    assert config.ray_kwargs.ray_init.num_gpus == config.trainer.n_gpus_per_node == 2
