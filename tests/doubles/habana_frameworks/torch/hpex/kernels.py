"""Double of Gaudi's attention and rotary kernels: checks what the real ones take, computes the true result on a CPU.

Signatures from gaudi-pytorch-bridge, habana_frameworks/torch/hpex/kernels: positional arguments in this order.
"""

from enum import IntEnum

import habana_double

import torch

NAMES = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "softmax_mode")
NAMES += ("recompute_mode", "valid_seq_len", "seq_padding_type", "return_dropout_mask", "return_attn_probs")
DEFAULTS = (None, 0.0, False, None, "None", None, None, "left", False, False)


class FusedSDPA(torch.autograd.Function):
    @classmethod
    def apply(cls, *args, **kwargs):
        if kwargs:
            raise TypeError("apply() takes no keyword arguments")  # as an autograd.Function
        given = dict(zip(NAMES, (*args, *DEFAULTS[len(args) - 3 :]), strict=True))
        q, k, v, mask = (given[name] for name in ("q", "k", "v", "attn_mask"))
        if not (q.dim() == k.dim() == v.dim() == 4) or q.shape[1] % k.shape[1] or k.shape != v.shape:
            raise RuntimeError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
        if len({q.dtype, k.dtype, v.dtype}) > 1:
            raise RuntimeError("q, k and v are of different dtypes")
        if given["softmax_mode"] not in ("None", "fast") or given["seq_padding_type"] not in ("left", "right", "None"):
            raise RuntimeError(
                f"softmax_mode {given['softmax_mode']!r}, seq_padding_type {given['seq_padding_type']!r}"
            )
        if given["is_causal"] and mask is not None:
            raise RuntimeError("is_causal with a mask")
        if mask is not None and (
            mask.dtype != q.dtype or mask.dim() != 4 or mask.shape[-2:] != (q.shape[2], k.shape[2])
        ):
            raise RuntimeError(f"mask {mask.dtype} {tuple(mask.shape)}")
        if given["recompute_mode"] and q.requires_grad and given["softmax_mode"] == "fast" and not given["is_causal"]:
            raise RuntimeError("recompute with fast softmax in training needs is_causal")
        habana_double.count("FusedSDPA", **given)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, given["dropout_p"], given["is_causal"], scale=given["scale"], enable_gqa=True
        )


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    @classmethod
    def apply(cls, *args, **kwargs):
        if kwargs or len(args) != 4:
            raise TypeError(f"apply() takes 4 positional arguments, {len(args)} were given")
        p, cos, sin, position_ids = args
        if (
            cos.shape != sin.shape
            or cos.dim() != 4
            or cos.shape[:2] != (1, 1)
            or position_ids.shape != (p.shape[0], p.shape[2])
        ):
            raise RuntimeError(f"cos {tuple(cos.shape)}, position_ids {tuple(position_ids.shape)}, p {tuple(p.shape)}")
        habana_double.count("RotaryPosEmbeddingHelperV2", p=p, cos=cos)
        cos, sin = (table[0, 0][position_ids].unsqueeze(1) for table in (cos, sin))
        if torch.float32 not in {p.dtype, cos.dtype, sin.dtype}:
            cos, sin = cos.to(p.dtype), sin.to(p.dtype)
        half = p.shape[-1] // 2
        return p * cos + torch.cat((-p[..., half:], p[..., :half]), dim=-1) * sin


class RotaryPosEmbeddingMode(IntEnum):
    BLOCKWISE = 0
    PAIRWISE = 1


class _NotLlamas(torch.autograd.Function):
    """Kernels that optimum-habana names for other models; nothing of Llama may reach them."""

    @classmethod
    def apply(cls, *args):
        raise RuntimeError(f"{cls.__name__} is not for Llama")


class RotaryPosEmbeddingHelperV1(_NotLlamas):
    pass


class RotaryPosEmbeddingHelperV3(_NotLlamas):
    pass


class CTCLoss(_NotLlamas):
    pass
