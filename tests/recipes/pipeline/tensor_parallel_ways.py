"""Ways to share one Llama over ranks, for the benchmark: what a decoding step takes and how much memory a rank reaches.

tensor_parallel_ways.py WAY MODEL_FOLDER RESULT_FILE, on every rank. Rows, loop, cache and kernels are the same in all ways.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from transformers import DynamicCache, LlamaConfig

from modeling.llama import LlamaDecoderLayer, LlamaForCausalLM
from recipes.pipeline.tensor_parallel import Shares, connect, empty_model, read_into

ROWS, PROMPT, WARM_UP, STEPS = 4, 32, 4, 24


def ours(folder: Path) -> torch.nn.Module:
    dist.init_process_group("gloo")
    model = empty_model(
        LlamaConfig.from_pretrained(folder), torch.float32, Shares.of(dist.get_rank(), dist.get_world_size(), 2)
    )
    read_into(model, sorted(folder.glob("*.safetensors")))
    return connect(model, model.shares)


def dtensor(folder: Path) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan = {f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{mlp}.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"{attention}.o_proj": RowwiseParallel(), f"{mlp}.down_proj": RowwiseParallel()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(LlamaForCausalLM.from_pretrained(folder), mesh, plan)


def deepspeed(folder: Path) -> torch.nn.Module:
    import deepspeed

    # DeepSpeed's own all-reduce of one host, in place of gloo's, dies with SIGSEGV inside its kernel
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    policy = {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")}
    return deepspeed.init_inference(
        LlamaForCausalLM.from_pretrained(folder), tensor_parallel={"tp_size": 2}, dtype=torch.float32,
        injection_policy=policy,
    ).module  # fmt: skip


def main() -> None:
    way, folder, result = sys.argv[1:4]
    model = {"ours": ours, "dtensor": dtensor, "deepspeed": deepspeed}[way](Path(folder)).eval()
    ids = torch.arange(ROWS * PROMPT).view(ROWS, PROMPT)
    cache, chosen, times = DynamicCache(), [], []
    with torch.no_grad():
        for step in range(WARM_UP + STEPS):
            began = time.perf_counter()
            scores = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            ids = scores.argmax(-1, keepdim=True)
            chosen.append(ids.flatten().tolist())
            if step >= WARM_UP:
                times.append(time.perf_counter() - began)
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if dist.get_rank() == 0:
        seen = {"step": statistics.median(times), "peak": max(peaks), "ids": chosen}
        Path(result).write_text(json.dumps(seen))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's engine has threads of its own


if __name__ == "__main__":
    main()
