"""What is written about the configuration is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.generate_configuration import PAGE, page
from stopguard.config import Configuration, load
from stopguard.config.layers import settings

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "examples" / "stopguard.toml"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_has_every_setting() -> None:
    text = page()
    for one in settings():
        assert f"`{one.path[-1]}`" in text or one.path[-1] in {"engines", "tenants", "classes"}, one.key
        for name in (one.variables[0] if len(one.variables) > 1 else "", one.flag):
            assert name in text, one.key


def test_the_sample_is_a_configuration_that_works() -> None:
    loaded = load(file=SAMPLE)
    assert loaded.warnings == ()
    assert loaded.configuration.engines


def test_what_the_sample_leaves_out_is_the_default() -> None:
    """Each commented line of the sample is a key with its default, so that reading it teaches nothing wrong."""
    text = SAMPLE.read_text(encoding="utf-8")
    uncommented = re.sub(r"^# (?=(?:\w+ = |\[\w))", "", text, flags=re.MULTILINE)
    everything = tomllib.loads(uncommented)
    everything["engines"] = {}
    everything["policies"].pop("tenants", None)
    everything["policies"].pop("routes", None)
    for table in ("listen", "admin"):
        everything[table].pop("tls", None)
    everything["admin"].pop("token_file", None)
    everything["journal"].pop("path", None)
    assert Configuration.model_validate(everything) == Configuration()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").rglob("*.toml")))
def test_every_file_of_the_examples_is_read(name: str) -> None:
    (file,) = (ROOT / "examples").rglob(name)
    load(file=file)
