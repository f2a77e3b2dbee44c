"""The generated world: every question has exactly one answer, and it can be read off the documents."""

import random
import re

import pytest

from recipes.search_agent.generate import RELATIONS, SIZES, build_world, generate
from recipes.search_agent.index import CorpusIndex
from recipes.search_agent.names import NAMES


def read_facts(documents):
    """Recover (subject, relation) -> objects from the text of all documents, by the relations' sentences."""
    facts = {}
    patterns = {}
    for relation in RELATIONS:
        sentence = re.escape(relation.sentence).replace(r"\{s\}", "(?P<s>.+)").replace(r"\{o\}", "(?P<o>.+)")
        patterns[relation.name] = re.compile(sentence)
    for document in documents:
        for sentence in re.split(r"(?<=\.) ", document.text):
            for name, pattern in patterns.items():
                if match := pattern.fullmatch(sentence):
                    facts.setdefault((match["s"], name), set()).add((match["o"], document.title))
    return facts


@pytest.fixture(scope="module")
def long_world():
    return generate(SIZES["long"], 40, (2, 3), seed=1)


@pytest.mark.parametrize(
    ("size", "num_questions", "hops"),
    [("demo", 300, (2,)), ("demo", 200, (1, 2, 3)), ("small", 200, (3,))],
)
def test_each_question_has_one_answer_that_the_documents_state(size, num_questions, hops):
    documents, questions = generate(SIZES[size], num_questions, hops, seed=3)
    check_answers(documents, questions)
    assert len({question.text for question in questions}) == num_questions
    assert {len(question.relations) for question in questions} == set(hops)


def test_long_documents_state_the_answers_too(long_world):
    check_answers(*long_world)


def check_answers(documents, questions):
    facts = read_facts(documents)
    texts = {document.title: document.text for document in documents}
    assert len(texts) == len(documents)
    for question in questions:
        assert len(question.text.split()) < 40
        assert question.path[0] in question.text and question.answer not in question.text
        for subject, relation, target in zip(question.path, question.relations, question.path[1:], strict=False):
            assert facts[subject, relation] == {(target, subject)}, "one object, stated in the subject's document only"
        assert question.path[-1] == question.answer
        assert question.answer in texts[question.path[-2]]


def test_no_hop_can_be_skipped():
    documents, questions = generate(SIZES["demo"], 300, (2, 3), seed=5)
    texts = {document.title: document.text for document in documents}
    for question in questions:
        for entity in question.path[:-2]:
            assert not re.search(rf"\b{re.escape(question.answer)}\b", texts[entity])


def test_searching_an_entity_finds_its_document_first(long_world):
    documents, questions = long_world
    index = CorpusIndex(documents)
    for question in questions:
        for entity in question.path:
            assert index.search(entity, 1)[0].title == entity


def test_demo_documents_are_tiny_and_long_ones_are_long(long_world):
    demo, _ = generate(SIZES["demo"], 10, (2,), seed=0)
    assert all(2 <= document.text.count(".") <= 4 and len(document.text) < 250 for document in demo)
    page_chars = SIZES["long"].retrieval.page_chars
    assert all(len(document.text) > page_chars for document in long_world[0])
    assert max(len(document.text) for document in long_world[0]) > 3 * page_chars


def test_same_seed_same_world_and_another_seed_another():
    first, second, other = (generate(SIZES["demo"], 50, (2,), seed) for seed in (1, 1, 2))
    assert first == second
    assert first[0] != other[0] and first[1] != other[1]


def test_world_grows_with_the_questions_wanted():
    few, _ = generate(SIZES["demo"], 10, (2,), seed=0)
    many, questions = generate(SIZES["demo"], 4_000, (2,), seed=0)
    assert len(many) > 10 * len(few) and len(questions) == 4_000
    assert len({document.doc_id for document in many}) == len(many)


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_unique_and_none_contains_another(kind):
    names = NAMES[kind].draw(random.Random(0), 1_500)
    assert len(set(names)) == 1_500
    everything = "\n".join(names)
    assert all(len(re.findall(rf"\b{re.escape(name)}\b", everything)) == 1 for name in names[:300])


@pytest.mark.parametrize(
    ("num_questions", "hops", "message"),
    [
        (0, (2,), "num_questions is 0; expected 1 or more"),
        (5, (), r"hops is \(\); expected numbers from 1 to 3"),
        (5, (2, 4), r"hops is \(2, 4\); expected numbers from 1 to 3"),
    ],
)
def test_bad_sizes_are_errors(num_questions, hops, message):
    with pytest.raises(ValueError, match=message):
        generate(SIZES["demo"], num_questions, hops, seed=0)


def test_more_entities_than_names_is_an_error():
    with pytest.raises(ValueError, match="names of one kind are needed, there are"):
        build_world(SIZES["demo"], 200_000, seed=0)
