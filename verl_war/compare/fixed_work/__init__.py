"""Fixed work: the same trajectories, turn by turn and token by token, on real engines in every arm of a comparison."""
