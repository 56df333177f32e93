"""Inline PTX of more than one instruction that the primitives use, and what stands for it where there is no GPU.

The interpreter and the checker know these texts as a whole (`interpreter.instructions`).  Both act in the program's
first thread and leave the others alone.
"""

from __future__ import annotations

# $1 a word's address, $2 a number.  A store where an atomic exchange would do: one way over NVLink in place of two.
STORE_RELEASE = """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.b32 [$1], $2;
    mov.u32 $0, 0;
}"""

# $1 a word's address, $2 what it should reach.  At most 64 looks, some 50 us.  It decides nothing and orders nothing.
LINGER = """{
    .reg .pred done;
    .reg .b32 thread, looks, lacks;
    mov.u32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 done, thread, 0;
    @done bra OUT;
    mov.u32 looks, 0;
AGAIN:
    .pragma "nounroll";
    ld.relaxed.sys.global.b32 lacks, [$1];
    sub.s32 lacks, lacks, $2;
    setp.ge.s32 done, lacks, 0;
    @done bra OUT;
    nanosleep.u32 64;
    add.u32 looks, looks, 1;
    setp.lt.u32 done, looks, 64;
    @done bra AGAIN;
OUT:
}"""

MODELS = {STORE_RELEASE: "st.release.sys", LINGER: "linger"}
