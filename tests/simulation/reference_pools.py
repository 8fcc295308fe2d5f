"""Slow references of policies and pools, written from their description: plain lists, everything sorted anew."""

from __future__ import annotations

import math
from collections.abc import Sequence

F, C, S, E, M = range(5)
MASK = (1 << 64) - 1


class ReferencePools:
    """What ``_native.LayerPools`` promises."""

    def __init__(
        self,
        experts: int,
        slots: Sequence[int],
        policy: str,
        *,
        tolerance: float,
        half_life_steps: float,
        requests_per_step: int = 1,
        seed: int = 0,
        staging: float = math.inf,
    ) -> None:
        self.experts, self.slots, self.policy, self.tolerance = experts, slots, policy, tolerance
        self.staging, self.to_sign_mantissa = staging, 0
        self.half_life, self.requests_per_step, self.random = half_life_steps, requests_per_step, seed
        self.state = dict.fromkeys(range(experts), M)
        self.activations: list[list[int]] = [[] for _ in range(experts)]  # steps of each expert's activations
        self.last_use = dict.fromkeys(range(experts), 0)
        self.admitted = dict.fromkeys(range(experts), 0)
        self.priority = dict.fromkeys(range(experts), 0.0)  # lfuda
        self.marked: set[int] = set()
        self.age, self.clock, self.requests = 0.0, 0, 0
        self.in_transit: set[int] = set()
        self.moves: list[tuple[int, int, int]] = []

    def access(self, wanted: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        before = [self.state[e] for e in wanted]
        step = self.requests // self.requests_per_step
        self.requests += 1
        self.to_sign_mantissa = 0  # experts that left F for S in this request
        for e in wanted:
            self.activations[e].append(step)
        self.wanted, self.moves = set(wanted), []
        for e in wanted:
            if self.state[e] != M:
                self.use(e)
                if self.policy == "fifo":
                    continue
            to = self.pool_from(e, F)
            if to < self.state[e] or self.state[e] == M:  # nobody moves to a worse pool because of a use
                self.settle(e, to, executed=True)
        return before, self.moves

    def count(self, e: int) -> float:
        """Exact order of decayed counts, as a logarithm as of step 0."""
        if not self.activations[e]:
            return -math.inf
        if self.policy != "zipmoe" or math.isinf(self.half_life):
            return float(len(self.activations[e]))
        value, last = 0.0, 0
        for step in self.activations[e]:
            value = value * 2 ** (-(step - last) / self.half_life) + 1
            last = step
        return math.log2(value) + last / self.half_life

    def use(self, e: int) -> None:
        self.clock += 1
        self.last_use[e] = self.clock
        self.priority[e] = len(self.activations[e]) + self.age
        self.marked.add(e)

    def qualifies(self, e: int, pool: int) -> bool:
        if self.slots[pool] == 0:
            return False
        if self.policy != "zipmoe":
            return True
        rank = sum(self.count(other) > self.count(e) for other in range(self.experts))
        return rank < sum(self.slots[: pool + 1]) + self.tolerance

    def pool_from(self, e: int, first: int) -> int:
        return next((pool for pool in range(first, M) if self.qualifies(e, pool)), M)

    def pool_below(self, e: int, above: int, executed: bool) -> int:
        for pool in range(above + 1, M):
            now = self.state[e]
            staged = self.to_sign_mantissa < self.staging
            has_parts = (pool == S and staged) if now == F else executed or now == pool or (now == C and pool in (S, E))
            if has_parts and self.qualifies(e, pool):
                return pool
        return M

    def settle(self, e: int, to: int, *, executed: bool) -> None:
        now = self.state[e]
        if now == to:
            return
        self.in_transit.add(e)
        if now == M:
            self.clock += 1
            self.admitted[e] = self.last_use[e] = self.clock
            self.priority[e] = len(self.activations[e]) + self.age
            self.marked.add(e)
        while to != M and sum(self.state[o] == to and o not in self.in_transit for o in self.state) == self.slots[to]:
            below = self.pool_below(e, to, executed)
            candidates = [o for o in self.state if self.state[o] == to and o not in self.wanted and o != e]
            if not executed or below != M:
                candidates.append(e)
            victim = self.first_out(candidates)
            if victim is None or victim == e:
                to = below
            else:
                self.settle(victim, self.pool_below(victim, to, executed=False), executed=False)
        self.in_transit.discard(e)
        self.state[e] = to
        if to == M:
            self.age = self.priority[e]
            self.marked.discard(e)
        elif executed:
            self.use(e)
        self.to_sign_mantissa += (now, to) == (F, S)
        if now != to:
            self.moves.append((e, now, to))

    def first_out(self, candidates: list[int]) -> int | None:
        if not candidates:
            return None
        if self.policy == "marking":
            unmarked = sorted(o for o in candidates if o not in self.marked)
            if not unmarked:
                self.marked -= set(candidates)
                unmarked = sorted(candidates)
            return unmarked[self.next_random() % len(unmarked)]
        orders = {
            "lru": lambda o: (self.last_use[o],),
            "fifo": lambda o: (self.admitted[o],),
            "lfu": lambda o: (self.count(o), self.last_use[o]),
            "zipmoe": lambda o: (self.count(o), self.last_use[o]),
            "lfuda": lambda o: (self.priority[o], self.last_use[o]),
        }
        return min(candidates, key=orders[self.policy])

    def next_random(self) -> int:
        """SplitMix64."""
        self.random = (self.random + 0x9E3779B97F4A7C15) & MASK
        mixed = self.random
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        return mixed ^ (mixed >> 31)
