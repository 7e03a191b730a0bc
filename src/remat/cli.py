"""The command line: `remat demo`."""

from __future__ import annotations

from typing import Annotated

import typer

import remat

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Fit a PyTorch training step into a memory budget."""
    if version:
        typer.echo(remat.__version__)
        raise typer.Exit


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; the accelerator if there is one.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each way.")] = 6,
) -> None:
    """Train a small GPT with and without remat and compare bytes, seconds and gradients."""
    from remat.demo import Config
    from remat.demo import demo as run

    run(device or None, Config(steps=steps))


def main() -> None:
    """A RematError is an answer, not an accident: its sentence is shown without a traceback."""
    try:
        app()
    except remat.RematError as error:
        typer.echo(f"remat: {error}", err=True)
        raise SystemExit(1) from None
