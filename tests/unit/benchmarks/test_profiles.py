"""Kernel names as vLLM 0.26 and torch 2.11 give them on an H200, and the sums over a trace."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.profiles import Kernel, Watch, busy, comparison, comparison_table, group_of, kernels_in, summary
from benchmarks.rollout_profile import profile_engine

NAMES = {
    "mamba": [
        "_selective_scan_update_kernel", "_causal_conv1d_fwd_kernel", "_causal_conv1d_update_kernel", "_bmm_chunk_fwd_kernel",
        "_chunk_scan_fwd_kernel", "_chunk_cumsum_fwd_kernel", "_chunk_state_fwd_kernel", "_state_passing_fwd_kernel",
    ],
    "experts": [
        "fused_moe_kernel", "void vllm::moe::moe_align_block_size_kernel<int>(...)", "void vllm::moe::topkGating<8, 128, 4, 16>(...)",
    ],
    "gemm": [
        "matmul_kernel_persistent", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "bmm_kernel", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)",
        "void gemmSN_TN_kernel<float>(cublasGemmSmallNParams)", "void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>(...)",
    ],
    "attention": [
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(Params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128>>(pytorch_flash::Flash_bwd)",
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(int)", "kernel_unified_attention_2d", "kernel_unified_attention_3d",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(...)", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(Params)",
    ],
    "norm": [
        "_rms_norm_kernel", "_layer_norm_fwd_1pass_kernel", "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(...)",
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(...)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
    ],
    "activation": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel, true>(...)", "triton_poi_fused_mul_silu_slice_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)>",
    ],
    "rotary": [
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, ...)",
        "triton_poi_fused_add_cat_index_select_mul_split_sub_3",
    ],
    "sampling/logprob": [
        "_log_softmax_kernel", "_topk_log_softmax_kernel", "_ranks_kernel",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*, float const*, int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4>>(...)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, exponential_kernel>(...)",
        "void flashinfer::sampling::TopPSamplingFromProbKernel<1024>(...)",
    ],
    "copies/elementwise": [
        "Memcpy DtoD (Device -> Device)", "Memset (Device)", "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
        "void at::native::indexSelectLargeIndex<c10::BFloat16>(...)", "mean_kernel", "_compute_slot_mapping_kernel",
    ],
    "other": ["a_kernel_nobody_knows"],
}  # fmt: skip


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_a_kernel_is_told_by_its_name(group, name):
    assert group_of(name) == group


def test_a_trace_is_summed_by_group_and_overlapping_streams_are_busy_once(tmp_path):
    events = [
        {"cat": "kernel", "name": "matmul_kernel_persistent", "ts": 0.0, "dur": 600.0},
        {"cat": "kernel", "name": "_rms_norm_kernel", "ts": 500.0, "dur": 300.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1800.0, "dur": 200.0},
        {"cat": "gpu_user_annotation", "name": "a range over kernels", "ts": 0.0, "dur": 2000.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5000.0},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    kernels = kernels_in(tmp_path / "t.json")
    assert busy(kernels) == 1000.0
    watch = Watch("cpu", False)
    watch.seconds, watch.kernels = 0.005, kernels
    found = summary(0.004, watch, steps=2)
    assert found["wall_ms"] == 2.0 and found["busy_ms"] == 0.5 and found["idle_ms"] == 1.5
    assert found["groups_ms"] == {"norm": 0.15, "gemm": 0.3, "copies/elementwise": 0.1} and found["launches"]["gemm"] == 0.5
    assert found["kernels"][0]["name"] == "matmul_kernel_persistent"


def test_the_difference_is_shared_out_over_groups_and_idle():
    theirs = {"wall_ms": 2.0, "idle_ms": 0.5, "groups_ms": {"gemm": 1.5}, "launches": {"gemm": 3}}
    ours = {"wall_ms": 4.0, "idle_ms": 1.0, "groups_ms": {"gemm": 2.0, "norm": 1.0}, "launches": {"gemm": 3, "norm": 9}}
    rows = comparison(ours, theirs)["groups"]
    assert {group: row["share"] for group, row in rows.items()} == {"gemm": 0.25, "norm": 0.5, "idle": 0.25}
    assert comparison_table("t", "ours", "theirs", {"ours": ours, "theirs": theirs}).row_count == 4


def test_busy_counts_a_kernel_inside_another_once():
    assert busy([Kernel("a", 0, 10), Kernel("b", 2, 3), Kernel("c", 20, 1)]) == 11


def test_the_decode_window_opens_after_every_prompt_and_closes_before_any_request_ends():
    class Engine:
        steps, calls = 0, []

        def step(self):
            self.steps += 1

    engine, outputs = Engine(), []

    def generate(prompts, output, seed):
        outputs.append((len(prompts), output))
        engine.steps = 0
        for _ in range(len(prompts) * len(prompts[0]) // 64 + output):
            engine.step()

    found = profile_engine(
        SimpleNamespace(llm_engine=engine), generate, lambda n, length, seed: [(0,) * length] * n,
        concurrency=4, length=128, steps=5, step_tokens=64, seed=0, device="cpu",
    )  # fmt: skip
    prefill_steps = 4 * 128 // 64
    assert found["decode"]["steps"] == 5 and outputs[-1] == (4, prefill_steps + prefill_steps // 8 + 12 + 10 + 16)
    assert "step" not in vars(engine)
