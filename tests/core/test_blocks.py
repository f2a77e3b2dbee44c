import pytest

from verl_war.core.blocks import block_chain_hashes


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_are_hashed(length, blocks):
    assert len(block_chain_hashes(range(length), 4)) == blocks


def test_equal_prefixes_and_nothing_else_have_equal_hashes():
    base = block_chain_hashes([1, 2, 3, 4, 5, 6], 2)
    assert block_chain_hashes([1, 2, 3, 4, 9, 6], 2)[:2] == base[:2]
    assert block_chain_hashes([1, 2, 3, 4, 9, 6], 2)[2] != base[2]
    # The same block behind another beginning is another block.
    assert block_chain_hashes([0, 2, 3, 4, 5, 6], 2)[1:] != base[1:]


def test_hashes_do_not_depend_on_the_process():
    # A literal: workers of all nodes must agree with each other, unlike with Python's seeded hash().
    assert block_chain_hashes([1, 2], 2) == (11868681386100499350,)
