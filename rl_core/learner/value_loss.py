"""The loss of a critic's values. A pure function, for learner/critic_updates.py. `_S` loss tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value_S: Tensor, before_S: Tensor, return_S: Tensor, *, clip: float = 0.5) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_prox - clip, V_prox + clip) - R)^2) per token.

    `before_S`: values at the start of the step, without gradient. Schulman et al. (arXiv 1707.06347), as in OpenAI's
    implementation.
    """
    near_S = torch.maximum(torch.minimum(value_S, before_S + clip), before_S - clip)
    return 0.5 * torch.maximum((value_S - return_S).square(), (near_S - return_S).square())
