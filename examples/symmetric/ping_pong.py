"""Ranks 0 and 1 pass a number to and fro, each adding one: what a signal costs is half a round."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, put_signal, wait_until


@triton.jit
def ping_pong(number, turn, start, rounds, heap):
    me = my_rank(heap)
    other = 1 - me
    if me < 2:
        for step in range(rounds):
            mine = start + 2 * step + 1 + me  # values of the turn that make it mine
            if (me == 1) | (step > 0):
                wait_until(turn, mine - 1, other, heap, "ping_pong")
            tl.store(number, tl.load(number) + 1)
            tl.debug_barrier()
            put_signal(number, number, 1, turn, mine, other, heap, BLOCK=1)
        if me == 0:
            wait_until(turn, start + 2 * rounds, other, heap, "ping_pong")


def launch(heap, rounds=4):
    number, turn = heap.zeros(1, torch.int32, name="number"), heap.signals(1, "turn")
    for call in range(2):
        ping_pong[(1,)](number.local, turn.local, heap.origin + 2 * rounds * call, rounds, heap.context)

    def check():
        assert int(number.local) == (4 * rounds if heap.rank < 2 else 0)

    return check
