"""Kernels by their evidence: names that other tools take for compute, and names that only look like communication."""

from __future__ import annotations

import pytest

from interlace.report.kernels import axis_name, kind_of, short_name

COMM = [
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "nccldevkernel_allreduce_sum_f32_tree_ll128",
    "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
    "rcclGenericKernel",
    "void rcclKernel_AllReduce",
    "nvshmemi_transfer_rma<(threadgroup_t)2>",
    "two_shot_all_reduce_kernel<c10::BFloat16>",
    "multimem_one_shot_all_reduce_kernel",
    "multimem_all_gather_kernel",
    "(anonymous namespace)::one_shot_reduce_symm_mem",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void vllm::cross_device_reduce_2stage<half, 4>(vllm::RankData*)",
    "trtllm_allreduce_fusion_kernel_oneshot_lamport",
    "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)",
    "void deep_ep::internode_ll::combine<true, 3>(void*)",
    "all_to_all_single_triton",
    "barrier_kernel(unsigned int**, int, int, int, unsigned long)",
    "put_signal_kernel",
    "myAllGatherPush",
    "mscclpp::allreduce",
    "mscclKernel_Sum_half_Simple",
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16",
    "void ncclSymkDevKernel_AllGather_LLMC",
    "void hybrid_ep::dispatch_kernel<hybrid_ep::Tokens, 8>(int)",
    "void nixl_ep::dispatch<true, 7168>(void*)",
    "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::Args)",
    "mori::moe::EpCombineInterNodeKernel",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8",
    "kuserbuffers_pushrecv",
    "void tensorrt_llm::kernels::moeAlltoAllKernel<4>(int)",
    "moe_a2a_dispatch_kernel",
    "moeA2ACombineKernel",
    "AllreduceLamport",
]
FUSED = [
    "gemm_rs_kernel_persistent",
    "flux::GemmReduceScatter<bf16>",
    "ag_gemm_consumer",
    "all_gather_matmul_kernel",
    "cutlass_gemm_allreduce",
    "void cutlass::gemm_rs<cute::SM90_64x128x16_F32BF16BF16_SS<0, 1>>(int)",
]
COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>(int)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)",
    "at::native::_scatter_gather_elementwise_kernel<128, 4>",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN",
    "ampere_sgemm_128x64_nn",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256",
    "_finalize_matmul_scatter_bf16",
    "triton_red_fused_add_mean_3",
    "flash_fwd_splitkv_kernel",
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>",
    "splitKreduce_kernel<32, 16, int, float>",
    "moe_align_block_size_kernel",
    "_rows",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "triton_red_fused__to_copy_add_all_reduce_mean_mul_pow_rsqrt_wait_tensor_1",
    "triton_tem_fused_mm_reduce_scatter_tensor_0",
    "triton__0d1d2de",
    "void dot_kernel<float, 128, 0, cublasDotParams<float>>(cublasDotParams<float>)",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::SM90_64x128x16_F32BF16BF16_RS<0, 1>>>(int)",
    "void cutlass::device_kernel<cutlass::gemm::Mma<cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<1, 1>>>(int)",
]
UNKNOWN = ["reduce_segments", "magic", "small_reduce", "_sum_bitmatrix_rows", "stagger_kernel", "k"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, names in (("comm", COMM), ("fused", FUSED), ("compute", COMPUTE), ("unknown", UNKNOWN))
        for name in names
    ],
)
def test_names(kind: str, name: str) -> None:
    assert kind_of(name, "kernel", {}) == kind


def test_arguments_come_before_names() -> None:
    assert kind_of("magic", "kernel", {"Collective name": "all_reduce"}) == "comm"
    assert kind_of("sum_of_rows", "kernel", {"Process Group Name": "3"}) == "comm"
    assert kind_of("gemm_rs_kernel", "kernel", {"Process Group Name": "3"}) == "fused"  # both speak
    assert kind_of("at::native::copy", "kernel", {"Process Group Ranks": "[0, 1]"}) == "comm"


def test_copies() -> None:
    assert kind_of("Memcpy PtoP (Device -> Device)", "gpu_memcpy", {}) == "comm"
    assert kind_of("Memcpy (Device -> Device)", "gpu_memcpy", {"kind": "PtoP"}) == "comm"
    assert kind_of("Memcpy DtoD (Device -> Device)", "gpu_memcpy", {}) == "other"
    assert kind_of("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", {}) == "other"
    assert kind_of("Memset (Device)", "gpu_memset", {}) == "other"


def test_the_operator_speaks_for_a_kernel_without_a_name() -> None:
    assert kind_of("magic", "kernel", {}, "aten::frobnicate") == "compute"
    assert kind_of("magic", "kernel", {}, "symm_mem::low_contention_push") == "comm"
    assert kind_of("magic", "kernel", {}, "c10d::thing") == "comm"
    assert kind_of("magic", "kernel", {}, "record_param_comms") == "comm"
    assert kind_of("magic", "kernel", {}, "mine::thing") == "unknown"
    # A product that a fused operator launches on its own is a product.
    assert kind_of("nvjet_tst", "kernel", {}, "symm_mem::fused_all_gather_matmul") == "compute"


def test_work_of_the_optimizer() -> None:
    update = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>(int)"
    assert kind_of(update, "kernel", {}, "aten::_fused_adamw_", in_optimizer=True) == "optimizer"
    assert kind_of("ncclDevKernel_AllGather", "kernel", {}, in_optimizer=True) == "comm"
    assert kind_of("magic", "kernel", {}, in_optimizer=True) == "unknown"


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_dp", "dp"), ("TENSOR_MODEL_PARALLEL_GROUP", "tp"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP", "dp"), ("EXPERT_MODEL_PARALLEL_GROUP", "ep"), ("mesh_tp", "tp"), ("mesh_rows", "rows"),
        ("default_pg", ""), ("undefined", ""), ("", ""), ("mesh_cp", "cp"), ("context_parallel", "cp"),
    ],
)  # fmt: skip
def test_axes(description: str, axis: str) -> None:
    assert axis_name(description) == axis


def test_short_names() -> None:
    assert (
        short_name("void at::native::reduce_kernel<512, 1, ReduceOp<float>>(int, float)") == "at::native::reduce_kernel"
    )
    assert short_name("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == (
        "ncclDevKernel_AllGather_RING_LL"
    )
    assert short_name("(anonymous namespace)::f<(int)2>(x)") == "f"
    assert short_name("gather blocks.1") == "gather blocks.1"
    assert short_name("Memcpy PtoP (Device -> Device)") == "Memcpy PtoP"
    assert len(short_name("x" * 500)) == 80
    assert short_name("<odd>") == "<odd>"
