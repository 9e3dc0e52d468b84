"""Install the real engines that the tests, the demos and the benchmarks run: `make engines`.

    python -m tools.engines                 all of them
    python -m tools.engines llamacpp vllm   some
    python -m tools.engines --where         where each is kept, and whether it is there

Each goes into an environment of its own in the user's cache (or `$STOPGUARD_ENGINES`), once: what is there stays. A few
gigabytes and, most of it download, some minutes each for the big ones.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import click

from stopguard.testing import rig


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--where", is_flag=True, help="Only say where they are.")
def main(kinds: tuple[str, ...], where: bool) -> None:
    """Install the engines KINDS, or all, one after another. Ends with 1 when one of them cannot be installed."""
    chosen = kinds or tuple(sorted(point.name for point in entry_points(group=rig.GROUP)))
    failed = []
    for number, kind in enumerate(chosen, start=1):
        try:
            recipe = rig.recipe_of(kind)
            home = rig.home_of(recipe)
            there = (home / "installed").exists()
            if where or there:
                click.echo(f"{kind} {recipe.version}: {'installed in' if there else 'would go into'} {home}")
            if not (where or there):
                click.echo(f"[{number}/{len(chosen)}] {kind} {recipe.version}")
                rig.install(recipe)
        except rig.RigError as error:
            failed.append(kind)
            click.echo(f"{kind}: {error}", err=True)
    if failed:
        click.echo(f"not installed: {', '.join(failed)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
