"""A plain `transformers` Llama with every layer split over two processes, by a table of names.

    torchrun --nproc-per-node 2 examples/tensor_llama.py       (4 processes: tp=2 dp=2)

Also runs alone: python examples/tensor_llama.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import interlace
from interlace.launch import join, leave
from interlace.spec import Role

HEAD = 8
ROLES = {
    "model.embed_tokens": Role.VOCAB,
    "lm_head": Role.VOCAB,  # logits come out whole
    "*.[qkv]_proj": (Role.COLUMN, HEAD),  # whole heads
    "*.o_proj": (Role.ROW, HEAD),
    "*.gate_proj": Role.COLUMN,
    "*.up_proj": Role.COLUMN,
    "*.down_proj": Role.ROW,
}


def main() -> None:
    world = join(timeout=60)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "vocab_size": 65}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD))
    tp = 2 if world.size % 2 == 0 else 1
    model = interlace.parallelize(llama, f"tp={tp} dp={world.size // tp}", ROLES, zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(model.group.rank)  # ranks of one tp group are given the same batch
    tokens = torch.randint(0, 65, (2, 13), generator=generator).to(world.device)
    for step in range(1, 6):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"step {step}  loss {loss.item():.5f}  norm {norm.item():.5f}")
    leave()


if __name__ == "__main__":
    main()
