"""torch.compile's backend of the card; here the graphs run eagerly."""

from torch._dynamo import list_backends, register_backend
from torch._dynamo.backends.debugging import aot_eager

if "hpu_backend" not in list_backends(exclude_tags=()):
    register_backend(aot_eager, name="hpu_backend")
