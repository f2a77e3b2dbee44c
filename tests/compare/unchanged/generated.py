"""Finished comparisons whose trajectories are drawn from known distributions."""

import json

import numpy as np


def write_comparison(folder, seeds=(1, 2, 3), steps=4, prompts=8, samples=4, change=None, chance=0, **plan):
    """Write what two arms leave behind.

    Rewards, lengths and turns depend on the prompt; rewards rise from step to step, each run at its own pace.

    Args:
        folder: Directory of the comparison.
        change: Gets each trajectory of WAR's arm and may change it.
        chance: Seed of all draws.
        plan: Fields of the plan to change.
    """
    rng = np.random.default_rng(chance)
    trials = []
    for seed in seeds:
        ease = rng.uniform(0.1, 0.5, prompts)  # the same tasks in both arms
        for arm in ("stock", "war"):
            name = arm if seed == seeds[0] else f"{arm}-{seed}"
            trials.append({"name": name, "arm": arm, "seed": seed})
            pace = rng.normal(0.1, 0.01)
            numbers = folder / name / "trajectories" / "numbers"
            numbers.mkdir(parents=True)
            for step in range(1, steps + 1):
                rows = [
                    draw(rng, f"{seed}-{p}", ease[p] + pace * (step - 1))
                    for p in range(prompts)
                    for _ in range(samples)
                ]
                if arm == "war" and change:
                    rows = [change(row, step) for row in rows]
                (numbers / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"recipe": "code_agent", "algorithm": "grpo", "steps": steps, "arms": ["stock", "war"]}
    (folder / "report.json").write_text(json.dumps({"plan": values | plan, "trials": trials}))
    return folder


def draw(rng, prompt, chance_of_success):
    """One trajectory: failures are longer than successes."""
    solved = rng.random() < chance_of_success
    turns = int(rng.integers(4, 8) + 4 * (not solved))
    distance = rng.uniform(1e-6, 2e-6)
    return {
        "key": "a_0_0",
        "prompt": prompt,
        "reward": float(solved),
        "generated_tokens": int(turns * rng.integers(20, 30)),
        "turns": turns,
        "log_prob_diff_mean": distance,
        "log_prob_diff_max": 10 * distance,
    }
