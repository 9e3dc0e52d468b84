"""The paged KV pool: blocks, references, prefix cache, fences, and what is really written in them.

Theory
------
A block is in exactly one of four states, and the four counts always add up to the pool:

* *held*: at least one live reference (a shared prefix block has several);
* *fenced*: no live reference, but a step in flight may still write it; reusable once that step is done;
* *cached*: nobody refers to it, its content is known, and it may be taken away (least recently used first);
* *free*: nothing.

Contents are real. A write puts a token into a slot of a block and goes through whoever owns the block
by then, as on hardware; the model computes from what it reads through a request's block table. So a
block that is reused while an old step still writes it gives its new owner a different next token:
cross-talk shows in the output and not in a flag. `stale_writes` counts such writes for the tests.

The prefix cache is a chain: a full block's key is (chain number of the block before it, its tokens),
so equal keys mean equal content and no hash can collide. Free blocks are reused last-in-first-out,
which makes a premature reuse happen at the next allocation and not some minutes later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import mul

from stopguard.refengine.interface import PoolCorrupted

__all__ = ["BlockPool"]

ChainKey = tuple[int, tuple[int, ...]]

_PRIME = (1 << 31) - 1


def _weights(count: int, seed: int) -> list[int]:
    """`count` fixed odd numbers below 2**30, so that a token's place changes what it adds."""
    weights, state = [], seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
        weights.append((state >> 34) | 1)
    return weights


