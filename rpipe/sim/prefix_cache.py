"""Which tokens does an engine still hold? What running requests hold is locked, the rest goes oldest first.

The unit is what can be shared: a group's prompt, and a trajectory's own tokens (for its next turn). O(1) an operation,
amortized.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class PrefixCache:
    """`capacity` tokens in all. `locked` + `free` is never more than that; the rest is cached."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.locked = 0.0  # tokens that running requests hold
        self._users: dict[Hashable, int] = {}  # of a locked entry
        self._sizes: dict[Hashable, int] = {}  # tokens of a locked entry
        self._cached: OrderedDict[Hashable, int] = OrderedDict()  # oldest first
        self._cached_tokens = 0

    @property
    def free(self) -> float:
        """Tokens that may be taken, by eviction where needed."""
        return self.capacity - self.locked

    def held(self, key: Hashable) -> int:
        """Tokens of `key` that are here, locked or not."""
        return self._sizes.get(key) or self._cached.get(key, 0)

    def in_use(self, key: Hashable) -> int:
        """Tokens of `key` that running requests hold."""
        return self._sizes.get(key, 0)

    def lock(self, key: Hashable, tokens: int) -> None:
        """A request uses `key`; the first one takes its tokens."""
        if key in self._users:
            self._users[key] += 1
            return
        self._cached_tokens -= self._cached.pop(key, 0)
        self._users[key], self._sizes[key] = 1, tokens
        self.take(tokens)

    def unlock(self, key: Hashable) -> None:
        """The last user leaves its tokens cached."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            tokens = self._sizes.pop(key)
            self.locked -= tokens
            self.keep(key, tokens)

    def take(self, tokens: float) -> None:
        """Running requests hold `tokens` more."""
        self.locked += tokens
        self._evict()

    def give(self, tokens: float) -> None:
        self.locked -= tokens

    def keep(self, key: Hashable, tokens: int) -> None:
        """Leave them cached as the newest."""
        self._cached_tokens += tokens - self._cached.pop(key, 0)
        self._cached[key] = tokens
        self._evict()

    def drop(self, key: Hashable) -> None:
        self._cached_tokens -= self._cached.pop(key, 0)

    def clear(self) -> None:
        """What nobody uses is gone (a weight update)."""
        self._cached.clear()
        self._cached_tokens = 0

    def _evict(self) -> None:
        while self._cached and self._cached_tokens + self.locked > self.capacity:
            self._cached_tokens -= self._cached.popitem(last=False)[1]
