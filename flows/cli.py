"""The `headway` command. Heavy imports happen inside the commands: the first line is out at once."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Asynchronous reinforcement learning of language models.")

Preset = Annotated[str, typer.Option("--preset", help="A preset by name, or the path of a YAML file.")]
Set = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one setting; may be repeated.")]
RunKey = Annotated[str | None, typer.Option("--run-key", help="Names the run; the same key resumes the same run.")]
Json = Annotated[bool, typer.Option("--json", help="The last line on stdout is one JSON object.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the logs of Prefect, Ray and MLflow.")]
Key = Annotated[str, typer.Argument(metavar="RUN_KEY", help="Key of the run.")]

# B006 below: typer shows a default in --help as it stands here, and a command is called once in a process.


@app.command()
def train(preset: Preset = "tiny-cpu", set_: Set = [], run_key: RunKey = None, json_: Json = False,  # noqa: B006
          verbose: Verbose = False) -> None:
    """Train a run to its end; with the key of a run that was stopped, go on with it."""
    from flows.launch import launch

    raise typer.Exit(launch(preset, set_, run_key, as_json=json_, verbose=verbose))


@app.command()
def plan(preset: Preset = "tiny-cpu", set_: Set = [], run_key: RunKey = None, json_: Json = False) -> None:  # noqa: B006
    """Show the resolved settings and all that follows from them. Starts nothing."""
    from flows.launch import show_plan

    raise typer.Exit(show_plan(preset, set_, run_key, as_json=json_))


@app.command()
def status(run_key: Key, json_: Json = False) -> None:
    """What the run is doing, or how it ended."""
    from flows.looking import show_status

    raise typer.Exit(show_status(run_key, as_json=json_))


@app.command()
def audit(run_key: Key, json_: Json = False) -> None:
    """Where every prompt and every landed answer is; exit code 1 if one is in no state or in two."""
    from flows.looking import show_audit

    raise typer.Exit(show_audit(run_key, as_json=json_))


@app.command()
def inspect(run_key: Key, step: Annotated[int, typer.Option("--step", min=0, help="Training step, from 0.")],
            json_: Json = False) -> None:
    """Prompts, answers, rewards and weight versions that a training step consumed."""
    from flows.looking import show_step

    raise typer.Exit(show_step(run_key, step, as_json=json_))


@app.command()
def ui() -> None:
    """MLflow and Prefect in the browser, on loopback; prints both addresses and stays until Ctrl-C."""
    from flows.looking import serve_ui

    raise typer.Exit(serve_ui())


def main(args: list[str] | None = None) -> None:
    """Entry point of the `headway` command."""
    app(args=args)


if __name__ == "__main__":
    main()
