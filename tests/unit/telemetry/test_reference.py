"""The reference page is what its script writes, and the exposition passes promtool."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from docs.generate_metrics import PAGE, page
from tests.dashboards.tools import needs
from tests.unit.telemetry.helpers import run_storm


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"


def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = needs("promtool", "prometheus")
    body, _ = run_storm(requests=40).telemetry.render()
    checked = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    broken = body.replace(b"stopguard_leaks_total", b"stopguard_leaks")
    checked = subprocess.run([promtool, "check", "metrics"], input=broken, capture_output=True, check=False)
    assert checked.returncode != 0


def test_a_missing_tool_is_red_in_continuous_integration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install prometheus"):
        needs("promtool", "prometheus")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install prometheus"):
        needs("promtool", "prometheus")
