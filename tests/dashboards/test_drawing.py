"""Every panel, drawn in a browser by Grafana's own components from what the real Prometheus has.

`STOPGUARD_PICTURES=FOLDER` keeps the pictures there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from dashboards.generate import FOLDER
from tests.dashboards.lint import panels
from tests.dashboards.node import CACHE, NODE_FOLDER, node_modules
from tests.dashboards.tools import missing, needs

if TYPE_CHECKING:
    from tests.dashboards.conftest import Scraped

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(420)]

BOARDS = sorted((FOLDER / "grafana").glob("*.json"))
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PIXELS_MIN = 300
"""The lines of a plot, its axes and its grid have thousands; an empty canvas has none."""


def browser() -> str:
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        missing("no browser: apt-get install chromium-headless-shell")
    return found


def bundle(modules: Path) -> Path:
    """The page with its libraries in one file; made again when the page or the packages change."""
    source = NODE_FOLDER / "page.jsx"
    digest = hashlib.sha256(source.read_bytes() + (NODE_FOLDER / "package.json").read_bytes()).hexdigest()
    folder = CACHE / "bundle"
    mark = folder / "digest"
    if not mark.exists() or mark.read_text(encoding="utf-8") != digest:
        folder.mkdir(parents=True, exist_ok=True)
        # A copy beside node_modules, since that is where its imports are looked for.
        copied = Path(shutil.copy(source, modules.parent / "page.jsx"))
        built = subprocess.run(
            [
                *(needs("node", "nodejs"), str(modules / "esbuild" / "bin" / "esbuild"), str(copied), "--bundle"),
                *(f"--outfile={folder / 'page.js'}", "--format=iife", "--minify", "--log-level=error"),
                *("--define:process.env.NODE_ENV='production'", "--define:process.env={}", "--define:global=window"),
                *(f"--loader:.{kind}=dataurl" for kind in ("svg", "woff2", "png", "ttf")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, built.stderr
        mark.write_text(digest, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def drawn(scraped: Scraped, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    node, program, modules = needs("node", "nodejs"), browser(), node_modules()
    out = tmp_path_factory.mktemp("pictures")
    query = {
        "prometheus": scraped.address,
        "from": int(scraped.ended_at) - 36,
        "to": int(scraped.ended_at),
        "step": 1,
        "rate": "6s",
    }
    job = {
        "modules": str(modules),
        "browser": program,
        "bundle": str(bundle(modules)),
        "out": str(out),
        "query": urlencode(query),
        "dashboards": [str(path) for path in BOARDS],
    }
    (out / "job.json").write_text(json.dumps(job), encoding="utf-8")
    shot = subprocess.run(
        [node, str(NODE_FOLDER / "shoot.mjs"), str(out / "job.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert shot.returncode == 0, shot.stderr
    if kept := os.environ.get("STOPGUARD_PICTURES"):
        for picture in out.glob("*.png"):
            shutil.copy(picture, Path(kept) / picture.name.replace("stopguard-", "dashboard-"))
    result: dict[str, Any] = json.loads(shot.stdout)
    return result


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_is_drawn(drawn: dict[str, Any], path: Path) -> None:
    board = drawn[path.stem]
    assert board["errors"] == []
    wanted = [(panel["title"], panel["type"]) for panel in panels(json.loads(path.read_text(encoding="utf-8")))]
    assert [(panel["title"], panel["type"]) for panel in board["panels"]] == wanted
    for panel in board["panels"]:
        assert panel["state"] == "done", panel
        if panel["type"] == "timeseries":
            assert panel["pixels"] > _PIXELS_MIN, panel
        else:
            assert any(character.isdigit() for character in panel["text"].removeprefix(panel["title"])), panel
