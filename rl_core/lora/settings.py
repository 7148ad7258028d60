"""Settings of a low-rank adapter. Importable without torch.

All of them make the run what it is: an adapter of another shape or scale is another model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.settings import Part, identity

LayerName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class LoraConfig(Part):
    """Train a low-rank adapter in place of all parameters: W + alpha / rank B A."""

    rank: int | None = identity(None, "Rank of the adapter of each layer; null = none, all parameters are trained.",
                                ge=1)
    alpha: float = identity(32.0, "The adapter's product is multiplied by alpha / rank.", gt=0)
    target_modules: tuple[LayerName, ...] = identity(
        (), "Last names of the linear layers with an adapter, as in [q_proj, v_proj]; empty = every linear layer of "
        "the decoder's blocks.")
    dropout: float = identity(0.0, "Dropout before the adapter, share; must be 0: log-probs are of the distribution "
                                   "that samples, which has none.", ge=0, lt=1)
    publish: Literal["merged", "adapter"] = identity(
        "merged", "What a publication holds: all weights with the adapter in them, or the adapter alone, which the "
        "embedded engine adds to the initial model.")

    @property
    def used(self) -> bool:
        """Whether an adapter is trained, and nothing else of the policy."""
        return self.rank is not None

    @property
    def scale(self) -> float:
        """alpha / rank; 0 without an adapter."""
        return 0.0 if self.rank is None else self.alpha / self.rank
