"""What a kernel of any program was: evidence in its arguments, who launched it, its name, in this order.

    collective arguments      "Collective name" and its kin, which torch.distributed writes beside its kernels
    process group             its name or ranks alone
    our registry              kernels of this package
    name                      the tables below
    peer copy                 the copy engine from one device to another
    launching operator        for a kernel whose name says nothing

Two kinds of names speak of something else than they do: the compiler's Triton kernels ("triton_poi_fused_...") bear the
names of the operators around them, collectives among them, and CUTLASS writes "RS" for operands in registers.

A kernel that none of these names is unknown, and reported; it is never silently compute.  "reduce" and "gather" alone
are arithmetic: a sum over a row is no communication.  Sources of names: NCCL, RCCL, NVSHMEM, PyTorch's symmetric
memory, DeepEP, vLLM, TensorRT-LLM, FLUX (regressions in facebookresearch/HolisticTraceAnalysis#109, #247, #56).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

COLLECTIVE = ("Collective name",)
GROUP = ("Process Group Name", "Process Group Ranks", "Process Group Description")
REGISTRY = {"_rows": "compute"}  # kernels/softmax_rows.py
SYMMETRIC = re.compile(
    r"symm_?mem|multimem|nvshmem|(?<![a-z])(one|two)_?shot_|signal_pad|(put|wait)_signal|(?<![a-z])barrier_kernel"
    r"|cross_device_reduce|quick_?reduce|userbuffers_",
    re.IGNORECASE,
)
_VERBS = (
    r"(?<![a-z])(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all|a2a|send_?recv)(?![a-z])"  # snake or flat
    r"|(?-i:All[Rr]educe|All[Gg]ather|Reduce[Ss]catter|All[Tt]o[Aa]ll|All2All|A2A|SendRecv)"  # the words of a camel
)
_VERB = re.compile(_VERBS, re.IGNORECASE)
_LIBRARY = re.compile(
    r"^nccl|nccl(dev)?_?kernel|^rccl|rccl_?kernel|^msccl(pp)?|msccl(pp)?::|(deep|hybrid|nixl)_?ep::|(intra|inter)node(_ll)?::"
    r"|^hccl|^oneccl|(?-i:Ep(Dispatch|Combine))",
    re.IGNORECASE,
)
_COMPILED = re.compile(r"^triton_(poi|per|red|tem|mm|bmm|for|flex|spl)_fused")
_ATOM = re.compile(r"(MMA_|SM\d+_)\d+x\d+\w*")  # an instruction of CUTLASS
_PRODUCT = re.compile(r"gemm|matmul|flux", re.IGNORECASE)
_SHORT_VERB = re.compile(r"(?<![a-z])(rs|ag)(?![a-z])", re.IGNORECASE)
_ARITHMETIC = re.compile(
    r"at::native|at_cuda_detail|gemm|gemv|matmul|(?<![a-z])b?mm(?![a-z])|cutlass|cublas|cudnn|nvjet|splitk|split_k"
    r"|(?<![a-z])(ampere|hopper|volta|turing|maxwell)_|(?<![a-z])sm\d\d|^cijk_|ck_tile|xmma|wmma|wgmma"
    r"|flash|fmha|attention|attn|softmax|norm|gelu|silu|relu|swiglu|rotary|rope|embedding|elementwise|vectorized"
    r"|^triton_(poi|per|red|tem|mm|bmm|for|flex|spl|_\d)|cub::|thrust::|dropout|entropy|multi_tensor|adam|topk|top_k"
    r"|conv(olution|\d|_)|winograd|im2col|(?<![a-z])moe|expert|cumsum|scan|sort|transpose|index|scatter|gather"
    r"|dequant|quantize|reduce_kernel|reduce_1block|pool|upsample|philox|distribution|memset|fill_?kernel|copy_?kernel"
    r"|reshape_and_cache|(?<![a-z])dot_kernel",
    re.IGNORECASE,
)
_COMMUNICATES = re.compile(
    r"^(c10d|_c10d_functional|c10d_functional|symm_mem|nccl|gloo|fbgemm::all|deep_ep)\b|record_param_comms|^nccl:"
)
_COMPUTES = re.compile(
    r"^(aten|prims|torch|torchvision|torchao|autograd|flash_attn|_flash_attn|xformers|cudnn|inductor|triton"
    r"|Torch-Compiled Region|CompiledFunction|.*Backward\d*$|fbgemm|vllm|_C)"
)
_AXES = (
    (r"tensor|(?<![a-z])tp(?![a-z])", "tp"),
    (r"pipeline|(?<![a-z])pp(?![a-z])", "pp"),
    (r"context|(?<![a-z])cp(?![a-z])", "cp"),
    (r"expert|(?<![a-z])ep(?![a-z])", "ep"),
    (r"data|(?<![a-z])dp(?![a-z])|fsdp|(?<![a-z])ddp", "dp"),
)


def kind_of(name: str, category: str, args: Mapping[str, Any], operator: str = "", in_optimizer: bool = False) -> str:
    """The kind of event (`interlace.events`) that a device event of a profiler's trace is.

    category: "kernel", "gpu_memcpy" or "gpu_memset".  operator: the name of the operator that launched it, if known.
    """
    if any(key in args for key in (*COLLECTIVE, *GROUP)):
        return "fused" if _is_fused(name) else "comm"
    if "memcpy" in category:
        return "comm" if is_peer_copy(name, args) else "other"
    if "memset" in category:
        return "other"
    kind = _named(name)
    if kind == "unknown" and operator:
        kind = "compute" if _COMPUTES.match(operator) else "comm" if _COMMUNICATES.match(operator) else kind
    return "optimizer" if kind == "compute" and in_optimizer else kind


@lru_cache(maxsize=10_000)
def _named(name: str) -> str:
    """The kind that the registry, or the name itself, says."""
    if name in REGISTRY:
        return REGISTRY[name]
    if _COMPILED.search(name):
        return "compute"
    if _is_fused(name):
        return "fused"
    if _LIBRARY.search(name) or SYMMETRIC.search(name) or _VERB.search(name):
        return "comm"
    return "compute" if _ARITHMETIC.search(name) else "unknown"


@lru_cache(maxsize=10_000)
def _is_fused(name: str) -> bool:
    return bool(_PRODUCT.search(name) and (_VERB.search(name) or _SHORT_VERB.search(_ATOM.sub("", name))))


def is_peer_copy(name: str, args: Mapping[str, Any]) -> bool:
    """A copy by the copy engine from one device to another."""
    return bool(re.search(r"PtoP|P2P|Peer", f"{name} {args.get('kind', '')}"))


def axis_name(description: str) -> str:
    """The axis that a process group's description speaks of ("mesh_dp", "TENSOR_MODEL_PARALLEL_GROUP"), or ""."""
    for pattern, axis in _AXES:
        if re.search(pattern, description, re.IGNORECASE):
            return axis
    return description.removeprefix("mesh_") if description.startswith("mesh_") else ""


@lru_cache(maxsize=10_000)
def short_name(name: str) -> str:
    """Without a C++ name's return type, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name)
    plain = re.sub(r"^void ", "", plain)
    depth = 0
    kept: list[str] = []
    for letter in plain:
        if letter == "(" and depth == 0 and kept:
            break
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            kept.append(letter)
    found = "".join(kept).strip() or plain
    return found if len(found) <= 80 else found[:79] + "…"
