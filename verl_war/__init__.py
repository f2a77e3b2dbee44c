"""verl_war: workload-aware rollouts for verl."""

from verl_war.version import __version__

__all__ = ["__version__"]
