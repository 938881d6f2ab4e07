"""Double of Gaudi's torch bridge, written from its published contract (tests/doubles/contract.yaml). Tests only."""

import os

import habana_double

import torch

os.environ.setdefault("HABANA_PROFILE", "profile_api_light")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
habana_double.start()

from habana_frameworks.torch import hpu  # noqa: E402

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)


def _hccl(store, rank, size, timeout):
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


if torch.distributed.is_available() and "hccl" not in torch.distributed.Backend.backend_list:
    torch.distributed.Backend.register_backend("hccl", _hccl, devices=["hpu", "cpu"])

from habana_frameworks.torch import dynamo  # noqa: E402,F401  (DeepSpeed asks for its backend in lazy mode too)
