"""An invented world as a corpus of short documents, and multi-hop questions about it.

Entities are people, companies, towns, rivers and lakes. Every entity has one document, which states each of its
relations in one sentence; a relation has exactly one object, so that a chain of relations from a named entity has
exactly one answer, and the answer stands word for word in the last document of the chain. Everything follows from the
seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from recipes.search_agent.corpus import Document
from recipes.search_agent.names import NAMES
from recipes.search_agent.retrieval import RetrievalConfig

MAX_HOPS = 3
"""Four nested relations are hard to read even for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What a document says about an entity of one kind, and how a question asks for it."""

    name: str
    subject: str
    target: str
    sentence: str
    phrase: str


RELATIONS = (
    Relation(
        name="birthplace",
        subject="person",
        target="town",
        sentence="{s} was born in {o}.",
        phrase="the birthplace of {}",
    ),
    Relation(
        name="employer", subject="person", target="company", sentence="{s} works for {o}.", phrase="the employer of {}"
    ),
    Relation(
        name="seat", subject="company", target="town", sentence="{s} has its seat in {o}.", phrase="the seat of {}"
    ),
    Relation(
        name="founder",
        subject="company",
        target="person",
        sentence="{s} was founded by {o}.",
        phrase="the founder of {}",
    ),
    Relation(
        name="river", subject="town", target="river", sentence="{s} lies on the river {o}.", phrase="the river of {}"
    ),
    Relation(
        name="mayor", subject="town", target="person", sentence="The mayor of {s} is {o}.", phrase="the mayor of {}"
    ),
    Relation(name="lake", subject="river", target="lake", sentence="{s} flows into {o}.", phrase="the lake below {}"),
    Relation(
        name="nearest_town",
        subject="lake",
        target="town",
        sentence="The town nearest to {s} is {o}.",
        phrase="the town nearest to {}",
    ),
)

PEOPLE_PER_ENTITY = {"person": 1, "company": 3, "town": 2, "river": 4, "lake": 6}
"""For each kind, how many people there are for one of its entities: shared objects make wrong turns plausible."""

QUESTIONS_PER_PERSON = {1: 3, 2: 5, 3: 6}
"""Lower bounds for each number of hops; with them the size of a world follows from the questions wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSize:
    """How large a generated corpus is, and how much of it the tools show at a time. Ranges are inclusive."""

    num_people: int
    """At least; a world grows when more questions are wanted. There are about 2.25 documents for a person."""
    filler_sentences: tuple[int, int]
    """In each document, about 20 tokens each."""
    retrieval: RetrievalConfig


