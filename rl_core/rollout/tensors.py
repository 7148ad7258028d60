"""Arrays as tensors."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor of its dtype and shape on `device`; on the CPU over the array's own memory."""
    # torch names no type for the argument.
    return torch.from_numpy(values).to(device)  # pyright: ignore[reportUnknownMemberType]
