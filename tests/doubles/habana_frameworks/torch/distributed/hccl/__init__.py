"""Ranks of mpirun become torch's; a module id for each local rank."""

import os

import habana_double

for name in ("LOCAL_RANK", "SIZE", "RANK"):
    if value := os.environ.get(f"OMPI_COMM_WORLD_{name}"):
        os.environ.setdefault({"SIZE": "WORLD_SIZE"}.get(name, name), value)
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "12345")
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    modules = os.environ.get("HABANA_VISIBLE_MODULES", "")
    os.environ["HLS_MODULE_ID"] = modules.split(",")[local] if modules else str(local)
habana_double.note("import habana_frameworks.torch.distributed.hccl")
