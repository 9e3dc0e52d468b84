"""Prints what the explorer has walked at the end of the run, passed or not."""

from __future__ import annotations

import pytest

WALKS = pytest.StashKey[list[str]]()


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(WALKS, [])
    if lines:
        terminalreporter.write_sep("=", "interleavings explored")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[str]:
    """Lines appended here are printed at the end of the run."""
    return request.config.stash.setdefault(WALKS, [])
