"""`staleness.exact`: training on groups of one age alone, for studies (docs/staleness.md). Pure functions.

A bound is not a staleness: how old groups become below it follows from how fast both sides are. Under `exact` = s every
group of step k was sampled by publication

    p(k) = max(0, idx(k) - s)

so that the first K (s + 1) steps share the initial weights, at ages 0 to s, and all later ones train at age s. Nothing
else is left to chance: a publication has exactly the groups that its steps train on, since

* workers serve publications in order, and go on to the next when this one's groups have all landed (`offered`);
* capacity at bound s is then just what the served publication lacks (experience-store.md 3.7);
* a claim is held while a publication lacks groups whose weights the next publications would push off the disk
  (`holds`; weights.keep).

A group that no step is left for is dropped as `stale`. One that is too young waits. Generation and training overlap as
ever: with s >= 1 a step takes about as long as the longer of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.config import Config
from rl_core.experience.staleness import wanted_publication


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactOrder:
    """Which publication has to sample how many groups: with B 16, K 1, exact 2 publication 0 48, all others 16."""

    exact: int
    groups_per_step: int
    publish_every: int
    total_steps: int
    weights_kept: int
    """Newest publications whose bytes are on the disk."""

    @staticmethod
    def of(config: Config) -> ExactOrder | None:
        """None without `staleness.exact`."""
        if config.staleness.exact is None or config.offline:
            return None
        return ExactOrder(exact=config.staleness.exact, groups_per_step=config.groups_per_step,
                          publish_every=config.publish_every, total_steps=config.total_steps,
                          weights_kept=config.weights.keep)

    def publication(self, step: int) -> int:
        """The one that step k is trained on."""
        return wanted_publication(step // self.publish_every, self.exact)

    def needed(self, publication: int, step: int) -> int:
        """Groups of a publication that the steps from `step` on train on."""
        first = 0 if publication == 0 else self.publish_every * (publication + self.exact)
        behind = self.publish_every * (publication + self.exact + 1)
        return self.groups_per_step * max(0, min(behind, self.total_steps) - max(first, step))

    def offered(self, step: int, newest: int, held: Mapping[int, int]) -> int:
        """The first publication up to `newest` that lacks groups, else `newest`.

        `step`: the next unclaimed one; `held`: waiting groups by publication.
        """
        for publication in range(self.publication(step), newest):
            if held.get(publication, 0) < self.needed(publication, step):
                return publication
        return newest

    def holds(self, step: int, held: Mapping[int, int]) -> bool:
        """Whether the claim of `step` has to wait: the version that it leads to would push the weights of a publication
        that lacks groups off the disk."""
        newest = (step + 1) // self.publish_every
        return self.offered(step, newest, held) < newest - (self.weights_kept - 1)

    def explain(self, step: int, held: Mapping[int, int]) -> str:
        """For a stall report."""
        wanted = self.publication(step)
        return f"staleness.exact {self.exact}: it trains on publication {wanted}, of which {held.get(wanted, 0)} of " \
               f"{sum(held.values())} waiting groups are."
