"""`verl-war unchanged DIRECTORY...`: whether WAR left the training as it was.

DIRECTORY is that of a finished `verl-war compare --mode live`, best of three repeats or more. Compared are the
trajectories of step 1, which both arms sample from the same policy, those of all steps, the reward at the end, and how
well log-probs of rollout and actor agree. The exit status is 1 when something changed or cannot be told.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from verl_war.compare.tables import as_text
from verl_war.compare.unchanged.judge import ALPHA, MIN_SEEDS, Criteria, judge
from verl_war.compare.unchanged.trajectories import read_trajectories
from verl_war.compare.workspace import write_atomically

EXIT_CHANGED = 1
EXIT_USAGE = 2

NAME = "unchanged"
"""Of the files that are written."""

ANSWERS = {True: "yes", False: "NO", None: "cannot be told"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `verl-war unchanged`."""
    default = Criteria()
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY", help="of a finished comparison")
    parser.add_argument("--out", type=Path, help=f"where {NAME}.txt, .json and .png go (the first DIRECTORY)")
    parser.add_argument(
        "--margin", type=float, default=default.margin, help="difference of rewards that counts as none (%(default)s)"
    )
    parser.add_argument(
        "--final-steps", type=int, default=default.final_steps, help="last steps of the final reward (%(default)s)"
    )
    parser.add_argument(
        "--permutations", type=int, default=default.permutations, help="drawn for each test (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of permutations and resamples (%(default)s)")


def run(options: argparse.Namespace, stream: TextIO | None = None) -> int:
    """Write the files, print the table, and return the exit status: 0, 1 (changed, or unknown), 2 (usage)."""
    stream = stream or sys.stdout
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError('matplotlib must be installed for this command: pip install "verl_war[recipes]"')
        criteria = Criteria(
            margin=options.margin,
            final_steps=options.final_steps,
            permutations=options.permutations,
            seed=options.seed,
        )
        studies = [read_trajectories(directory) for directory in options.directories]
        found = judge(studies, criteria)
        out = options.out or options.directories[0]
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"verl-war unchanged: {error}\n")
        return EXIT_USAGE
    # Imported late: it takes a second, and errors in the options should not wait for it.
    from verl_war.compare.unchanged.figure import draw

    draw(studies, found["studies"], out / f"{NAME}.png")
    write_atomically(out / f"{NAME}.json", json.dumps(found, indent=1) + "\n")
    text = as_report(found)
    write_atomically(out / f"{NAME}.txt", text)
    stream.write(f"{text}\n{out / NAME}.txt, .json and .png\n")
    return 0 if found["unchanged"] else EXIT_CHANGED


def as_report(found: dict[str, Any]) -> str:
    """All findings as text."""
    parts = [_study(result, found["criteria"]) for result in found["studies"]]
    pooled = found["final_reward"]
    parts.append(f"all runs: final reward, {_difference(pooled)}; the same: {ANSWERS[pooled['same']]}")
    parts.append(f"RL unchanged in all of this: {'yes' if found['unchanged'] else 'not shown'}")
    return "\n\n".join(parts) + "\n"


def _study(result: dict[str, Any], criteria: dict[str, Any]) -> str:
    base, other = result["arms"]
    counts = " and ".join(f"{count} of {arm}" for arm, count in result["trajectories"].items())
    seeds = ", ".join(map(str, result["seeds"]))
    smallest = result["all_steps"][0]["smallest_p_runs"]
    verdict = result["verdict"]
    return "\n\n".join(
        [
            f"{result['title']}: seeds {seeds}; {result['steps']} steps; trajectories: {counts}",
            as_text(_test_rows(result)),
            f"p: {criteria['permutations']} permutations; step 1 within (seed, prompt), where both arms have the same "
            f"policy; all steps by whole (seed, prompt)\nand, exactly, by whole runs, which cannot be less than "
            f"{smallest:.3g} with so few. Holm: over all tests of that scope. Policies\nof two runs drift apart by "
            "chance, too, so a small p over all steps alone is no proof of a change.",
            as_text(_reward_rows(result)),
            _interval(result["final_reward"], criteria),
            _log_probs(result["log_probs"]),
            "\n".join(
                [
                    f"same distribution at step 1:   {ANSWERS[verdict['same_distribution_at_step_1']]} (no test below "
                    f"{ALPHA})",
                    f"same final reward:             {ANSWERS[verdict['same_final_reward']]} (yes: interval within "
                    f"+-{criteria['margin']:g}; no: on one side of 0)",
                    f"same agreement of log-probs:   {ANSWERS[verdict['same_log_prob_agreement']]}",
                ]
            ),
        ]
    )


def _test_rows(result: dict[str, Any]) -> list[list[str]]:
    base, other = result["arms"]
    rows = [["", base, other, "difference", "p", "Holm", "runs p", "KS", "p", "Holm", "runs p"]]
    for scope, title in (("first_step", "step 1"), ("all_steps", "all steps")):
        for row in result[scope]:
            cells = [f"{row[key]:.3f}" for key in ("base_mean", "other_mean")] + [f"{row['difference']:+.3f}"]
            cells += [_p(row["p_difference"]), _p(row["holm_difference"]), _p(row.get("p_difference_runs"))]
            cells += [f"{row['ks']:.3f}", _p(row["p_ks"]), _p(row["holm_ks"]), _p(row.get("p_ks_runs"))]
            rows.append([f"{row['quantity']}, {title}", *cells])
    return rows


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _reward_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = [["reward by step, mean (least..most)", *(str(step) for step in range(1, result["steps"] + 1))]]
    for arm in result["arms"]:
        columns = zip(*result["curves"][arm].values(), strict=True)
        rows.append([arm, *(f"{sum(c) / len(c):.3f} ({min(c):.3f}..{max(c):.3f})" for c in columns)])
    return rows


def _interval(final: dict[str, Any], criteria: dict[str, Any]) -> str:
    means = f"{final['base_mean']:.3f} and {final['other_mean']:.3f}"
    return f"final reward (last {criteria['final_steps']} steps): {means}, {_difference(final)}"


def _difference(final: dict[str, Any]) -> str:
    per_seed = ", ".join(f"{value:+.3f}" for value in final["difference_per_seed"])
    text = f"difference {final['difference']:+.3f} (by run {per_seed})"
    if final["interval"] is None:
        return f"{text}; no interval from fewer than {MIN_SEEDS} runs"
    low, high = final["interval"]
    side = ", on one side of 0" if final["is_one_sided"] else ""
    return f"{text}, {1 - ALPHA:.0%} bootstrap interval {low:+.3f}..{high:+.3f}{side}"


def _log_probs(found: dict[str, Any]) -> str:
    if not found["arms"]:
        return "log-probs of the rollout: none on record; actor_rollout_ref.rollout.calculate_log_probs=True keeps them"
    arms = ", ".join(
        f"{arm} mean {each['mean']:.2e} max {each['max']:.2e}, {each['not_finite']} trajectories not finite"
        for arm, each in found["arms"].items()
    )
    return f"|log-prob of rollout - of actor|, generated tokens: {arms} (means may differ by {found['tolerance']:.1e})"
