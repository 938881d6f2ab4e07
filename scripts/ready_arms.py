"""Arms of --arms: each a list of overrides for recipes/lora.py; the first is what the others are held against.

`ranks` starts through the launcher: an override `ranks=N` is taken off before the recipe sees it.
"""
# fmt: off

READY: dict[str, list[list[str]]] = {
    "in_place": [["runtime.in_place_residual=null"], ["runtime.in_place_residual=false"]],
    "mark_step": [["runtime=cpu_lazy", "runtime.mark_step=true"], ["runtime=cpu_lazy", "runtime.mark_step=false"]],
    "lazy": [["runtime=cpu"], ["runtime=cpu_lazy"]],
    "kernels": [["runtime.attention=auto", "runtime.ops=auto"], ["runtime.attention=eager", "runtime.ops=eager"]],
    "checkpointing": [["train.gradient_checkpointing=false"], ["train.gradient_checkpointing=true"]],
    "ranks": [["ranks=1"], ["ranks=2"]],
    "zero": [["deepspeed=zero0"], ["deepspeed=zero2"], ["deepspeed=zero3"]],
    # A step of packed rows holds other records, so evaluation alone can be the same
    "batching": [
        ["data.batching=padded", "train.do_train=false"], ["data.batching=packed", "train.do_train=false"],
    ],
    "dtype": [["model.dtype=float32"], ["model.dtype=bfloat16"]],
    "compile": [["runtime.compile=false"], ["runtime.compile=true"]],
}
