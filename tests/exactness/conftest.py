"""One speculating engine for all tests, and the answers of one without speculation."""

import os

import pytest

from tests.exactness import engine as engines


@pytest.fixture(scope="session")
def reference():
    """Answers without speculation."""
    return engines.reference_answers()


@pytest.fixture(scope="session")
def engine(reference):  # after the reference: never two engines at a time
    """An engine in this process that drafts whenever it finds text."""
    before = {name: os.environ.get(name) for name in engines.ENVIRONMENT}
    os.environ.update(engines.ENVIRONMENT)
    try:
        yield engines.make_engine({"mode": "always", "max_draft_tokens": engines.MAX_DRAFT_TOKENS})
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def drafter(engine):
    """WAR's drafter of the engine, with a fresh index and limits that draft always; restored afterwards."""
    from verl_war.core.speculation_limits import SpeculationLimits
    from verl_war.integration.vllm.proposer import drafter_of
    from verl_war.integration.vllm.speculation import Speculation
    from verl_war.integration.vllm.speculation_drafter import make_store
    from verl_war.integration.vllm.speculation_exchange import HistoryExchange

    drafter = drafter_of(engines.runner_of(engine))
    # The watchdog would notice most broken verifiers, too; here the tests shall.
    limits = SpeculationLimits(
        mode="always", max_draft_tokens=engines.MAX_DRAFT_TOKENS, watchdog_min_tokens=1_000_000_000
    )
    drafter.store = make_store(engine.llm_engine.vllm_config, {})
    drafter.speculation = Speculation(drafter.store, limits)
    drafter.exchange = HistoryExchange(drafter.store, 1e6)
    drafter.disabled, drafter.faults = "", 0
    return drafter


@pytest.fixture
def use_store(drafter):
    """Replaces what the drafter drafts from."""
    from verl_war.integration.vllm.speculation import Speculation

    def use(store):
        drafter.store = store
        drafter.speculation = Speculation(store, drafter.speculation.limits)

    return use
