"""decoupled_ppo: ppo_clip on pi/prox; its token weights sg(prox/mu), cut at CAP, are applied with all other weights.

Hilton et al. (arXiv 2110.00641); AReaL (arXiv 2505.24298).
"""

from rl_core.correction_settings import DECOUPLED_CAP
from rl_core.learner.losses.ppo_clip import token_loss

__all__ = ["CAP", "token_loss"]

CAP = DECOUPLED_CAP
