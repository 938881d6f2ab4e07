"""Doubles of FusedRMSNorm (one dtype for both tensors) and FusedClipNorm (clips in place, one mark_step on either side)."""

import habana_double
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy

import torch


class FusedRMSNorm(torch.autograd.Function):
    @classmethod
    def apply(cls, x, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False, /):
        if x.dtype != gamma.dtype:
            raise RuntimeError(f"x is {x.dtype}, gamma {gamma.dtype}")
        if gamma.shape != x.shape[-1:]:
            raise RuntimeError(f"gamma {tuple(gamma.shape)}, x {tuple(x.shape)}")
        habana_double.count("FusedRMSNorm", x=x)
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return gamma * scaled.to(x.dtype)


class FusedClipNorm:
    def __init__(self, parameters, max_norm):
        self.max_norm = torch.tensor(float(max_norm), device="hpu" if habana_double.DEVICE != "none" else "cpu")

    def clip_norm(self, parameters):
        habana_double.count("FusedClipNorm.clip_norm")
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        _mark_step_if_lazy()
        total = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
        factor = (self.max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        _mark_step_if_lazy()
        return total.reshape(1)
