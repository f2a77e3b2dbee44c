"""Whether training is the same: `verl-war unchanged`."""

from __future__ import annotations

from typing import Any

from scripts.claims.marks import claim
from scripts.claims.results import read, table

ANSWERS = {True: "yes", False: "no", None: "cannot be told"}


def _results(folder: str) -> Any:
    return read(f"{folder}/unchanged.json")


@claim
def unchanged(folder: str) -> str:
    """What was found for each algorithm, and for the final reward of all runs together."""
    results = _results(folder)
    head = ["", "runs of each", "least p at step 1 (Holm)", "final reward of stock verl, WAR", "difference (95%)",
            "log-prob distance of stock verl, WAR", "same at step 1 / final reward / log-probs"]  # fmt: skip
    lines = [_line(study) for study in results["studies"]]
    runs = sum(len(study["seeds"]) for study in results["studies"])
    together = results["final_reward"]
    lines.append(["together", str(runs), "", "", _difference(together), "", ANSWERS[together["same"]]])
    return table(head, lines)


def _line(study: dict[str, Any]) -> list[str]:
    base, other = study["arms"]
    final, verdict = study["final_reward"], study["verdict"]
    least_p = min(min(test["holm_difference"], test["holm_ks"]) for test in study["first_step"])
    distances = (study["log_probs"]["arms"][arm]["mean"] for arm in (base, other))
    answers = (verdict[f"same_{name}"] for name in ("distribution_at_step_1", "final_reward", "log_prob_agreement"))
    return [
        study["title"],
        str(len(study["seeds"])),
        f"{least_p:.2f}",
        f"{final['base_mean']:.3f}, {final['other_mean']:.3f}",
        _difference(final),
        ", ".join(f"{distance:.1e}" for distance in distances),
        " / ".join(ANSWERS[answer] for answer in answers),
    ]


def _difference(final: dict[str, Any]) -> str:
    low, high = final["interval"]
    return f"{final['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