SIZES = {
    # A model of one or two million parameters has to read it.
    "demo": CorpusSize(num_people=60, filler_sentences=(0, 0), retrieval=RetrievalConfig()),
    "small": CorpusSize(
        num_people=600,
        filler_sentences=(4, 10),
        retrieval=RetrievalConfig(top_k=5, snippet_chars=120, page_chars=2_000),
    ),
    # A document is three or four pages of about 1,900 tokens.
    "long": CorpusSize(
        num_people=120,
        filler_sentences=(200, 400),
        retrieval=RetrievalConfig(top_k=20, snippet_chars=250, page_chars=7_500),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Entities by kind, the object of each (subject, relation name), and one document for each entity."""

    entities: dict[str, list[str]]
    facts: dict[tuple[str, str], str]
    documents: list[Document] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its only answer, and how one gets there: ``relations[i]`` leads from ``path[i]`` to ``path[i+1]``."""

    text: str
    answer: str
    path: tuple[str, ...]
    relations: tuple[str, ...]


def generate(
    size: CorpusSize, num_questions: int, hops: tuple[int, ...], seed: int
) -> tuple[list[Document], list[Question]]:
    """Return a corpus and so many different questions about it, in random order.

    Raises:
        ValueError: ``num_questions`` or ``hops`` is out of range, or there are not enough names for so many questions.
    """
    if num_questions < 1:
        raise ValueError(f"num_questions is {num_questions}; expected 1 or more")
    if not hops or not set(hops) <= set(range(1, MAX_HOPS + 1)):
        raise ValueError(f"hops is {hops}; expected numbers from 1 to {MAX_HOPS}")
    per_person = sum(QUESTIONS_PER_PERSON[number] for number in set(hops))
    world = build_world(size, max(size.num_people, -(-num_questions // per_person)), seed)
    questions = [question for number in sorted(set(hops)) for question in all_questions(world, number)]
    assert len(questions) >= num_questions, f"{len(questions)} questions in a world made for {num_questions}"
    return world.documents, random.Random(f"search_agent/questions/{seed}").sample(questions, num_questions)


def build_world(size: CorpusSize, num_people: int, seed: int) -> World:
    """Return a world with so many people and its documents.

    Raises:
        ValueError: there are not enough names.
    """
    rng = random.Random(f"search_agent/world/{seed}")
    # Four of a kind at least, so that there are wrong choices.
    counts = {kind: max(4, num_people // share) for kind, share in PEOPLE_PER_ENTITY.items()}
    entities = {kind: NAMES[kind].draw(rng, count) for kind, count in counts.items()}
    facts = {(s, r.name): rng.choice(entities[r.target]) for r in RELATIONS for s in entities[r.subject]}
    world = World(entities=entities, facts=facts)
    world.documents.extend(_documents(rng, world, size))
    return world


def _documents(rng: random.Random, world: World, size: CorpusSize) -> Iterator[Document]:
    titles = [(kind, name) for kind, names in world.entities.items() for name in names]
    rng.shuffle(titles)
    # Ids are random, so that they say nothing and only a search finds them.
    ids = rng.sample(_id_numbers(len(titles)), len(titles))
    names = [name for _, name in titles]
    for number, (kind, name) in zip(ids, titles, strict=True):
        sentences = [r.sentence.format(s=name, o=world.facts[name, r.name]) for r in RELATIONS if r.subject == kind]
        sentences += [_filler(rng, name, names) for _ in range(rng.randint(*size.filler_sentences))]
        rng.shuffle(sentences)
        text = " ".join([f"{name} is a {kind}.", *sentences])
        yield Document(doc_id=f"d{number}", title=name, text=text)


def _id_numbers(count: int) -> range:
    """Return the numbers of the fewest digits, three or more, that suffice."""
    first = 100
    while 9 * first < count:
        first *= 10
    return range(first, 10 * first)


_FILLERS = (
    "A letter of {year} names {s} and, further down, {other}.",
    "In {year} a painter made three pictures of {s}; one of them now hangs near {other}.",
    "The almanac of {year} has two lines on {s} and a whole page on {other}.",
    "An old song about {s} was sung again in the summer of {year}, to everybody's surprise.",
    "Nobody who wrote about {s} before {year} seems to have known of {other}.",
    "Of the stories told about {s}, the one of the winter of {year} is the longest.",
    "A stamp of {year} shows {s} on the left and {other} on the right.",
    "The archive holds {count} papers on {s}, most of them from before {year}.",
)


def _filler(rng: random.Random, name: str, names: list[str]) -> str:
    """Return a sentence that states no relation."""
    values = {"year": rng.randint(1700, 1999), "count": rng.randint(3, 90), "other": rng.choice(names)}
    return rng.choice(_FILLERS).format(s=name, **values)


def all_questions(world: World, hops: int) -> Iterator[Question]:
    """Yield every sound question that takes so many hops, in a fixed order."""
    for kind, names in world.entities.items():
        for chain in _relation_chains(kind, hops):
            for name in names:
                path = [name]
                for relation in chain:
                    path.append(world.facts[path[-1], relation.name])
                if _is_sound(world, path):
                    yield _question(path, chain)


def _relation_chains(kind: str, hops: int) -> Iterator[tuple[Relation, ...]]:
    if hops == 0:
        yield ()
        return
    for relation in RELATIONS:
        if relation.subject == kind:
            for rest in _relation_chains(relation.target, hops - 1):
                yield (relation, *rest)


def _is_sound(world: World, path: list[str]) -> bool:
    """Tell whether all entities differ and only the last document states the answer: no hop can be left out."""
    earlier = {world.facts.get((name, relation.name)) for name in path[:-2] for relation in RELATIONS}
    return len(set(path)) == len(path) and path[-1] not in earlier


def _question(path: list[str], chain: tuple[Relation, ...]) -> Question:
    phrase = path[0]
    for relation in chain:
        phrase = relation.phrase.format(phrase)
    word = "Who" if chain[-1].target == "person" else "What"
    return Question(
        text=f"{word} is {phrase}?",
        answer=path[-1],
        path=tuple(path),
        relations=tuple(relation.name for relation in chain),
    )
