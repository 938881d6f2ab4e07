"""Double of Gaudi's FusedRMSNorm: one dtype for both tensors, the true result on a CPU."""

import torch

calls = []


class FusedRMSNorm(torch.autograd.Function):
    @classmethod
    def apply(cls, x, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False):
        if x.dtype != gamma.dtype:
            raise RuntimeError(f"x is {x.dtype}, gamma {gamma.dtype}")
        if gamma.shape != x.shape[-1:]:
            raise RuntimeError(f"gamma {tuple(gamma.shape)}, x {tuple(x.shape)}")
        calls.append((tuple(x.shape), x.dtype))
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return gamma * scaled.to(x.dtype)
