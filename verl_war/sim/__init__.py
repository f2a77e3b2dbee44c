"""Virtual-clock simulator of a fleet of vLLM replicas that serves one rollout step; needs no GPU and no upstream."""
