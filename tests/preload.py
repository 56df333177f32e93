"""What the one fork server of all rank tests imports before it forks ranks: torch, poisoned, and the library."""

import poison

poison.install()

import pytest  # noqa: E402, F401 - rank functions expect errors with it
import torch._dynamo  # noqa: E402, F401 - optimizers and checkpointing import it: 1.5 s that ranks then share

# After the poison, which stands even if an import fails.  Half a second of every rank that trains, of which the tests
# start hundreds; nothing here may decorate a kernel, which each test has interpreted or not.
import interlace.launch  # noqa: E402
import interlace.train.loop  # noqa: E402
import interlace.train.verify  # noqa: E402, F401
