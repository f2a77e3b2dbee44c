"""What the router tells a client process, with one waiting call: answers to held turns, and replicas that broke."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from verl_war.core.types import Turn
from verl_war.integration.verl.router_protocol import Answer, News


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of news; `turn` is the one that it answers, None when it answers none."""

    news: News
    turn: Turn | None = None


class Mailbox:
    """News of one process in order, kept until the process says that it has them: a call may be lost on its way."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._acknowledged = 0
        self._handed_out = 0
        self._has_news = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add a piece of news."""
        self._items.append(item)
        self._has_news.set()

    def withdraw(self, ticket: int) -> tuple[Turn, Answer] | None:
        """Take back the answer to a turn, if it is there and was not handed out yet."""
        for position in range(self._handed_out - self._acknowledged, len(self._items)):
            item = self._items[position]
            if item.turn is not None and item.news[:2] == ("answer", ticket):
                del self._items[position]
                return item.turn, item.news[2]
        return None

    async def take(self, acknowledged: int) -> tuple[int, list[News]]:
        """Wait for news.

        Args:
            acknowledged: How many pieces the process has had; those are dropped. Fewer than before: it began to count
                anew, and gets whatever is left.

        Returns:
            How many it has had with these, and these.
        """
        del self._items[: max(0, acknowledged - self._acknowledged)]
        self._acknowledged = acknowledged
        while not self._items:
            self._has_news.clear()
            await self._has_news.wait()
        self._handed_out = acknowledged + len(self._items)
        return self._handed_out, [item.news for item in self._items]
