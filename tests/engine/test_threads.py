"""Several Python threads, forks and copies."""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from packed_model import EMBEDDING, EXPERTS, GROUPS, PARAMETERS, PROJECTION, PackedModel

from zipmoe.engine.engine import Engine
from zipmoe.engine.exclusive_access import ExclusiveAccess
from zipmoe.errors import UnsupportedOperationError


def test_threads_that_share_an_engine_never_see_each_others_scratch(model: PackedModel) -> None:
    def work(engine: Engine, seed: int) -> int:
        choice = random.Random(seed)
        checked = 0
        for _ in range(30):
            group = choice.randrange(2)
            handle = engine.group(GROUPS[group])
            wanted = choice.sample(range(EXPERTS), 5)
            with engine.request(handle, wanted, ascending=choice.random() < 0.5) as request:
                for expert in request:
                    for name in PARAMETERS:
                        matrix = engine.matrix(handle, expert, name)
                        assert torch.equal(matrix, model.experts[GROUPS[group], expert, name])
                        checked += 1
            parameter = choice.choice([EMBEDDING, PROJECTION])
            for begin, end, tile in engine.dense_tiles(parameter):
                assert torch.equal(tile, model.dense[parameter][begin:end])
            rows = torch.tensor([choice.randrange(100) for _ in range(4)])
            assert torch.equal(engine.dense_rows(EMBEDDING, rows), model.dense[EMBEDDING][rows])
            engine.account("cache", choice.randrange(15_000))
            engine.statistics.counters()
        return checked

    with model.engine(3) as engine, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda seed: work(engine, seed), range(4)))
        assert results == [30 * 5 * len(PARAMETERS)] * 4
        counters = engine.statistics.counters()
        assert counters.hits + counters.misses == 4 * 30 * 5
        assert counters.requests == 4 * 30


def test_the_lock_nests_in_one_thread_and_may_be_released_by_another() -> None:
    access = ExclusiveAccess()
    order: list[str] = []
    access.acquire()
    access.acquire()

    def other() -> None:
        with access:
            order.append("other")

    waiting = threading.Thread(target=other)
    waiting.start()
    order.append("first")
    access.release()
    order.append("still")
    releasing = threading.Thread(target=access.release)
    releasing.start()
    releasing.join()
    waiting.join()
    assert order == ["first", "still", "other"]


def test_a_thread_that_waited_finds_the_engine_closed(model: PackedModel) -> None:
    engine = model.engine(4)

    class ClosedWhileWaiting(ExclusiveAccess):
        def acquire(self) -> None:
            super().acquire()
            engine._closed = True

    engine._access = ClosedWhileWaiting()
    group = engine.group(GROUPS[0])
    for use in (lambda: engine.account("key-value cache", 1), lambda: engine.expert_matrix(group, 0, PARAMETERS[0])):
        engine._closed = False
        with pytest.raises(UnsupportedOperationError, match="the engine is closed"):
            use()
    engine._closed = False
    engine.close()


def test_copies_and_pickles_are_refused(engine: Engine) -> None:
    with pytest.raises(UnsupportedOperationError, match="copied"):
        copy.deepcopy(engine)
    with pytest.raises(UnsupportedOperationError, match="pickled"):
        pickle.dumps(engine)


def test_a_forked_child_is_refused_and_can_exit(model: PackedModel) -> None:
    with model.engine(2) as engine:
        handle = engine.group(GROUPS[0])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                engine.request(handle, [0]).__enter__()
            except UnsupportedOperationError:
                engine.close()
                del engine
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(engine.expert_matrix(handle, 0, PARAMETERS[0]), model.experts[GROUPS[0], 0, PARAMETERS[0]])
