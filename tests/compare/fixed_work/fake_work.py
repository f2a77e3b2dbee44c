"""The working process without engines: the real order, records and resumption around runs that only say how long.

What a test wants of it is in `fake.json` of the comparison's directory:
{"fail": [arm], "short": [arm], "hang": arm, "fail_earlier": true}.
"""

import asyncio
import json
import os
import sys
import time

from tests.compare.fixed_work.helpers import replayed
from verl_war.compare.fixed_work import work
from verl_war.compare.fixed_work.plan import plan_from_json
from verl_war.compare.fixed_work.results import Replayed, RunFailed, TurnRecord

SECONDS = {"stock": 8.0, "margin": 6.0, "war": 4.0}


def main(text):
    plan = plan_from_json(text)
    file = plan.out / "fake.json"
    wanted = json.loads(file.read_text()) if file.exists() else {}

    async def start(spec, replicas):
        with (plan.out / "starts").open("a") as starts:
            starts.write(f"{spec.kind}\n")
        return {}

    async def play(arm, engines, step, earlier=(), keeps_texts=False):
        is_measured = step.seed < work.EARLIER_SEED and step.seed != work.WARM_UP.seed
        kind = "measured" if is_measured else "earlier" if keeps_texts else "warm-up"
        with (plan.out / "plays").open("a") as plays:
            plays.write(f"{arm.name} {len(earlier)} {kind}\n")
        if kind == "earlier" and wanted.get("fail_earlier"):
            raise OSError("no space")
        if wanted.get("hang") == arm.name and is_measured:
            (plan.out / "hangs").write_text(str(os.getpid()))
            time.sleep(600)
        done = Replayed(makespan_s=SECONDS.get(arm.name, 1.0) + 0.01 * (step.seed % 10), busy_s={"r0": 1.0, "r1": 1.0})
        for spec in step.specs:
            for number, turn in enumerate(spec.turns):
                tokens = turn.output_tokens // 2 if arm.name in wanted.get("short", ()) else turn.output_tokens
                done.turns.append(TurnRecord(spec.trajectory_id, number, "r0", 0.0, 0.1, 1.0, 10, 5, tokens))
            done.end_s[spec.trajectory_id] = done.makespan_s
        if arm.name in wanted.get("fail", ()) and is_measured:
            raise RunFailed("RuntimeError: an engine broke", replayed(2.0))
        done.texts = [("r0", ("x", "g", 1, [1, 2], [(1, 1)]))] if keeps_texts else []
        return done

    worker = work.Worker(plan, start, play)
    work.stop_servers = lambda servers: None
    asyncio.run(worker.work())
    return 1 if worker.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
