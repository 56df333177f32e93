"""Your own module over several processes, weights, gradients and optimizer state split (ZeRO-3).

    torchrun --nproc-per-node 2 examples/own_module.py

Also runs alone: python examples/own_module.py
"""

import torch
from torch import nn

import interlace
from interlace.launch import join, leave


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))  # gathered one by one, one ahead
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    world = join(timeout=60)
    torch.manual_seed(0)
    model = interlace.parallelize(Net(), zero=3)  # rank 0's values are everyone's
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(world.rank)  # each rank has its own part of the batch
    for step in range(1, 41):
        x = torch.randn(64, 32, generator=generator).to(world.device)
        loss = nn.functional.mse_loss(model(x), x[:, :1] - x[:, 1:2])
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    leave()


main()
