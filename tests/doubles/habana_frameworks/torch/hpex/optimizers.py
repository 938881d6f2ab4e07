"""Double of FusedAdamW: AdamW with the bias correction in the step size, moments in the parameter's dtype."""

import math

import habana_double
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy

import torch


class FusedAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.0,
        bias_correction=True,
        moments_dtype=None,
    ):
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})
        self.moments_dtype = moments_dtype

    @torch.no_grad()
    def step(self, closure=None):
        habana_double.count("FusedAdamW.step")
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            _mark_step_if_lazy()
            if not group["params"]:
                raise RuntimeError("FusedAdamW: a parameter group is empty")
            group["step"] = group.get("step", 0) + 1
            self._update(group)
        _mark_step_if_lazy()
        return loss

    def _update(self, group):
        (first, second), count = group["betas"], group["step"]
        size = group["lr"]
        if group["bias_correction"]:
            size *= math.sqrt(1 - second**count) / (1 - first**count)
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(weight, dtype=self.moments_dtype or weight.dtype)
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.mul_(first).add_(weight.grad, alpha=1 - first)
            square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_((mean / (square.sqrt() + group["eps"])).to(weight.dtype), alpha=-size)
