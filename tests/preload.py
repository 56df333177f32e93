"""What the one fork server of all rank tests imports before it forks ranks: torch, poisoned, and the library."""

import poison

poison.install()

import torch._dynamo  # noqa: E402, F401 - optimizers and checkpointing import it: 1.5 s that ranks then share

import interlace.launch  # noqa: E402, F401 - after the poison, which stands even if this import fails
