"""Build the demo policy from scratch on one core, with a progress bar::

    python -m scripts.build_demo_model --out recipes/demo_model/checkpoint

The committed checkpoint was made by this command; ``BUILD.json`` beside it has the options and results. With
``--evaluate N`` the policy also plays N episodes of each recipe with the real tools.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo_model.build import BuildConfig, Progress, build, save, write_record
from recipes.demo_model.evaluate import CHECKPOINT_PATH, RECIPES, evaluate
from recipes.demo_model.training import Schedule

logger = logging.getLogger("build_demo_model")
EVALUATION_SEED = 1000
"""Tasks that no demonstration has."""


class BarProgress(Progress):
    """One bar per phase on standard error."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def phase(self, text: str, total: int) -> None:
        """Close the bar of the phase before and open one."""
        self.close()
        self._bar = tqdm(desc=text, total=total, mininterval=1.0)

    def advance(self, note: str = "") -> None:
        """Move the bar on."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Finish the open bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    defaults = BuildConfig()
    parser = argparse.ArgumentParser(prog="build_demo_model", description="Train the demo policy of the recipes.")
    parser.add_argument("--out", type=Path, default=CHECKPOINT_PATH, metavar="DIR")
    parser.add_argument("--steps", type=int, default=defaults.schedule.num_steps)
    parser.add_argument("--traces", type=int, default=defaults.num_traces, help="demonstrations of each recipe")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=1, help="more make it faster only on idle cores")
    parser.add_argument("--evaluate", type=int, default=64, metavar="N", help="episodes of each recipe, 0 for none")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, command: str) -> None:
    """Train, save, evaluate and print the metrics.

    Raises:
        ValueError: an option is out of range.
    """
    torch.set_num_threads(options.threads)
    schedule = Schedule(num_steps=options.steps)
    config = BuildConfig(num_traces=options.traces, seed=options.seed, schedule=schedule)
    progress = BarProgress()
    result = build(config, progress)
    progress.close()
    save(result, config, command, options.out)
    logger.info("saved to %s: %s", options.out, json.dumps(result.metrics))
    if options.evaluate:
        _evaluate(options.out, options.evaluate)


def _evaluate(out: Path, num_episodes: int) -> None:
    """Play episodes with the saved, rounded weights and add the outcome to the record."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    record = json.loads((out / "BUILD.json").read_text(encoding="utf-8"))
    record["episodes"] = {}
    for recipe in RECIPES:
        report = evaluate(model, tokenizer, recipe, num_episodes=num_episodes, seed=EVALUATION_SEED)
        record["episodes"][recipe] = dataclasses.asdict(report)
        logger.info("%s", json.dumps(record["episodes"][recipe], indent=1))
    write_record(out, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        run(parse_options(given), shlex.join(["python", "-m", "scripts.build_demo_model", *given]))
    except ValueError as error:
        logger.error("build_demo_model: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
