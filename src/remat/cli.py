"""The command line. Results go to standard output, everything else to standard error.

Exit codes: 0 done; 1 the answer is no (doctor found a problem), or something failed unexpectedly; 2 the input
is wrong or the budget is out of reach, said in one sentence. `--debug` shows where an error comes from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import remat
from remat.errors import InputError, RematError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)

_WHAT = "FILE.py:FUNCTION or MODULE:FUNCTION, which takes nothing and returns model, batch (and loss)."
What = Annotated[str, typer.Argument(metavar="WHAT", help=_WHAT, show_default=False)]
PlanFiles = Annotated[
    list[Path], typer.Argument(metavar="PLAN...", help="Plans saved as JSON.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="ACTIONS",
        help="What plans may do: keep,recompute,offload,chunk. Without: all that leaves gradients equal to "
        "the bit, offload where there is a link to a host.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Cast the model first: bfloat16, float16, ...", show_default=False),
]
Compile = Annotated[bool, typer.Option("--compile", help="Run blocks through torch.compile, planned.")]
Optimizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Count the state of this torch optimizer: adamw.", show_default=False),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Fit a PyTorch training step into a memory budget, and see where its memory goes."""
    if version:
        typer.echo(remat.__version__)
        raise typer.Exit


@app.command()
def demo(
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; the accelerator if there is one.", show_default=False)
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each way.")] = 6,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small GPT with and without remat and compare bytes, seconds and gradients."""
    from remat.demo import Config, headline, table, train

    place, config = _torch_device(device), Config(steps=steps)
    rows = train(place, config)
    if as_json:
        _print_json({"device": place, "rows": [row.as_dict() for row in rows]})
    else:
        _print(headline(config, place), table(rows))


@app.command()
def plan(
    what: What,
    budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help='"24GiB", "24GB" or "80%" of the device.', show_default=False),
    ] = None,
    activations: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Or: a share of the activation peak, 0.4.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for this device without having it (see `remat devices`). Without: measure here.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    accumulate: Annotated[bool, typer.Option(help="Gradients stay between micro-steps.")] = False,
    allow: Allow = None,
    compiled: Compile = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the report as one HTML file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a plan within a budget and show it. Nothing is trained.

    remat plan examples/long_context.py:build --budget 24GiB --device rtx4090 --html plan.html
    """
    if (budget is None) == (activations is None):
        raise InputError("give --budget 24GiB, or --activations 0.4: exactly one of the two")
    if html is not None and html.suffix != ".html":
        raise InputError(f"--html {html}: the name of an HTML file ends in .html")
    for path in filter(None, (out, html)):
        if not path.parent.is_dir():
            raise InputError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    actions = _actions(allow)
    if device is not None:
        from remat.devices import device as known

        known(device)
        if compiled:
            raise InputError(
                "--compile compiles and measures, so it needs the device itself; leave out --device"
            )
    from remat.jobs import load_job
    from remat.show.progress import showing

    job = load_job(what, dtype=dtype, optimizer=optimizer)
    options: dict[str, Any] = {"accumulate": accumulate, "allow": actions}
    if device is None:
        options["compile"] = compiled or None
    with showing("remat: planning") as progress:
        profile = job.profile(device, **options)
        progress("seeking the fastest way")
        made = remat.plan(profile, budget, activations=activations, allow=actions)
        report = made.report()
        if out is not None:
            made.save(out)
        if html is not None:
            progress("drawing the report")
            report.save(html)
    for path in filter(None, (out, html)):
        typer.echo(f"saved {path}", err=True)
    if as_json:
        _print_json(report.as_dict())
    else:
        typer.echo(str(report))


@app.command()
def explain(
    plans: PlanFiles,
    every: Annotated[bool, typer.Option("--all", help="A row for every region, alike or not.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the report as one HTML file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell of every region and tensor of a plan: bytes, action, seconds, source line, reason."""
    from remat.show.decisions import explained
    from remat.show.tables import explain_tables

    loaded = [_load_plan(path) for path in plans]
    if html is not None:
        if len(loaded) > 1:
            raise InputError("--html writes the report of one plan; name one")
        loaded[0].report().save(html)
        typer.echo(f"saved {html}", err=True)
    if as_json:
        _print_json([explained(found) for found in loaded])
    else:
        for found in loaded:
            _print(
                f"{found.profile.model}, {found.profile.environment.device_name}",
                explain_tables(found, every),
            )


