"""Grafana's own published packages, installed once into a cache that git ignores."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.dashboards.tools import missing, needs

__all__ = ["CACHE", "NODE_FOLDER", "node_modules"]

ROOT = Path(__file__).resolve().parents[2]
NODE_FOLDER = ROOT / "dashboards" / "render"
CACHE = ROOT / ".cache" / "dashboards"
_INSTALL_SECONDS = 280


def node_modules() -> Path:
    """The folder `node_modules` that `dashboards/render/package.json` asks for; about a minute and 490 MB, once."""
    npm = needs("npm", "npm")
    wanted = (NODE_FOLDER / "package.json").read_bytes()
    mark = CACHE / "installed"
    digest = hashlib.sha256(wanted).hexdigest()
    if not mark.exists() or mark.read_text(encoding="utf-8") != digest:
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "package.json").write_bytes(wanted)
        shutil.rmtree(CACHE / "bundle", ignore_errors=True)
        try:
            subprocess.run(
                [
                    npm,
                    "install",
                    "--no-audit",
                    "--no-fund",
                    "--ignore-scripts",
                    "--loglevel=error",
                ],
                cwd=CACHE,
                check=True,
                capture_output=True,
                timeout=_INSTALL_SECONDS,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            missing(f"npm cannot install Grafana's packages: {(error.stderr or b'').decode()[-500:]}")
        mark.write_text(digest, encoding="utf-8")
    return CACHE / "node_modules"
