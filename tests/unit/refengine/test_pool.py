"""The pool: counts, references, fences, the prefix chain, and contents that a stale write really changes."""

from __future__ import annotations

import random

import pytest

from stopguard.refengine import PoolCorrupted
from stopguard.refengine.pool import BlockPool


def test_states_add_up_through_a_block_s_life() -> None:
    pool = BlockPool(4, 2)
    table = pool.take(2)
    assert repr(pool) == "<pool 4: held 2, fenced 0, cached 0, free 2>"
    pool.fence(table)
    assert repr(pool) == "<pool 4: held 0, fenced 2, cached 0, free 2>"
    with pytest.raises(PoolCorrupted):
        pool.take(3)  # fenced blocks are not to be had
    pool.unfence(table)
    assert repr(pool) == "<pool 4: held 0, fenced 0, cached 0, free 4>"
    pool.verify()


@pytest.mark.parametrize("wrong", ["twice", "never taken", "twice at once"])
def test_a_wrong_free_is_refused_and_changes_nothing(wrong: str) -> None:
    pool = BlockPool(3, 2)
    [block] = pool.take(1)
    if wrong == "twice":
        pool.give([block])
        blocks = [block]
    elif wrong == "never taken":
        blocks = [block, 0 if block else 1]
    else:
        blocks = [block, block]
    before = repr(pool)
    with pytest.raises(PoolCorrupted):
        pool.give(blocks)
    with pytest.raises(PoolCorrupted):
        pool.fence(blocks)
    assert repr(pool) == before
    pool.verify()


def test_a_fence_that_is_not_there_cannot_fall() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(PoolCorrupted):
        pool.unfence(pool.take(1))


def test_prefixes_are_shared_by_content_and_by_adapter() -> None:
    pool = BlockPool(8, 2)
    root, other = pool.root(""), pool.root("adapter")
    table = pool.take(2)
    chain = pool.seal(table[0], root, [5, 6])
    pool.seal(table[1], chain, [7, 8])
    pool.give(table)
    assert pool.cached == 2
    assert pool.match(root, [5, 6, 7, 8, 9], 4)[0] == table
    assert pool.match(root, [5, 6, 7, 8, 9], 3)[0] == table[:1]  # at most so many tokens
    assert pool.match(root, [5, 6, 0, 0], 4)[0] == table[:1]
    assert pool.match(other, [5, 6, 7, 8], 4)[0] == []
    assert pool.match(root, [7, 8], 2)[0] == []  # the same tokens in another place
    pool.share(table)
    pool.share(table)
    assert (pool.held, pool.cached) == (2, 0)
    pool.give(table)
    assert pool.held == 2
    pool.give(table)
    assert pool.cached == 2
    pool.verify()


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, 1)
    first, second = pool.take(2)
    root = pool.root("")
    pool.seal(first, root, [1])
    pool.seal(second, root, [2])
    pool.give([second])
    pool.give([first])
    assert pool.take(1) == [second]
    assert pool.match(root, [1], 1)[0] == [first]
    assert pool.match(root, [2], 1)[0] == []
    assert pool.evict_cached() == 1
    pool.verify()


def test_a_partial_block_is_taken_over_only_by_its_continuation() -> None:
    pool = BlockPool(4, 4)
    [block] = pool.take(1)
    pool.write_run([block], 0, [1, 2, 3])
    pool.seal_partial(block, pool.root(""), [1, 2, 3])
    pool.give([block])
    assert pool.take_over_partial(pool.root(""), [1, 2, 9, 9]) is None
    assert pool.take_over_partial(pool.root(""), [1, 2, 3, 4]) == (block, 3)
    assert pool.take_over_partial(pool.root(""), [1, 2, 3, 4]) is None
    pool.verify()


def test_every_single_wrong_token_changes_the_value() -> None:
    pool = BlockPool(6, 4)
    table = pool.take(6)
    numbers = random.Random(1)
    tokens = [numbers.randrange(600) for _ in range(22)]
    pool.write_run(table, 0, tokens)
    value = pool.value(table, 22)
    for position, token in enumerate(tokens):
        block, slot = table[position // 4], position % 4
        pool.write(block, slot, (token + 1) % 600, pool.generation[block])
        assert pool.value(table, 22) != value
        pool.write(block, slot, token, pool.generation[block])
    assert pool.value(table, 22) == value
    assert pool.read(table, 22) == tokens
    block = table[5]
    pool.write(block, 2, 77, pool.generation[block])  # behind the end: nobody reads it
    assert pool.value(table, 22) == value


def test_a_stale_write_goes_through_and_is_counted() -> None:
    pool = BlockPool(1, 4)
    [block] = pool.take(1)
    generation = pool.generation[block]
    pool.give([block])
    pool.take(1)
    pool.write_run([block], 0, [1, 2, 3])
    value = pool.value([block], 3)
    pool.write(block, 1, 9, generation)
    assert pool.stale_writes == 1
    assert pool.value([block], 3) != value


def test_a_block_freed_twice_gets_two_owners_unless_the_pool_is_strict() -> None:
    loose = BlockPool(3, 2, strict=False)
    [block] = loose.take(1)
    loose.give([block])
    assert loose.free_again(block)
    with pytest.raises(PoolCorrupted, match="free list twice"):
        loose.verify()
    assert loose.take(2) == [block, block]
    strict = BlockPool(3, 2)
    [block] = strict.take(1)
    strict.give([block])
    strict.free_again(block)
    with pytest.raises(PoolCorrupted):
        strict.take(2)