@app.command()
def compare(
    plans: PlanFiles,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare plans with what people do by hand: uniform, sqrt, memory-first, compute-first, full, none."""
    from dataclasses import asdict

    from remat.show.facts import comparison
    from remat.show.tables import compare_table

    found = [(path, _load_plan(path)) for path in plans]
    rows = [comparison(p) for _, p in found]
    if as_json:
        _print_json(
            [
                {
                    "plan": str(path),
                    "budget_bytes": p.budget_bytes,
                    "plain_seconds": p.plain_seconds,
                    "strategies": [asdict(row) for row in table],
                }
                for (path, p), table in zip(found, rows, strict=True)
            ]
        )
    else:
        _print(*(compare_table(str(path), p, table) for (path, p), table in zip(found, rows, strict=True)))


@app.command()
def doctor(
    what: What,
    dtype: Dtype = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look for known problems in a model, verify a plan on it, and say what to do.

    Exits with 1 if a problem was found.
    """
    from remat.doctor import examine
    from remat.jobs import load_job
    from remat.show.progress import showing
    from remat.show.tables import diagnosis_text

    made = load_job(what, dtype=dtype).made()
    with showing("remat: examining") as progress:
        found = examine(made, progress)
    if as_json:
        _print_json(found.as_dict())
    else:
        _print(diagnosis_text(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def bench(
    what: What = "remat.demo:build",
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="BYTES", help="Fit to this budget; may be repeated.", show_default=False),
    ] = None,
    activations: Annotated[
        list[float] | None,
        typer.Option(metavar="SHARE", help="Fit to a share of activations; may be repeated. [0.7, 0.5]"),
    ] = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    allow: Allow = None,
    compiled: Compile = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps per way; the median counts.")] = 5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a training step on this machine: plain, every block recomputed, and fitted."""
    from remat.jobs import load_job
    from remat.race import race
    from remat.show.progress import showing
    from remat.show.tables import race_table

    actions = _actions(allow)
    if not budget and not activations:
        activations = [0.7, 0.5]
    made = load_job(what, dtype=dtype, optimizer=optimizer).made()
    with showing("remat: measuring") as progress:
        laps = race(
            made,
            budgets=budget or (),
            activations=activations or (),
            allow=actions,
            compile=compiled or None,
            repeats=repeats,
            progress=progress,
        )
    if as_json:
        _print_json([lap.as_dict() for lap in laps])
    else:
        _print(race_table(laps))


@app.command()
def devices(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the devices that `remat plan --device` knows, and where their numbers come from."""
    from dataclasses import asdict

    from remat.devices import DEVICES
    from remat.show.tables import devices_table

    if as_json:
        _print_json([asdict(found) for found in DEVICES.values()])
    else:
        _print(devices_table())


# ------------------------------------------------------------------------------------------------- parts


def _load_plan(path: Path) -> remat.Plan:
    try:
        return remat.Plan.load(path)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; make one with `remat plan ... --out {path}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a plan: {error}") from error
    except RematError as error:
        raise type(error)(f"{path}: {error}") from error


def _actions(allow: str | None) -> list[str] | None:
    return None if allow is None else [action.strip() for action in allow.split(",") if action.strip()]


def _torch_device(name: str) -> str:
    import torch

    if not name:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return name


def _print(*parts: str | RenderableType) -> None:
    from remat.show.tables import out

    console = out()
    for part in parts:
        console.print(part)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def main() -> None:
    """An error is told in one sentence; its traceback is for --debug."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, RematError):
            typer.echo(f"remat: {error}", err=True)
            raise SystemExit(2) from None
        from remat.jobs import told

        typer.echo(f"remat: {told(error)}; `--debug` shows where it comes from", err=True)
        raise SystemExit(1) from None
