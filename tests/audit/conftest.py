"""Counts of the two proofs, printed after the run: faults caught, healthy engines not accused."""

from __future__ import annotations

import pytest
from _pytest.terminal import TerminalReporter

from tests.audit.rig import Score

SCORE = pytest.StashKey[Score]()


@pytest.fixture
def score(pytestconfig: pytest.Config) -> Score:
    return pytestconfig.stash.setdefault(SCORE, Score())


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(SCORE, None)
    for line in found.lines() if found is not None else ():
        terminalreporter.write_line(line)
