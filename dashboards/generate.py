"""Write the dashboards and rules that are committed beside this file.

python -m dashboards.generate              write them again
python -m dashboards.generate --check      only say which are out of date
"""

from __future__ import annotations

from pathlib import Path

import click

from dashboards.boards_books import DASHBOARDS
from dashboards.model import to_json
from dashboards.rules import to_yaml

__all__ = ["files", "main"]

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Everything that is generated: path and text."""
    written = {FOLDER / "grafana" / f"{board.uid}.json": to_json(board, DASHBOARDS) for board in DASHBOARDS}
    written[FOLDER / "prometheus" / "rules.yml"] = to_yaml()
    return written


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when a file is out of date.")
def main(check: bool) -> None:
    """Write Grafana's JSON and Prometheus's rules."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        click.echo(f"{path.relative_to(FOLDER.parent)}: {'out of date' if check else 'written'}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
