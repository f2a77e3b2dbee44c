"""Traces of a scripted, careless searcher, to teach a small model the tools.

The searcher knows how it is done: search the entity, open its document, read off the next entity, and so on. At every
step it may do something else instead, so that a model cloned from it reaches the right answer often enough for
reinforcement learning to start from, and seldom enough for it to have something to improve.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from recipes.search_agent.corpus import Document
from recipes.search_agent.generate import SIZES, Question, World, all_questions, build_world
from recipes.search_agent.index import CorpusIndex
from recipes.search_agent.prompt import prompt_messages
from recipes.search_agent.retrieval import RetrievalConfig, open_document, search

TOOLS_YAML = Path(__file__).with_name("tools.yaml")

TRACES_PER_WORLD = 25
"""A model that sees many worlds has to read the documents; one that sees a single world could learn it by heart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carelessness:
    """Probabilities of the searcher's mistakes."""

    wrong_query: float = 0.10
    """Searches the whole question, half a name, or something else that it has just read."""
    wrong_result: float = 0.10
    """Opens any of the results instead of the document about the entity."""
    stays_wrong: float = 0.50
    """Goes on with a document that is not about the entity, instead of searching once more."""
    misreads: float = 0.15
    """Takes another entity of the document for the one asked for."""
    stops_early: float = 0.25
    """Answers with the entity between two hops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ValueError(f"carelessness: {field.name} is {value!r}; expected a probability")


def tool_schemas() -> list[dict[str, Any]]:
    """Return the schemas of the tools as verl shows them to the model."""
    declared = yaml.safe_load(TOOLS_YAML.read_text(encoding="utf-8"))["tools"]
    return [tool["tool_schema"] for tool in declared]


def demonstrations(
    num_traces: int,
    seed: int,
    *,
    hops: int = 2,
    carelessness: Carelessness = Carelessness(),  # noqa: B008 - frozen
) -> Iterator[dict[str, Any]]:
    """Yield traces as ``{"messages": [...], "tools": [...], "correct": bool}``, each about another question.

    Messages are OpenAI chat messages; tool results come from the tools' own functions. The world is of size
    ``demo``, whose documents have one page.
    """
    schemas, size = tool_schemas(), SIZES["demo"]
    for start in range(0, num_traces, TRACES_PER_WORLD):
        rng = random.Random(f"search_agent/demonstrations/{seed}/{start}")
        world = build_world(size, size.num_people, seed=rng.getrandbits(32))
        index = CorpusIndex(world.documents)
        count = min(TRACES_PER_WORLD, num_traces - start)
        for question in rng.sample(list(all_questions(world, hops)), count):
            searcher = _Searcher(world, index, size.retrieval, question, carelessness, rng)
            answer = searcher.play()
            yield {"messages": searcher.messages, "tools": schemas, "correct": answer == question.answer}


class _Searcher:
    """One trajectory of the scripted policy."""

    def __init__(
        self,
        world: World,
        index: CorpusIndex,
        limits: RetrievalConfig,
        question: Question,
        carelessness: Carelessness,
        rng: random.Random,
    ) -> None:
        self.messages: list[dict[str, Any]] = [*prompt_messages(question.text)]
        self._world, self._index, self._limits = world, index, limits
        self._question, self._carelessness, self._rng = question, carelessness, rng
        self._may_search_again = True
        """Once a trajectory, so that it stays short."""

    def play(self) -> str:
        """Write the messages and return the answer given."""
        entity = self._question.path[0]
        for hop, relation in enumerate(self._question.relations):
            if hop > 0 and self._happens(self._carelessness.stops_early):
                break
            entity = self._read(self._find(entity), relation)
        self.messages.append({"role": "assistant", "content": f"<answer>{entity}</answer>"})
        return entity

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _find(self, entity: str) -> Document:
        """Search an entity and open a document, at best the one about it."""
        query = self._wrong_query(entity) if self._happens(self._carelessness.wrong_query) else entity
        self._call("search", {"query": query}, search)
        document = self._choose(self._index.search(query, self._limits.top_k), entity)
        self._call("open", {"doc_id": document.doc_id}, open_document)
        if document.title == entity or not self._may_search_again or self._happens(self._carelessness.stays_wrong):
            return document
        self._may_search_again = False
        return self._find(entity)

    def _wrong_query(self, entity: str) -> str:
        seen = [name for name in self._entities_in(self.messages[-1]["content"]) if name != entity]
        return self._rng.choice([self._question.text, self._rng.choice(entity.split()), *seen[-1:]])

    def _entities_in(self, text: str) -> list[str]:
        names = (name for kind in self._world.entities.values() for name in kind)
        return [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)]

    def _choose(self, results: list[Document], entity: str) -> Document:
        if self._happens(self._carelessness.wrong_result):
            return self._rng.choice(results)
        return next((document for document in results if document.title == entity), results[0])

    def _read(self, document: Document, relation: str) -> str:
        """Return the entity that the document names for a relation, or another one of it."""
        named = self._world.facts.get((document.title, relation))
        if named is not None and not self._happens(self._carelessness.misreads):
            return named
        others = [o for (subject, _), o in self._world.facts.items() if subject == document.title and o != named]
        return self._rng.choice(others or [document.title])

    def _call(self, name: str, arguments: dict[str, str], tool: Any) -> None:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "content": tool(self._index, self._limits, arguments)})
