"""The router's journal as a file: one JSON record a line, written about once a second and away from the decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_war.core.config import WarConfig
from verl_war.core.config_parsing import ROOT_KEY
from verl_war.core.journal import Entry, RecordingManager, as_record, header
from verl_war.core.machine_profile import MachineProfile

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
"""What a killed router loses of its journal at most; seldom enough that a batch is worth its thread."""


class Journal:
    """A manager whose events and decisions go to `config.journal_path`.

    A journal that exists is left alone (a restarted router begins the next one, with `.2` and so on behind its name).

    Raises:
        ValueError: The file cannot be made.
    """

    def __init__(self, config: WarConfig, full_determinism: bool, profile: MachineProfile | None = None) -> None:
        assert config.journal_path is not None
        if config.seed is None:
            config = replace(config, seed=secrets.randbits(63))
        self._buffer: list[Entry] = []
        self._writing = asyncio.Lock()
        self._is_open = True
        self.manager = RecordingManager(config, full_determinism, self._record, profile)
        try:
            first = header(config, full_determinism, profile)
            self.path = _create(Path(config.journal_path).expanduser().absolute(), first)
        except OSError as error:
            raise ValueError(
                f"{ROOT_KEY}.journal_path={config.journal_path!r} cannot be written ({error}); expected a file in a "
                f"directory that the router may write to, or null"
            ) from error
        logger.info("journal: off -> %s", self.path)

    async def write_every_second(self) -> None:
        """Keep the file up to date. Runs until it is cancelled."""
        while self._is_open:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Write what has happened so far."""
        async with self._writing:
            entries, self._buffer = self._buffer, []
            try:
                await asyncio.to_thread(_append, self.path, entries)
            except OSError as error:
                # Training matters more than its record.
                self._is_open = False
                logger.error("journal: %s -> off (%s); it ends there", self.path, error)

    def _record(self, entry: Entry) -> None:
        if self._is_open:
            self._buffer.append(entry)


def _create(path: Path, first: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            with candidate.open("x") as file:
                file.write(json.dumps(first) + "\n")
            return candidate
        except FileExistsError:
            number += 1


def _append(path: Path, entries: Sequence[Entry]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(as_record(entry)) + "\n" for entry in entries)
