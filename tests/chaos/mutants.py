"""Mutants: what the store and the learner must not do, each with the test that has to fail when they do it.

Also a pytest plugin (`-p tests.chaos.mutants`): it breaks the code under each test that $HEADWAY_MUTANTS names
({node id: mutant}) while that test runs, and writes how each ended into $HEADWAY_MUTANTS_REPORT.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch, Any], None]
"""Breaks the code for the time of one test; is given that test's module, too."""
HERE = "tests/chaos/test_proofs.py"
CHECKPOINT = ("tests/unit/test_checkpoint.py::"
              "test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_in_the_end_to_the_initial_model")


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is done wrong, the test that must fail, and what its failure says."""

    patch: Patch
    test: str
    reason: str
    """Regular expression that the report of the failure matches."""
    slow: bool = False
    """The test imports torch, or waits for a deadline: `make test` leaves it to `make chaos`."""


# -- names


def in_place(patch: pytest.MonkeyPatch, module: Any) -> None:
    """O_EXCL under the final name: the writer of the kill test has a switch for it."""
    real = module.kill_at
    patch.setattr(module, "kill_at", lambda run, point, protocol: real(run, point, "inplace"))


def rename(path: Path, data: bytes, *, fsync: bool = True) -> bool:
    """Last writer wins, and both believe to have won. Between look and rename a millisecond passes, so that the race is
    met on any machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return False
    time.sleep(0.001)
    tmp = path.with_name(f"{path.name}.{os.urandom(6).hex()}.tmp")
    tmp.write_bytes(data)
    os.replace(tmp, path)
    return True


