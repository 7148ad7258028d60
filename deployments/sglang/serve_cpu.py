"""A real SGLang server without a GPU: `python serve_cpu.py --model-path DIR --device cpu ...`, as
`python -m sglang.launch_server` takes it. Headway runs this file as `rollout.engine.script` of the CPU preset.

SGLang has a CPU engine; two packages that it imports have no build for CPUs on a registry. What is missing is declared
here before SGLang is imported, and no file of the environment is changed:

* torchvision is a CUDA build, which a CPU build of torch cannot load: `operator torchvision::nms does not exist`.
  Schemas of its two operators let it import. No language model calls them.
* sgl_kernel is a CUDA build, too. Names of it that SGLang imports stand here. A dense model without speculative
  decoding calls none of them; one that is called raises with its name.

The environment is that of `make sglang` (requirements-cpu.txt). SGLang spawns its processes, and each runs the top
level of this file first: so it is started as a file, never with `-c`, and the declarations are no function.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch

OPERATORS = ("nms", "qnms")
KERNELS = ("assign_req_to_token_pool_cpu", "assign_draft_cache_locs_contiguous_cpu", "assign_extend_cache_locs_cpu",
           "build_tree_kernel_efficient_cpu", "copy_all_layer_kv_cache_cpu", "fill_accept_out_cache_loc_cpu",
           "fill_bonus_tokens_cpu", "rotate_input_ids_cpu", "verify_tree_greedy_cpu")
"""What SGLang 0.5.23 imports of sgl_kernel at its start: speculative decoding, and moves of the key/value cache."""


def absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: has no CPU build here; it belongs to speculative decoding, "
                                  "which a server of deployments/sglang/serve_cpu.py does not do")
    return kernel


torchvision = torch.library.Library("torchvision", "FRAGMENT")  # kept: operators end with their library
for operator in OPERATORS:
    torchvision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if "sgl_kernel" not in sys.modules:
    kernels: Any = types.ModuleType("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    kernels.__version__ = "0.0.0"
    for each in KERNELS:
        setattr(kernels, each, absent(each))
    sys.modules["sgl_kernel"] = kernels

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
