"""Hydra configuration of WAR: YAML only."""
