"""Stopping: the first signal asks, the second interrupts, the handlers of before come back."""

import os
import signal

import pytest

from nereus.runtime.stop import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_second_interrupts(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "stopping after this step (again to stop now)" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_hold_takes_a_signal_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ray.init does with its own handler
        stop.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before
