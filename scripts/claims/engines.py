"""Drafting on one real engine, and two real replicas."""

from __future__ import annotations

from typing import Any

from scripts.claims.marks import claim
from scripts.claims.results import read, span, spread, table, times

DRAFTING_ARMS = {
    "vllm warm": "vLLM's suffix, warm", "ours siblings": "siblings", "ours history": "history",
    "plain engine": "plain engine",
}  # fmt: skip
"""Arms of `scripts/bench_speculation.py` that the tables show, and what they are called there."""


def _drafting(folder: str) -> Any:
    (result,) = read(f"speculation/{folder}/results.json")["results"]
    return result


def _arm(word: str) -> str:
    return word.replace("_", " ")


@claim
def drafting(folder: str) -> str:
    """Speed-up by live requests."""
    rows = [
        [live, f"{arms['none']['tokens_per_s']:.0f}"]
        + [spread(arms[arm]["ratio"], arms[arm]["ratio_least"], arms[arm]["ratio_most"]) for arm in DRAFTING_ARMS]
        for live, arms in _drafting(folder)["batches"].items()
    ]
    return table(["live requests", "tokens/s without", *DRAFTING_ARMS.values()], rows)


@claim
def drafting_speedup(folder: str, arm: str, *live: str) -> str:
    """One arm's speed-ups at some numbers of live requests."""
    batches = _drafting(folder)["batches"]
    return times(batches[number][_arm(arm)]["ratio"] for number in live)


@claim
def drafting_span(folder: str, arm: str) -> str:
    """Least and greatest speed-up of an arm."""
    return span(arms[_arm(arm)]["ratio"] for arms in _drafting(folder)["batches"].values())


@claim
def drafting_repeats(folder: str) -> str:
    """How often each arm was measured."""
    return str(read(f"speculation/{folder}/results.json")["repeats"])


@claim
def entropy(folder: str) -> str:
    """Of what the model samples, in nats."""
    return f"{_drafting(folder)['entropy_nats']:.2g}"


@claim
def tokens_per_step(folder: str, arm: str) -> str:
    """Tokens of one live request in an engine step, in the last repeat."""
    run = _drafting(folder)["batches"]["1"][_arm(arm)]["last_run"]
    return f"{run['tokens'] / run['steps']:.2f}"


def _error(row: dict[str, float], arm: str) -> str:
    return f"{row[f'{arm} ratio']:.3f} +- {row[f'{arm} error']:.3f}"


def _stepwise(path: str) -> dict[str, dict[str, float]]:
    return dict(read(f"speculation/{path}.json")["batches"])


@claim
def no_gain() -> str:
    """WAR against a plain engine step by step, where nothing can be predicted."""
    demo, smollm2 = _stepwise("hot/auto"), _stepwise("smollm2/auto")
    rows = [
        [live]
        + [_error(models[live], arm) if live in models else "" for models in (demo, smollm2) for arm in _AUTO_ARMS]
        for live in demo
    ]
    head = ["demo, T=2: WAR / plain", "plain again / plain", "SmolLM2: WAR / plain", "plain again / plain"]
    return table(["live requests", *head], rows)


_AUTO_ARMS = ("war", "plain again")


@claim
def no_gain_drafted() -> str:
    """Tokens drafted in all of these measurements."""
    rows = [*_stepwise("hot/auto").values(), *_stepwise("smollm2/auto").values()]
    return f"{sum(row['drafted_tokens'] for row in rows)}"


@claim
def no_gain_speed() -> str:
    """WAR's speed over the plain engine's, in all of these measurements."""
    rows = [*_stepwise("hot/auto").values(), *_stepwise("smollm2/auto").values()]
    low, high = min(1 / row["war ratio"] for row in rows), max(1 / row["war ratio"] for row in rows)
    return f"{low:.2f}x to {high:.2f}x"


@claim
def no_gain_worst() -> str:
    """The most that looking for drafts cost, and of what."""
    worst = max(_stepwise("hot/auto").values(), key=lambda row: row["war ratio"])
    return f"{worst['war ratio'] - 1:.1%} of steps of {worst['plain ms']:.0f} ms"


@claim
def steps(path: str) -> str:
    """Decoding steps of each engine."""
    return str(read(f"speculation/{path}.json")["steps"])


