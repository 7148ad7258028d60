# %% [markdown]
# # Looking at runs
#
# A run is a directory, and `rl_core.frames` reads it into pandas: while it goes on, after its end, also when it broke.
# Run this file cell by cell in an editor that knows `# %%`, or whole:
#
#     python docs/examples/look_at_runs.py ~/.headway/runs/first ~/.headway/runs/second

# %%
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rl_core import frames
from tasks.paths import headway_home

given = [Path(word) for word in sys.argv[1:] if Path(word).is_dir()]  # or write the directories here
runs = given or sorted((headway_home() / "runs").iterdir(), key=lambda path: path.stat().st_mtime)[-2:]
run = runs[-1]

# %% [markdown]
# ## How did it go?
# One row per training step, one column per metric. What could not be read is named, not raised.

# %%
steps = frames.steps(run)
first_numbers = steps[["state", "reward/mean", "reward/correct", "rollout/length_mean", "staleness/mean", "system/mfu"]]
print(first_numbers.tail())
print("gaps:", steps.attrs["gaps"] or "none")

# %%
validations = frames.validations(run)
overall = validations[validations["data_source"].isna()].set_index("step")
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained")
above.plot(steps.index + 1, steps["reward/mean"].astype(float), label="reward of trained answers")
if len(overall):
    above.plot(overall.index, overall["greedy_accuracy"].astype(float), "o-", label="accuracy, held out")
above.set_xlabel("training steps")
above.legend(frameon=False)

# %% [markdown]
# ## What was it trained on, and how old was that?

# %%
groups = frames.groups(run)
states = groups["state"].value_counts()
print(states)
trained = groups[groups["state"] == "trained"]
ages = trained["age"].value_counts().sort_index()
below.bar(ages.index.astype(int), ages.astype(int))
below.set_xlabel("age of trained groups, publications")
figure.savefig("look-at-runs.png", dpi=120)

# %%
by_source = frames.sources(run).groupby("data_source")[["reward_mean", "correct", "length_mean"]].mean()
print(by_source)

# %% [markdown]
# ## Which answers?
# Columns of the whole run are cheap; texts are decoded for what you ask for.

# %%
answers = frames.trajectories(run)
by_length = answers.groupby(pd.cut(answers["length"].astype(float), 4, precision=0), observed=True)["reward"].mean()
print(by_length)
last_trained = int(trained["step"].max())
worst = frames.trajectories(run, last_trained, text=True).nsmallest(3, "reward", keep="first")
print(worst[["group_id", "prompt", "text", "reward", "age"]])

# %% [markdown]
# ## Which run is better?
# Differences are to the first run, with 95 % intervals where a spread is known.

# %%
comparison = frames.compare(runs)
shown = ["steps", "accuracy_end", "accuracy_end_diff", "accuracy_end_diff_lo", "accuracy_end_diff_hi", "reward",
         "samples_per_s", "staleness_mean", "wasted"]
print(comparison[shown].T)

# %% [markdown]
# The same as `headway compare`: number by number, held-out accuracy paired by prompt where both runs had the same
# ones. What keeps the numbers from being read as they stand is said beside them.

# %%
differences = frames.differences(runs[0], runs[1:])
print(differences[["run", "name", "baseline", "value", "difference", "low", "high", "verdict"]])
print(differences.attrs["caveats"])

curves = frames.curves(runs)
figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
for name, curve in curves.groupby("run"):
    accuracy = curve.dropna(subset=["accuracy"])
    axis.plot(curve["step"], curve["reward"].astype(float), alpha=0.5, label=f"{name}, reward")
    axis.plot(accuracy["step"], accuracy["accuracy"].astype(float), "o-", label=f"{name}, held out")
axis.set_xlabel("training steps")
axis.legend(frameon=False)
figure.savefig("compared.png", dpi=120)
