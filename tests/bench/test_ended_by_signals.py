"""Signals end a benchmark as Ctrl-C does."""

from __future__ import annotations

import signal

import pytest

from zipmoe.bench.ended_by_signals import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_cleaning_up_and_handlers_as_before(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        cleaned = []
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            try:
                signal.raise_signal(number)
            finally:
                cleaned.append(number)
        assert cleaned == [number]
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
