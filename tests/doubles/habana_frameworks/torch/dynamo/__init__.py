"""torch.compile's backend of the card; here the graphs run eagerly."""

from torch._dynamo import register_backend
from torch._dynamo.backends.debugging import aot_eager

register_backend(aot_eager, name="hpu_backend")