def renamed_claim(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience import ledger

    patch.setattr(ledger, "put_if_absent", rename)


def fsspec_create(path: Path, data: bytes, *, fsync: bool = True) -> bool:
    """fsspec's local file system, asked for the exclusive create that object stores have: it looks, and then writes.
    Between the two a millisecond passes, so that the race is met on any machine."""
    import fsspec

    path.parent.mkdir(parents=True, exist_ok=True)
    files = fsspec.filesystem("file", skip_instance_cache=True)
    looked = files.exists

    def exists(name: str) -> bool:
        found = looked(name)
        time.sleep(0.001)
        return found

    files.exists = exists
    try:
        files.pipe_file(str(path), data, mode="create")
    except FileExistsError:
        return False
    return True


def fsspec_claim(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience import ledger

    patch.setattr(ledger, "put_if_absent", fsspec_create)


def rewritten_record(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core import records
    from rl_core.run_dir import replace_file

    def put(path: Path, data: bytes) -> bool:
        replace_file(path, data)
        return True

    patch.setattr(records, "put_if_absent", put)


# -- what is claimed


def no_dedupe(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience.index import KeySet

    patch.setattr(KeySet, "contains", lambda self, keys: keys != keys)


def order_of_arrival(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience.index import Index

    real = Index.select

    def select(self: Index, *args: Any) -> Any:
        chosen = real(self, *args)
        return chosen and dataclasses.replace(
            chosen, groups=tuple(sorted(chosen.groups, key=lambda group: (group.stream, group.seq, group.row))))

    patch.setattr(Index, "select", select)


def version_as_idx(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Ages from the names of versions, which a divergence moves on."""
    from rl_core.experience import index

    real = index.rows_of

    def rows_of(info: Any, shard: int) -> Any:
        lists = [info.version[lo:hi] for lo, hi in pairwise(info.version_offsets)]
        rows = real(info, shard)
        rows.idx_min[:] = [int(versions.min()) for versions in lists]
        rows.idx_max[:] = [int(versions.max()) for versions in lists]
        return rows

    def thawed(info: Any, shard: int) -> Any:
        copy = dataclasses.replace(info, idx_min=info.idx_min.copy(), idx_max=info.idx_max.copy())
        return rows_of(copy, shard)

    patch.setattr(index, "rows_of", thawed)


# -- what is leased


def fed_frontier(patch: pytest.MonkeyPatch, module: Any) -> None:
    """A restart goes on behind what was leased, as the saved position of a data loader, not behind what was trained."""
    from rl_core.experience.positions import Positions

    fed, take, open_ = [(0, 0)], Positions.take, Positions.open

    def taking(self: Positions) -> Any:
        slot = take(self)
        if slot is not None:
            fed[0] = max(fed[0], (slot.dataset_epoch, slot.position + 1))
        return slot

    def opening(self: Positions, n_prompts: int, epochs: int | None) -> None:
        open_(self, n_prompts, epochs)
        self._cursor = fed[0]

    patch.setattr(Positions, "take", taking)
    patch.setattr(Positions, "open", opening)


def published_capacity(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience.experience import Experience
    from rl_core.versions import read_versions

    real = Experience.admission

    def admission(self: Experience, served_idx: int) -> Any:
        return real(self, max((version.idx for version in read_versions(self.run).values()), default=served_idx))

    patch.setattr(Experience, "admission", admission)


def nothing_in_flight(patch: pytest.MonkeyPatch, module: Any) -> None:
    """F = 0 at a start, whatever live workers say."""
    from rl_core.experience.experience import Experience

    real = Experience.adopt

    def adopt(self: Experience, worker: str, name: str, idx_dispatch: int) -> bool:
        if adopted := real(self, worker, name, idx_dispatch):
            self._known.lose([name])
        return adopted

    patch.setattr(Experience, "adopt", adopt)


def doomed_count(patch: pytest.MonkeyPatch, module: Any) -> None:
    """L counts every group that waits, also those that no claim will take."""
    from rl_core.experience.experience import Experience

    patch.setattr(Experience, "L", property(lambda self: len(self.index.waiting)))


def same_group_id(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.experience.positions import Positions, Slot

    def ended(self: Positions, slot: Slot) -> None:
        self.known(slot)
        self._again[slot.dataset_epoch, slot.position] = slot.try_no

    patch.setattr(Positions, "ended", ended)


# -- weights and checkpoints


def manifestless_checkpoint(patch: pytest.MonkeyPatch, module: Any) -> None:
    """A checkpoint is whole because its directory is there: without a manifest its name and its files say what one
    would."""
    from rl_core import checkpoint
    from rl_core.types import FORMAT

    real = checkpoint._ensure_whole

    def ensure_whole(directory: Path) -> dict[str, Any]:
        if (directory / checkpoint.MANIFEST).exists():
            return real(directory)
        n = int(directory.name.removeprefix("n-"))
        files = {path.name: {} for path in directory.glob("*.safetensors")}
        state = checkpoint.CheckpointState(n=n, revision=0, weights_digest="", version_step=n, version_digest="",
                                           skipped_in_a_row=0)
        return {"format": FORMAT, **dataclasses.asdict(state), "files": files}

    patch.setattr(checkpoint, "_ensure_whole", ensure_whole)


def undigested_checkpoint(patch: pytest.MonkeyPatch, module: Any) -> None:
    """A checkpoint is whole because its manifest is there: no digest is held against its files."""
    from rl_core import checkpoint
    from rl_core.run_dir import read_json

    patch.setattr(checkpoint, "_ensure_whole", lambda directory: read_json(directory / checkpoint.MANIFEST))


def restarting_versions(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Numbers from what this process has published, not from the run directory."""
    from rl_core import weights

    patch.setattr(weights, "learn_versions", lambda run, known: known)


def publication_during_replay(patch: pytest.MonkeyPatch, module: Any) -> None:
    from rl_core.learner.learner import Learner

    real = Learner._after
    patch.setattr(Learner, "_after", lambda self, step, *, write: real(self, step, write=True))


def careless_retention(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Shards go behind the newest checkpoint, although older ones are kept to go back to."""
    patch.setattr(module, "first_needed", lambda whole, keep: max(whole, default=0))


MUTANTS: dict[str, Mutant] = {
    "in-place write": Mutant(
        in_place, "tests/unit/test_shards.py::test_a_kill_at_any_point_leaves_whole_shards_only_and_its_tmp_is_swept"
                  "[tmp-half]", r"00000001\.arrow", slow=True),
    "rename of a claim": Mutant(
        renamed_claim, f"{HERE}::test_three_rivals_agree_on_each_of_400_claims[quick]", r"assert \d+ == 0"),
    "fsspec's local create": Mutant(
        fsspec_claim, "tests/unit/test_ledger.py::"
        "test_of_three_rivals_one_wins_each_step_and_the_others_adopt_its_claim", r"assert \d+ == 0"),
    "no dedupe": Mutant(
        no_dedupe, "tests/unit/test_experience.py::test_a_group_that_lands_again_after_its_claim_is_a_duplicate",
        r"\.L == 0|assert 4 == 0"),
    "cursor from the fed frontier": Mutant(
        fed_frontier, f"{HERE}::test_a_restart_leases_again_what_was_in_flight_nowhere", "e0-p8-t0"),
    "checkpoint without manifest": Mutant(
        manifestless_checkpoint, f"{CHECKPOINT}[no manifest]", "DID NOT RAISE", slow=True),
    "checkpoint without digests": Mutant(
        undigested_checkpoint, f"{CHECKPOINT}[a flipped bit]", "DID NOT RAISE", slow=True),
    "version numbers that restart": Mutant(
        restarting_versions, "tests/unit/test_weights.py::"
        "test_the_same_bytes_for_the_same_step_are_adopted_and_other_bytes_take_a_new_name", "v: 1 != 0", slow=True),
    "version id instead of idx in ages": Mutant(
        version_as_idx, "tests/unit/test_experience.py::test_tokens_over_the_limit_are_masked_and_counted",
        "Step 3 needs 4 usable groups: 3 landed", slow=True),
    "capacity from the published version": Mutant(
        published_capacity, f"{HERE}::test_a_version_that_nobody_serves_opens_no_capacity", r"assert \[.+\] == \[\]"),
    "F = 0 beside live workers": Mutant(
        nothing_in_flight, "tests/unit/test_pump.py::test_a_new_pump_adopts_what_live_workers_have_in_flight",
        "41 groups out against a bound of 32"),
    "doomed groups holding capacity": Mutant(
        doomed_count, f"{HERE}::test_groups_that_no_claim_will_take_hold_no_capacity", r"assert \d == \d"),
    "publication during replay": Mutant(
        publication_during_replay, f"{HERE}::test_a_replay_publishes_nothing",
        "engines would be offered weights of the past", slow=True),
    "a record rewritten on replay": Mutant(
        rewritten_record, "tests/unit/test_records.py::"
        "test_a_recomputed_record_with_other_weights_is_left_beside_the_stored_one", "assert 'x' == 'w'"),
    "refill under the same group id": Mutant(
        same_group_id, "tests/unit/test_experience.py::test_drops_do_not_need_a_full_claim_and_lead_to_another_try",
        r"e0-p0-t0"),
    "retention that ignores kept checkpoints": Mutant(
        careless_retention, f"{HERE}::test_a_kept_checkpoint_keeps_the_shards_behind_it",
        r"assert \[\] == \[4, 5\]"),
    "training in order of arrival": Mutant(
        order_of_arrival, "tests/unit/test_experience.py::test_the_batch_does_not_depend_on_the_order_of_arrival",
        r"e0-p3-t0"),
}


# -- the plugin

_REPORT: dict[str, dict[str, str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The mutant is there while the test itself runs, not its fixtures."""
    name = json.loads(os.environ.get("HEADWAY_MUTANTS", "{}")).get(item.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name].patch(patch, item.module)  # pyright: ignore[reportAttributeAccessIssue]
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        _REPORT[report.nodeid] = {"outcome": report.outcome, "when": report.when, "text": report.longreprtext}


def pytest_sessionfinish() -> None:
    if path := os.environ.get("HEADWAY_MUTANTS_REPORT"):
        Path(path).write_text(json.dumps(_REPORT))