class BlockPool:
    """`blocks` blocks of `block_tokens` tokens. `strict` refuses what a healthy engine never does."""

    def __init__(self, blocks: int, block_tokens: int, *, prefix_cache: bool = True, strict: bool = True) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.strict = strict
        self.held = 0
        self.fenced = 0
        self.stale_writes = 0
        self.evictions_total = 0
        self.generation = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._fenced_references = [0] * blocks
        self._tokens = [[0] * block_tokens for _ in range(blocks)]
        self._values = [0] * blocks
        self._keys: list[ChainKey | None] = [None] * blocks
        self._chains: dict[ChainKey, tuple[int, int]] = {}  # key -> (block, chain number)
        self._roots: dict[str, int] = {}
        self._chain_count = 0
        self._slot_weights = _weights(block_tokens, 17)
        self._table_weights = _weights(64, 99)

    # Counts ---------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a reusable prefix and that nobody refers to."""
        return len(self._evictable)

    @property
    def available(self) -> int:
        """Blocks that `take` could give out now."""
        return len(self._free) + len(self._evictable)

    def __repr__(self) -> str:
        return f"<pool {self.total}: held {self.held}, fenced {self.fenced}, cached {self.cached}, free {self.free}>"

    # Taking and giving back -----------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """`count` blocks, held once each. `PoolCorrupted` when there are not that many or one is in use."""
        if count > self.available:
            raise PoolCorrupted(f"{count} blocks wanted and {self.available} are available: check before taking")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
                if self._references[block] or block in self._evictable:
                    self._take_in_use(block)
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
                self.evictions_total += 1
            self._references[block] += 1
            self.generation[block] += 1
            self.held += 1
            taken.append(block)
        return taken

    def _take_in_use(self, block: int) -> None:
        """The free list names a block that is in use (it was freed twice): give it a second owner."""
        if self.strict:
            raise PoolCorrupted(f"block {block} is in the free list and in use")
        if self._references[block]:
            self.held -= 1  # the caller counts it again: one block, two owners
        else:
            del self._evictable[block]
        self._forget(block)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which `match` found."""
        for block in blocks:
            if not self._references[block]:
                if self._fenced_references[block]:
                    self.fenced -= 1
                else:
                    del self._evictable[block]
                self.held += 1
            self._references[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """One reference less to each of `blocks`. `PoolCorrupted` (and nothing changed) for one not held."""
        blocks = tuple(blocks)
        self._check_owned(blocks)
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self.held -= 1
                self._rest(block)

    def fence(self, blocks: Iterable[int]) -> None:
        """Give up `blocks` although a step in flight may write them; `unfence` when it is done."""
        blocks = tuple(blocks)
        self._check_owned(blocks)
        for block in blocks:
            self._references[block] -= 1
            self._fenced_references[block] += 1
            if not self._references[block]:
                self.held -= 1
                self.fenced += 1

    def unfence(self, blocks: Iterable[int]) -> None:
        """The step behind the fence is done: `blocks` are reusable unless somebody else holds them."""
        for block in blocks:
            if self._fenced_references[block] < 1:
                raise PoolCorrupted(f"block {block} is not behind a fence")
            self._fenced_references[block] -= 1
            if not self._references[block] and not self._fenced_references[block]:
                self.fenced -= 1
                self._rest(block)

    def free_again(self, block: int) -> bool:
        """Put a free block into the free list once more: only a fault does this. False if it is not free."""
        if self._references[block] or self._fenced_references[block] or block in self._evictable:
            return False
        self._free.append(block)
        return True

    def _check_owned(self, blocks: Sequence[int]) -> None:
        seen: dict[int, int] = {}
        for block in blocks:
            seen[block] = seen.get(block, 0) + 1
            if self._references[block] < seen[block]:
                raise PoolCorrupted(f"block {block} was given back more often than it was taken")

    def _rest(self, block: int) -> None:
        if self._fenced_references[block]:
            self.fenced += 1
        elif self._keys[block] is not None:
            self._evictable[block] = None
        else:
            self._free.append(block)

    # Prefix cache ---------------------------------------------------------------------------------

    def root(self, name: str) -> int:
        """The chain number before the first block; another adapter (`name`) is another chain."""
        return self._roots.setdefault(name, -1 - len(self._roots))

    def match(self, root: int, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
        """The cached blocks that hold a prefix of `tokens`, at most `limit` tokens; and the chain number after them."""
        if not self.prefix_cache:
            return [], root
        found: list[int] = []
        size, chain = self.block_tokens, root
        for start in range(0, limit - size + 1, size):
            entry = self._chains.get((chain, tuple(tokens[start : start + size])))
            if entry is None:
                break
            block, chain = entry
            found.append(block)
        return found, chain

    def count_resting(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the cache and held by nobody: sharing them makes that many fewer available."""
        return sum(block in self._evictable for block in blocks)

    def seal(self, block: int, chain: int, tokens: Sequence[int]) -> int:
        """`block` is full and holds `tokens`: others may share it. Returns the chain number after it."""
        if not self.prefix_cache:
            return chain
        key = (chain, tuple(tokens))
        known = self._chains.get(key)
        if known is not None:
            return known[1]
        if self._keys[block] is not None:  # only after a premature reuse: the newer content wins
            self._forget(block)
        self._chain_count += 1
        self._chains[key] = (block, self._chain_count)
        self._keys[block] = key
        return self._chain_count

    def seal_partial(self, block: int, chain: int, tokens: Sequence[int]) -> None:
        """Keep a block that is not full: the next sequence that goes on with exactly `tokens` may take it over."""
        key = (chain, tuple(tokens))
        if not self.prefix_cache or not tokens or key in self._chains or self._keys[block] is not None:
            return
        self._chain_count += 1
        self._chains[key] = (block, self._chain_count)
        self._keys[block] = key

    def take_over_partial(self, chain: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Hold the resting, not full block that has the longest prefix of `tokens`: (block, tokens in it)."""
        for length in range(min(len(tokens), self.block_tokens - 1), 0, -1):
            entry = self._chains.get((chain, tuple(tokens[:length])))
            if entry is not None and entry[0] in self._evictable:
                block = entry[0]
                del self._evictable[block]
                self._forget(block)
                self._references[block] += 1
                self.generation[block] += 1
                self.held += 1
                return block, length
        return None

    def evict_cached(self) -> int:
        """Empty the part of the prefix cache that nobody refers to; returns blocks."""
        count = len(self._evictable)
        for block in self._evictable:
            self._forget(block)
            self._free.append(block)
        self._evictable.clear()
        self.evictions_total += count
        return count

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._chains[key]
            self._keys[block] = None

    # Contents -------------------------------------------------------------------------------------

    def write(self, block: int, slot: int, token: int, generation: int) -> None:
        """Put `token` into `slot`, as a step launched when the block had `generation` does: nothing can stop it."""
        if self.generation[block] != generation:
            self.stale_writes += 1
        tokens = self._tokens[block]
        self._values[block] += (token - tokens[slot]) * self._slot_weights[slot]
        tokens[slot] = token

    def write_run(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Put `tokens` at positions `start`… of the sequence whose block table is `table`."""
        size, done = self.block_tokens, 0
        while done < len(tokens):
            index, slot = divmod(start + done, size)
            part = tokens[done : done + size - slot]
            block = table[index]
            content = self._tokens[block]
            content[slot : slot + len(part)] = part
            self._values[block] = sum(map(mul, content, self._slot_weights))
            done += len(part)

    def read(self, table: Sequence[int], length: int) -> list[int]:
        """The first `length` tokens that a sequence with block table `table` really has."""
        content: list[int] = []
        for block in table:
            content.extend(self._tokens[block])
        return content[:length]

    def value(self, table: Sequence[int], length: int) -> int:
        """A number that any one wrong token among the first `length` changes (31 bits)."""
        full, rest = divmod(length, self.block_tokens)
        weights = self._table_weights
        if full >= len(weights):
            weights = self._table_weights = _weights(2 * full + 1, 99)
        total: int = sum(map(mul, map(self._values.__getitem__, table[:full]), weights))
        if rest:
            total += sum(map(mul, self._tokens[table[full]][:rest], self._slot_weights)) * weights[full]
        return total % _PRIME

    # Proof ----------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Count everything from scratch; `PoolCorrupted` when a count or a sum is wrong. For tests and audits."""
        free, cached = set(self._free), set(self._evictable)
        if len(free) != len(self._free):
            raise PoolCorrupted(f"{len(self._free) - len(free)} blocks are in the free list twice")
        held = {block for block in range(self.total) if self._references[block]}
        fenced = {block for block in range(self.total) if self._fenced_references[block]} - held
        if (len(held), len(fenced)) != (self.held, self.fenced):
            raise PoolCorrupted(f"counted {len(held)} held and {len(fenced)} fenced, the books say {self!r}")
        if free & cached or free & held or cached & held or (free | cached) & fenced:
            raise PoolCorrupted("a block is in two states at once")
        if len(free) + len(cached) + len(held) + len(fenced) != self.total:
            raise PoolCorrupted(f"blocks do not add up to {self.total}: {self!r}")
        if any(self._keys[block] is None for block in cached):
            raise PoolCorrupted("a cached block has no key")
