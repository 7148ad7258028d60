"""The `headway` command. Heavy imports happen inside the commands: the first line is out at once."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Asynchronous reinforcement learning of language models.")

reward_app = typer.Typer(no_args_is_help=True, help="Rewards: try one before a run is built on it.")
app.add_typer(reward_app, name="reward")
data_app = typer.Typer(no_args_is_help=True, help="Data sets: look at one before a run is built on it.")
app.add_typer(data_app, name="data")

Preset = Annotated[str, typer.Option("--preset", help="A preset by name, or the path of a YAML file.")]
OwnPreset = Annotated[str | None, typer.Option("--preset", help="A preset by name, or the path of a YAML file. Without "
                                               "it: what the run has stored, or tiny-cpu for a new one.")]
Set = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one setting; may be repeated.")]
RunKey = Annotated[str | None, typer.Option("--run-key", help="Names the run; the same key resumes the same run.")]
Amend = Annotated[bool, typer.Option("--amend", help="Change how the run of --run-key learns, from its next step on.")]
Json = Annotated[bool, typer.Option("--json", help="The last line on stdout is one JSON object.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the logs of Prefect, Ray and MLflow.")]
Key = Annotated[str, typer.Argument(metavar="RUN_KEY", help="Key of the run.")]

# B006 below: typer shows a default in --help as it stands here, and a command is called once in a process.


@app.command()
def train(preset: OwnPreset = None, set_: Set = [], run_key: RunKey = None, amend: Amend = False,  # noqa: B006
          json_: Json = False, verbose: Verbose = False) -> None:
    """Train a run to its end; with the key of a run that was stopped, go on with it."""
    from flows.launch import launch

    raise typer.Exit(launch(preset, set_, run_key, as_json=json_, verbose=verbose, amend=amend))


@app.command()
def plan(preset: OwnPreset = None, set_: Set = [], run_key: RunKey = None, amend: Amend = False,  # noqa: B006
         json_: Json = False) -> None:
    """Show the resolved settings and all that follows from them. Starts nothing."""
    from flows.launch import show_plan

    raise typer.Exit(show_plan(preset, set_, run_key, as_json=json_, amend=amend))


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
def inspect(run_key: Key,
            step: Annotated[int | None, typer.Option("--step", min=0, help="Training step, from 0; else the newest "
                                                                           "one with a claim.")] = None,
            group: Annotated[str | None, typer.Option("--group", metavar="ID", help="One group, whatever became of "
                                                                                    "it: e0-p12-t1.")] = None,
            best: Annotated[int | None, typer.Option("--best", min=1, metavar="N", help="The N answers with the "
                                                     "largest reward, of --step or of all that landed.")] = None,
            worst: Annotated[int | None, typer.Option("--worst", min=1, metavar="N", help="Those with the "
                                                                                          "smallest.")] = None,
            json_: Json = False) -> None:
    """Prompts, answers, rewards and weight versions: of a training step, of a group, or the best and worst."""
    from flows.looking import show_answers

    raise typer.Exit(show_answers(run_key, step=step, group=group, best=best, worst=worst, as_json=json_))


@app.command()
def export(run_key: Key, out: Annotated[str, typer.Option("--out", help="Directory that does not exist or is empty.")],
           step: Annotated[int | None, typer.Option(
               "--step", min=0, help="The weights after this many training steps; else the newest.")] = None,
           best: Annotated[bool, typer.Option("--best", help="The weights of the best validation.")] = False,
           by: Annotated[str | None, typer.Option(
               "--by", help="Field of a validation that --best goes by; else checkpoint.best of the run.")] = None,
           dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
           json_: Json = False) -> None:
    """Write trained weights as a Hugging Face directory, also while the run goes on."""
    from flows.exporting import export_model

    raise typer.Exit(export_model(run_key, out, step=step, best=best, by=by, dtype=dtype, as_json=json_))


@app.command()
def validate(run_key: Annotated[str | None, typer.Argument(metavar="RUN_KEY", help="Key of the run.")] = None,
             step: Annotated[int | None, typer.Option(
                 "--step", min=0, help="The weights after this many training steps; else the newest.")] = None,
             model: Annotated[str | None, typer.Option(
                 "--model", help="Instead of a run: a Hugging Face directory, or hf:owner/name.")] = None,
             preset: Annotated[str | None, typer.Option(
                 "--preset", help="With --model: data, reward and sampling; local-model-cpu if not given.")] = None,
             set_: Set = [],  # noqa: B006
             out: Annotated[str | None, typer.Option(
                 "--out", help="A file that does not exist: the report with some answers, as JSON.")] = None,
             json_: Json = False) -> None:
    """Measure weights of a run, or any model, on held-out prompts; changes nothing in the run."""
    from flows.validating import validate as measure

    raise typer.Exit(measure(run_key, model=model, step=step, preset=preset, overrides=set_, out=out, as_json=json_))


@app.command()
def ui() -> None:
    """MLflow and Prefect in the browser, on loopback; prints both addresses and stays until Ctrl-C."""
    from flows.looking import serve_ui

    raise typer.Exit(serve_ui())


@reward_app.command("test")
def reward_test(
    reward: Annotated[str, typer.Argument(metavar="FILE_OR_REWARD", help="`reward.py`, `./reward.py:function`, "
                                          "`package.module:function`, or the name of a reward.")],
    data: Annotated[str | None, typer.Option("--data", help="Rows to try it on; else data.train.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows tried.")] = 20,
    preset: Preset = "tiny-cpu", set_: Set = [], json_: Json = False,  # noqa: B006
) -> None:
    """Score some rows, their own ground truths as answers; exit code 1 if answers of a run would fail."""
    from flows.checking_rewards import show_trial

    raise typer.Exit(show_trial(reward, preset, set_, data=data, rows=rows, as_json=json_))


@data_app.command("check")
def data_check(
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE...", help="JSONL, CSV or Parquet files, tasks, or "
                                                      "names of the hub; else data.train.")] = None,
    row: Annotated[int, typer.Option("--row", min=0, help="The prompt that is shown, from 0.")] = 0,
    preset: Preset = "tiny-cpu", set_: Set = [], json_: Json = False,  # noqa: B006
) -> None:
    """Lengths, duplicates, what would be left out, one prompt with its tokens; exit code 1 if a run would refuse it."""
    from flows.checking import check_files

    raise typer.Exit(check_files(files or [], preset, set_, row=row, as_json=json_))


def main(args: list[str] | None = None) -> None:
    """Entry point of the `headway` command."""
    app(args=args)


if __name__ == "__main__":
    main()
