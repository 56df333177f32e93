"""Latent attention (DeepSeek-V2), whose heads share one rotary key, split over two processes; also runs alone.

torchrun --nproc-per-node 2 examples/tensor_latent.py
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interlace
from interlace.launch import join, leave
from interlace.spec import Role

D, HEADS, NOPE, ROPE, VALUE, LATENT = 32, 4, 8, 4, 8, 8
ROLES = {  # SPLIT: every rank sees its own heads, so gradients of whole parameters inside are added up
    "attention": Role.SPLIT,
    "*.q_b": (Role.COLUMN, NOPE + ROPE),
    "*.kv_b": (Role.COLUMN, NOPE + VALUE),
    "*.out": (Role.ROW, VALUE),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm = nn.Linear(D, 16, bias=False), nn.RMSNorm(16)
        self.q_b = nn.Linear(16, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(D, LATENT + ROPE, bias=False), nn.RMSNorm(LATENT)
        self.kv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (-1, NOPE + ROPE)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([LATENT, ROPE], dim=-1)  # `shared`: one rotary key for all heads
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (-1, NOPE + VALUE)).transpose(1, 2)
        key, value = kv.split([NOPE, VALUE], dim=-1)
        key = torch.cat([key, shared[:, None].expand(*key.shape[:3], ROPE)], dim=-1)
        return self.out(F.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2).flatten(2))


def main() -> None:
    world = join(timeout=60)
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(norm=nn.RMSNorm(D), attention=Attention(), end=nn.Linear(D, D)))
    model = interlace.parallelize(net, f"tp={world.size}", ROLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(2, 2, 7, D, generator=torch.Generator().manual_seed(1)).to(world.device)
    for step in range(1, 6):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"step {step}  loss {loss.item():.5f}  norm {norm.item():.5f}")
    leave()


if __name__ == "__main__":
    main()
