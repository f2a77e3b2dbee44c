"""What a fixed-work comparison consists of: its runs in their order, their work, and what must not change between two
starts of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_war.compare.fixed_work import workload
from verl_war.compare.fixed_work.arms import Arm, EngineKind, find_arms
from verl_war.compare.fixed_work.episodes import FORMAT, Task, read_episodes
from verl_war.compare.fixed_work.texts import EpisodeTexts, RecordedTexts, Texts, conversations_of
from verl_war.compare.machine import GIB
from verl_war.sim.trace import TrajectorySpec

ENGINE_BYTES = int(1.7 * GIB)
"""Memory of one replica with the demo model: the server's process, the engine's and its worker's."""

BASE_BYTES = int(1.5 * GIB)
"""Memory of Ray, of the routers and of the process with the agent loops."""

KV_BYTES_PER_TOKEN = 12_288
"""Of the demo model in float32: keys and values of 4 layers and 3 heads of 64, with room to spare."""

MODEL = Path("recipes") / "demo_model" / "checkpoint"

EPISODES = Path("recipes") / "demo_model" / "episodes"
"""Recorded episodes, a file for each recipe."""


def episodes_file(repo: Path, recipe: str) -> Path:
    """Recorded episodes of a recipe."""
    return repo / EPISODES / f"{recipe}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step of trajectories, which every arm serves once.

    Attributes:
        load: Trajectories per replica.
        repeat: 1 for the first one of the load.
        seed: Of the trajectories and of the routers' tie-breaks.
    """

    load: float
    repeat: int
    seed: int

    @property
    def name(self) -> str:
        """Begins the names of its files."""
        return f"load{self.load:g}_repeat{self.repeat}"


WARM_UP = Case(load=8, repeat=0, seed=0)
"""The first use of everything, before anything is measured: with two trajectories on each replica, steps of the first
run that counted still took twice as long as later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm serving one case."""

    case: Case
    arm: str

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.case.name}_{self.arm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWorkPlan:
    """A comparison as the user asked for it.

    Attributes:
        arms: Names; the first one is the base of all ratios.
        loads: Trajectories per replica; with a trace the one that it holds.
        repeats: Runs of each arm at each load.
        replicas: Engines of each kind.
        kv_tokens: KV capacity of each.
        recipe: Whose recorded episodes are replayed, or whose text the trajectories of a trace say.
        trace: File of trajectories; empty to replay recorded episodes.
        clock_scale: Factor on the trace's delays.
        seed: Of the first repeat.
        limit_s: A run that takes longer has failed.
        memory_bytes: Free memory that is needed to start; 0 for what is estimated.
        out: Directory of the comparison.
        repo: Root of the clone that holds model and episodes.

    Raises:
        ValueError: A value is not what it may be; states name, value and expectation.
    """

    arms: tuple[str, ...]
    loads: tuple[float, ...]
    repeats: int
    replicas: int
    kv_tokens: int
    recipe: str
    trace: str
    clock_scale: float
    seed: int
    limit_s: float
    memory_bytes: int
    out: Path
    repo: Path

    def __post_init__(self) -> None:
        find_arms(",".join(self.arms))
        bounds = {
            "--repeats": (self.repeats, 1, 1000),
            "--replicas": (self.replicas, 1, 64),
            "--kv-tokens": (self.kv_tokens, 256, 10**8),
            "--seed": (self.seed, 0, 2**31),
            "--clock-scale": (self.clock_scale, 0.0, 1000.0),
            "--run-minutes": (self.limit_s / 60, 0.01, 1_000_000.0),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be between {low} and {high}")

    def found_arms(self) -> tuple[Arm, ...]:
        """The arms themselves."""
        return find_arms(",".join(self.arms))

    @property
    def engine_kinds(self) -> tuple[EngineKind, ...]:
        """Kinds of engines that the arms run on, each once."""
        return tuple(dict.fromkeys(arm.engine for arm in self.found_arms()))

    @property
    def needed_bytes(self) -> int:
        """Memory that the engines will take: they all stay up, so that the arms can take turns."""
        engines = len(self.engine_kinds) * self.replicas
        return self.memory_bytes or BASE_BYTES + engines * (ENGINE_BYTES + self.kv_tokens * KV_BYTES_PER_TOKEN)

    @property
    def model(self) -> Path:
        """The demo model, which is what the text can be drafted for."""
        return self.repo / MODEL

    @property
    def runs_directory(self) -> Path:
        """One record per run."""
        return self.out / "runs"

    @property
    def console_log(self) -> Path:
        """What the engines printed."""
        return self.out / "console.log"

    def cases(self) -> list[Case]:
        """All cases: each repeat goes through all loads, so that stopping early leaves whole sweeps."""
        repeats = range(1, self.repeats + 1)
        return [self.case(load, repeat) for repeat in repeats for load in self.loads]

    def case(self, load: float, repeat: int) -> Case:
        """The case of a load and a repeat, which has a seed of its own."""
        return Case(load=load, repeat=repeat, seed=self.seed + repeat - 1)

    def runs(self) -> list[Run]:
        """All runs in their order: arms take turns, in an order of its own for every case."""
        return [Run(case=case, arm=arm) for case in self.cases() for arm in self.order(case)]

    def order(self, case: Case) -> list[str]:
        """Arms as they run in a case; the order does not depend on which others are compared."""
        keys = {arm: random.Random(f"{case.name}/{case.seed}/{arm}").random() for arm in self.arms}
        return sorted(self.arms, key=keys.__getitem__)

    def specs(self, case: Case) -> tuple[TrajectorySpec, ...]:
        """The trajectories of a case.

        Raises:
            ValueError: The trace or the recording is missing or damaged.
        """
        if self.trace:
            specs = workload.from_trace(Path(self.trace))
        else:
            specs = workload.recorded(self.episodes(), round(case.load * self.replicas), case.seed)
        return workload.scaled(specs, self.clock_scale)

    def warm_up(self) -> list[TrajectorySpec]:
        """Trajectories for the first use of engines: those that fit.

        Raises:
            ValueError: The trace or the recording is missing or damaged.
        """
        fitting = [spec for spec in self.specs(WARM_UP) if spec.final_tokens <= self.kv_tokens]
        return fitting[: round(WARM_UP.load * self.replicas)]

    def episodes(self) -> tuple[Task, ...]:
        """The recording.

        Raises:
            ValueError: It is missing or damaged.
        """
        return read_episodes(episodes_file(self.repo, self.recipe))

    def texts(self) -> Texts:
        """What the trajectories say.

        Raises:
            ValueError: The recording is missing or damaged.
        """
        tasks = self.episodes()
        return RecordedTexts(conversations_of(tasks)) if self.trace else EpisodeTexts(tasks)

    def check_work(self) -> None:
        """Every case can be served.

        Raises:
            ValueError: A trajectory does not fit in a replica's KV, or the trace or the recording cannot be read.
        """
        self.texts()
        for case in self.cases():
            workload.check_fits(self.specs(case), self.kv_tokens)

    def identity(self) -> dict[str, Any]:
        """What must not change between two starts in the same directory. Arms, loads and repeats may be added.

        Raises:
            ValueError: The trace or the recording cannot be read.
        """
        names = ("replicas", "kv_tokens", "recipe", "trace", "clock_scale", "seed")
        work = {"mode": "fixed-work", "work": f"recorded {FORMAT} {_digest(episodes_file(self.repo, self.recipe))}"}
        # Only with a trace: directories without one stay what they were.
        trajectories = {"trace_digest": _digest(Path(self.trace))} if self.trace else {}
        return work | {name: getattr(self, name) for name in names} | trajectories

    def as_json(self) -> str:
        """For the process that carries it out."""
        return json.dumps(dataclasses.asdict(self) | {"out": str(self.out), "repo": str(self.repo)})


def _digest(path: Path) -> str:
    """Of what a file holds: its name stays when it is edited."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); get the file back, or name another one") from error


def plan_from_json(text: str) -> FixedWorkPlan:
    """The plan of `FixedWorkPlan.as_json`."""
    raw = json.loads(text)
    lists = {name: tuple(raw[name]) for name in ("arms", "loads")}
    return FixedWorkPlan(**(raw | lists | {"out": Path(raw["out"]), "repo": Path(raw["repo"])}))
