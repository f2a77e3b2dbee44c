"""The router's journal file, and that it replays."""

import asyncio
import errno
import json

import pytest

from tests.integration.conftest import ADMISSION, until
from verl_war.cli import main

pytestmark = pytest.mark.upstream


async def generate(client, session, prompt=tuple(range(300))):
    return await client.generate(session, prompt_ids=list(prompt), sampling_params={})


async def test_a_run_is_recorded_and_leads_to_the_same_decisions(make_rig, tmp_path, monkeypatch, capsys):
    from verl_war.integration.verl import router_health

    monkeypatch.setattr(router_health, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(router_health, "CALM_POLL_EVERY_S", 0.01)
    path = tmp_path / "runs" / "journal.jsonl"
    rig = make_rig(2, settings={**ADMISSION, "journal_path": str(path)}, delay_s=0.05, kv_capacity_tokens=6000)
    client = rig.client()
    await client.link._join()

    async def trajectory(number):
        for turn in range(3):
            await generate(client, f"s{number}", range(100 + 100 * turn))
        client.end_trajectory(f"s{number}", failed=number == 0)

    await asyncio.gather(*(trajectory(number) for number in range(12)))
    rig.servers["r0"].die()
    await until(lambda: not rig.manager._trajectories and len(rig.manager.inflight) == 1)
    await rig.war_router.step_metrics()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["config"]["seed"] is not None, "without a seed of its own the run got one"
    events = {record["event"] for record in records[1:]}
    assert {"turn", "turn_end", "trajectory_end", "snapshot", "replica_down", "weights_updated", "report"} <= events
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(path), "--why", "s0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("fails")


async def test_readings_are_recorded_also_where_nothing_is_decided_by_them(make_rig, tmp_path, monkeypatch):
    from tests.core.test_speculation_report import counters
    from verl_war.integration.verl import router_speculation

    monkeypatch.setattr(router_speculation, "ASK_EVERY_S", 0.01)
    path = tmp_path / "journal.jsonl"
    rig = make_rig(1, settings={"speculation": {"enabled": True}, "journal_path": str(path)})
    rig.servers["r0"].target.speculation = counters()
    await generate(rig.client(), "s")
    await until(lambda: rig.manager._fleet.replicas["r0"].speculation is not None)
    await rig.war_router._journal.write()
    events = [json.loads(line).get("event") for line in path.read_text().splitlines()]
    assert {"snapshot", "speculation"} <= set(events)
    assert main(["replay", str(path)]) == 0


async def test_a_journal_that_exists_is_kept(make_rig, tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("precious\n")
    rig = make_rig(1, settings={"journal_path": str(path)})
    await generate(rig.client(), "s")
    await rig.war_router.step_metrics()
    assert path.read_text() == "precious\n"
    assert main(["replay", f"{path}.2"]) == 0


async def test_a_place_that_cannot_be_written_is_refused(make_rig, tmp_path):
    (tmp_path / "file").write_text("")
    rig = make_rig(1, settings={"journal_path": str(tmp_path / "file" / "journal.jsonl")})
    with pytest.raises(ValueError, match=r"custom.war.journal_path='.*journal.jsonl' cannot be written .* or null"):
        await rig.war_router.configure(rig.client().war_config, False)


async def test_a_full_disk_ends_the_journal_and_not_the_run(make_rig, tmp_path, monkeypatch, caplog):
    from verl_war.integration.verl import journal

    rig = make_rig(1, settings={"journal_path": str(tmp_path / "journal.jsonl")})
    client = rig.client()
    await generate(client, "s")

    def full(path, entries):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "_append", full)
    await rig.war_router.step_metrics()
    assert "-> off ([Errno 28] No space left on device)" in caplog.text
    assert (await generate(client, "s")).token_ids == [7, 8]
    assert rig.war_router._journal._buffer == []