@claim
def switched_off() -> str:
    """An engine that may speculate and is switched off, against one that cannot."""
    rows = [
        [live, f"{row['plain ms']:.2f}", _error(row, "off"), _error(row, "plain again")]
        for live, row in _stepwise("off/off").items()
    ]
    return table(["live requests", "plain engine, ms per step", "speculation off / plain", "plain again / plain"], rows)


@claim
def switched_off_worst() -> str:
    """The most that it took over the mean of both plain engines."""
    rows = _stepwise("off/off").values()
    return f"{max(row['off ratio'] / ((1 + row['plain again ratio']) / 2) for row in rows) - 1:.1%}"


@claim
def draft_message() -> str:
    """The same where the worker is another process, with and without drafts that travel with the tokens."""
    arms = ("plain again", "war off", "war off, drafts asked for")
    rows = [
        [live, f"{row['plain ms']:.2f}", *(_error(row, arm) for arm in arms)]
        for live, row in read("speculation/off/draft_message.json")["batches"].items()
    ]
    return table(["live requests", "plain engine, ms per step", *(f"{arm} / plain" for arm in arms)], rows)


@claim
def draft_message_repeats() -> str:
    """How often each batch was measured."""
    return str(read("speculation/off/draft_message.json")["repeats"])


def _cases(folder: str) -> dict[str, Any]:
    return {str(case["load"]): case for case in read(f"{folder}/placement.json")["cases"]}


@claim
def placement(folder: str) -> str:
    """Two real replicas by load, beside what the simulator says of the same trajectories."""
    rows = [
        [
            load,
            str(len(case["repeats"])),
            f"{case['kv_demand_peak']:.1f}",
            spread(case["measured_ratio"], *case["measured_ratio_min_max"]),
            spread(case["simulated_ratio"], *case["simulated_ratio_min_max"]),
            f"{case['prediction_error']:+.0%}",
        ]
        for load, case in _cases(folder).items()
    ]
    head = ["trajectories per replica", "workloads", "peak of contexts over KV"]
    return table([*head, "measured", "simulated with measured step times", "error"], rows)


@claim
def placement_ratio(folder: str, load: str) -> str:
    """Speed-up at one load, and its range."""
    case = _cases(folder)[load]
    return spread(case["measured_ratio"], *case["measured_ratio_min_max"])


@claim
def placement_speedup(folder: str, *loads: str) -> str:
    """Speed-ups at some loads."""
    cases = _cases(folder)
    return times(cases[load]["measured_ratio"] for load in loads)


@claim
def placement_room() -> str:
    """Speed-ups where everything fits, of both series."""
    return " / ".join(f"{_cases(folder)['4']['measured_ratio']:.2f}x" for folder in ("placement", "placement_room"))


@claim
def placement_kv(folder: str, *loads: str) -> str:
    """Contexts over KV at some loads."""
    cases = _cases(folder)
    return " / ".join(f"{cases[load]['kv_demand_peak']:.1f}" for load in loads)


def _pairs(folder: str) -> list[dict[str, Any]]:
    return [repeat["measured"] for case in _cases(folder).values() for repeat in case["repeats"]]


@claim
def placement_prompts(folder: str) -> str:
    """Prompt tokens per generated one."""
    return span((pair["stock"]["prompt_tokens"] / pair["stock"]["output_tokens"] for pair in _pairs(folder)), ".0f")


@claim
def placement_slower(folder: str) -> str:
    """How many workloads WAR was slower on."""
    slower = [pair["war"]["makespan_s"] > pair["stock"]["makespan_s"] for pair in _pairs(folder)]
    return f"slower in {sum(slower)} of {len(slower)}"


@claim
def placement_processor(folder: str) -> str:
    """Processor time of WAR's router and client beyond stock verl's, over the time of all cores."""
    cores = read(f"{folder}/placement.json")["cores"]

    def used_s(arm: dict[str, float]) -> float:
        return arm["router_cpu_s"] + arm["client_cpu_s"]

    shares = [(used_s(p["war"]) - used_s(p["stock"])) / (p["war"]["makespan_s"] * cores) for p in _pairs(folder)]
    return span(shares, ".1%")
