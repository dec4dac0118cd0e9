"""The cost model's fitted constants: one table, with the bounds of a fit and where each value came from.

Everything else in the model is arithmetic on the candidate, the problem and the spec, and facts of the kernels, which
stand beside each. :mod:`.calibration` fits the constants to measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def fitted(value: float, low: float, high: float) -> Any:
    """A constant with the bounds between which a fit may move it."""
    return field(default=value, metadata={"bounds": (low, high)})


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Fitted constants, the same for every GPU; clocks are those of an SM. The defaults are the fitted values.

    Those without a prefix were fitted by :func:`.calibration.calibrate` to tests/data/recorded_searches.csv (A100 and
    RTX 4090, another kernel of the same instructions) and to nine rates of these kernels on an H200
    (docs/kernel_log.md), then rounded. Neither has candidates with qk_ahead or persistent CTAs: these follow what the
    kernel log says of them, behind at every head dim and 3-9 % behind. The prefixes:

    - ``score_``: counted from the instructions of the score modifications, beside those of a softmax.
    - ``wgmma_``: fitted to the times of ``scores_backward_sm90`` in the searches and records on an H200
      (benchmarks/results/nvidia-h200).
    - ``attention_sm90_``: fitted to 600 times of 78 problems on an H200, attention's and retnet's with a mask, prompts
      and decoding (benchmarks/results/nvidia-h200/records.jsonl.xz), which they met within 10 % (root mean square)
      under that GPU's measured spec; times of later kernels in that file are within 17 %. What combining splits takes
      was fitted to the races of benchmarks/results/nvidia-h200/forward_splits.json.xz.
    - ``gradient_sm90_``: fitted to 660 times of 53 problems in the same file, which they meet within 8 %.
    - ``chunk_``: retention's passes over chunks of family ``sm80``: fitted to 15 times of forward passes of head dims
      64 to 512 on an H200, which they give within 9 %; ``chunk_gradient_clk`` to 5 times of gradients.
    - ``chunk_sm90_``: fitted with SciPy to the times of family ``sm90`` in races of 124 shapes of both directions on an
      H200 (dims 64 to 256/512, benchmarks/results/nvidia-h200/retention_*_defaults.json.xz), which they meet within
      10 % (root mean square), and to 16 earlier ones of long forward passes. ``states_share`` and the bandwidths, which
      the races hardly tell, were set.
    - ``recurrent_``: retention's recurrent form: counted from its loop, and set to times on an H200.

    Attributes:
        tensor_efficiency: share of the spec's mma rate that a dense stream of mma.sync reaches.
        smem_efficiency: share of the spec's shared-memory rate that ldmatrix and cp.async reach.
        unit_sharpness: exponent p of (a^p + b^p)^(1/p), the time of two units that feed each other (tensor and shared
            memory; exp and ALU): large when the lesser vanishes behind the greater, 1 when they alternate.
        warp_overlap_power: how fast the part that one warp cannot overlap vanishes as warps per scheduler grow.
        ahead_exposure: factor of the softmax where the next Q K^T is issued before it: below 1 where the overlap gains,
            above where a second score tile's registers cost more.
        scores_alu_instructions: fp32 instructions per score: scale, maximum, sum, conversion.
        warp_tile_instructions: address and control instructions of one warp per K/V tile.
        row_tile_instructions: of one warp per K/V tile and 16 rows: row maxima over lanes, the vote, the new scale.
        barrier_clk: a CTA-wide barrier with the skew of the warps that it waits for, clocks.
        load_latency_clk: from a cp.async to its data, out of L2, clocks.
        stream_latency_clk: more where keys stream past few queries, out of device memory; published latencies.
        cta_clk: start and end of a CTA beyond its loads and stores, clocks.
        persistent_start_share: share of ``cta_clk`` that a tile of a persistent CTA takes, which no launch precedes.
        persistent_loss: share of a CTA tile's time that looping over tiles costs beside their static imbalance.
        memory_overlap_loss: share of the lesser of compute and memory time that adds to the greater.
        kv_cache_share: share of the L2 that concurrent heads' K and V can hold.
        spill_clk_per_byte: clocks of one SM per spilled byte, thread and step, over 4096; of every kernel.
        spill_share_outside_loops: share of a spill's bytes that count where they move once a CTA, not once a step.
        attention_sm90_mask_score_clk: clocks for each score with a mask.
        attention_sm90_mask_clk: of a step with a tile of a mask; twice that with one stage for it.
        score_masked_alu_share: fp32 work for a score with an explicit mask, over that of a softmax: the product with
            the mask, the sum of magnitudes, the conversion.
        score_decayed_alu_share: the same with a decay, which is a product of two powers beside that.
        score_decayed_exponentials: ex2 results for a score with a decay: powers are taken for rows and columns, and for
            each score of small gammas only.
        wgmma_efficiency: share of the spec's wgmma rate that the MMAs of a step reach.
        wgmma_score_clk: clocks for each score: its softmax or modification, on a scheduler that also issues MMAs.
        wgmma_step_clk: clocks of a step: barriers and the start of its MMAs.
        wgmma_tile_clk: clocks of a tile's first loads and output, where CTAs stay for further tiles, whose loads run
            ahead.
        wgmma_overlap_loss: as ``memory_overlap_loss``.
        attention_sm90_rate: share of the spec's clock that a GPU keeps under a dense stream of wgmma.
        attention_sm90_softmax_share: clocks of a softmax over those of its exponentials alone.
        attention_sm90_exact_share: clocks of a softmax that takes its maximum first, over those without.
        attention_sm90_overlap_share: clocks of a softmax in other main loops, over those in ``serial`` and
            ``scores_first``.
        attention_sm90_sharpness: as ``unit_sharpness``, of the MMAs and the softmax of several warpgroups.
        attention_sm90_step_clk: clocks of a step beside these.
        attention_sm90_output_clk: clocks that a tile of rows takes to leave, for 128 columns of O.
        attention_sm90_direct_share: the same from registers, over that.
        attention_sm90_start_clk: clocks until the first scores where Q does not arrive early.
        attention_sm90_counter_us: microseconds of clearing the counter of claimed tiles.
        attention_sm90_combine_us: microseconds of combining the results of splits, beside their bytes.
        attention_sm90_split_us: more for each split.
        attention_sm90_overlap_loss: as ``memory_overlap_loss``.
        gradient_sm90_score_clk: clocks of an SM that the softmax of a score adds to its MMAs where nothing hides it.
        gradient_sm90_step_clk: of barriers and latencies of a step.
        gradient_sm90_load_clk: of a tile whose load begins only when it is the next to be needed.
        gradient_sm90_share_clk: of a step that adds to dQ.
        gradient_sm90_semaphore_clk: more of a step that adds to dQ in the order of keys.
        gradient_sm90_causal_wait: time of such a step over that where it is not causal.
        gradient_sm90_sum_bytes_per_clk: of additions to global memory, by an SM where all add.
        gradient_sm90_tile_clk: of a CTA beside its steps.
        gradient_sm90_next_share: share of that where CTAs stay for further blocks.
        gradient_sm90_stored_us: microseconds that CTAs wait where sums of dQ are stored before they are added to.
        gradient_sm90_bandwidth: share of the memory's peak that the kernels before and after the passes reach.
        gradient_sm90_overlap_loss: as ``memory_overlap_loss``.
        chunk_clk: clocks of a warp that is alone on its scheduler, for a chunk, whatever it holds.
        chunk_mma_clk: more for each MMA of a warp (m16n8k16).
        chunk_read_clk: more for each fragment read from shared memory.
        chunk_output_clk: more for each element of the output that a thread holds.
        chunk_score_clk: more for each score that a thread holds.
        chunk_missing_register_clk: more for each register that a thread lacks.
        chunk_other_registers: registers of a thread beside the state, the output and the scores.
        chunk_instruction_clk: more for each other instruction: narrow copies.
        chunk_gradient_clk: more for each pair of 16-token tiles of a chunk, where the pass gives a gradient.
        chunk_late_clk_1_stage: clocks by which a chunk arrives late whose copies start once the last one is done with.
        chunk_late_clk_2_stages: the same where they start within the last one's MMAs.
        chunk_second_warp: share of a warp's clocks that each further one on its scheduler adds.
        chunk_alu_share: fp32 work for a decayed score of a chunk, over that of a softmax.
        chunk_scores_efficiency: share of the mma rate that the kernel reaches which computes only scores.
        chunk_auxiliary_bandwidth: share of the memory's peak that kernels between the passes reach; of both families.
        chunk_sm90_clk: clocks of a chunk of a warpgroup that has an SM for itself.
        chunk_sm90_depth_clk: more for each column of Q and K.
        chunk_sm90_deep_clk: more for each beyond 128 in the forward pass, whose loads are late.
        chunk_sm90_gradient_clk: more where the pass gives a gradient.
        chunk_sm90_next_group: share of these that each further warpgroup with a state adds.
        chunk_sm90_next_cta: share of these that each further CTA on the SM adds.
        chunk_sm90_crowded: time of a chunk over that where registers are enough for two CTAs of the forward pass.
        chunk_sm90_states_share: share of these that a chunk takes of which only the state is needed.
        chunk_sm90_start_clk: clocks for each column of Q and K until a pass that gives a gradient is at work.
        chunk_sm90_sum_bytes_per_clk: of states that a CTA of the forward pass sums before it begins.
        chunk_sm90_scan_clk: clocks of a scan of states for each that it passes.
        chunk_sm90_uneven_share: share of a further CTA's time that CTAs add which take their places early.
        chunk_sm90_launch_share: share of the spec's time of a launch that one takes, or several side by side.
        chunk_sm90_bandwidth_2_stages: share of the memory's peak that two stages reach.
        chunk_sm90_bandwidth: the same of three and four.
        chunk_sm90_overlap_loss: as ``memory_overlap_loss``.
        recurrent_element_instructions: fp32 instructions for an element of the state: decayed, added to, summed up.
        recurrent_token_clk: clocks of a token beside these: q, k, v from shared memory, the sum over warps, a barrier.
        recurrent_bandwidth: share of the memory's peak that states reach which are read and written once.
        recurrent_bytes_to_fill: bytes of states in flight on an SM that keep its share of the memory busy.
    """

    tensor_efficiency: float = fitted(1.0, 0.8, 1.0)
    smem_efficiency: float = fitted(0.99, 0.7, 1.0)
    unit_sharpness: float = fitted(2.5, 1.2, 6.0)
    warp_overlap_power: float = fitted(1.27, 0.1, 3.0)
    ahead_exposure: float = fitted(1.2, 0.2, 1.6)
    scores_alu_instructions: float = fitted(7.0, 3.5, 7.0)
    warp_tile_instructions: float = fitted(80.0, 40.0, 300.0)
    row_tile_instructions: float = fitted(40.0, 10.0, 160.0)
    barrier_clk: float = fitted(195.0, 20.0, 300.0)
    load_latency_clk: float = fitted(400.0, 400.0, 1000.0)
    stream_latency_clk: float = fitted(300.0, 0.0, 800.0)
    cta_clk: float = fitted(800.0, 500.0, 5000.0)
    persistent_start_share: float = fitted(0.5, 0.0, 1.0)
    persistent_loss: float = fitted(0.03, 0.0, 0.1)
    memory_overlap_loss: float = fitted(0.17, 0.05, 0.4)
    kv_cache_share: float = fitted(0.6, 0.2, 1.0)
    spill_clk_per_byte: float = fitted(1.0, 0.25, 4.0)
    spill_share_outside_loops: float = fitted(0.05, 0.0, 0.5)

    attention_sm90_mask_score_clk: float = fitted(0.05, 0.01, 0.2)
    attention_sm90_mask_clk: float = fitted(500.0, 0.0, 1500.0)
    score_masked_alu_share: float = fitted(0.7, 0.3, 1.5)
    score_decayed_alu_share: float = fitted(0.9, 0.3, 2.0)
    score_decayed_exponentials: float = fitted(0.1, 0.0, 1.0)

    wgmma_efficiency: float = fitted(0.82, 0.7, 1.0)
    wgmma_score_clk: float = fitted(0.0167, 0.01, 0.1)
    wgmma_step_clk: float = fitted(432.0, 50.0, 600.0)
    wgmma_tile_clk: float = fitted(1094.0, 500.0, 8000.0)
    wgmma_overlap_loss: float = fitted(0.0, 0.0, 0.4)

    attention_sm90_rate: float = fitted(0.92, 0.5, 1.0)
    attention_sm90_softmax_share: float = fitted(1.13, 1.0, 2.0)
    attention_sm90_exact_share: float = fitted(1.05, 1.0, 2.5)
    attention_sm90_overlap_share: float = fitted(1.43, 1.0, 2.0)
    attention_sm90_sharpness: float = fitted(3.2, 1.5, 12.0)
    attention_sm90_step_clk: float = fitted(60.0, 0.0, 400.0)
    attention_sm90_output_clk: float = fitted(910.0, 200.0, 4000.0)
    attention_sm90_direct_share: float = fitted(1.45, 0.8, 4.0)
    attention_sm90_start_clk: float = fitted(1940.0, 0.0, 5000.0)
    attention_sm90_counter_us: float = fitted(3.3, 0.0, 6.0)
    attention_sm90_combine_us: float = fitted(1.1, 0.0, 6.0)
    attention_sm90_split_us: float = fitted(0.028, 0.0, 0.2)
    attention_sm90_overlap_loss: float = fitted(0.05, 0.0, 0.4)

    gradient_sm90_score_clk: float = fitted(0.005, 0.0, 0.2)
    gradient_sm90_step_clk: float = fitted(280.0, 0.0, 1500.0)
    gradient_sm90_load_clk: float = fitted(760.0, 0.0, 2000.0)
    gradient_sm90_share_clk: float = fitted(185.0, 0.0, 2000.0)
    gradient_sm90_semaphore_clk: float = fitted(2960.0, 0.0, 5000.0)
    gradient_sm90_causal_wait: float = fitted(1.57, 1.0, 3.0)
    gradient_sm90_sum_bytes_per_clk: float = fitted(9.0, 4.0, 20.0)
    gradient_sm90_tile_clk: float = fitted(7150.0, 500.0, 30000.0)
    gradient_sm90_next_share: float = fitted(0.64, 0.0, 1.0)
    gradient_sm90_stored_us: float = fitted(4.0, 0.0, 10.0)
    gradient_sm90_bandwidth: float = fitted(0.79, 0.2, 1.0)
    gradient_sm90_overlap_loss: float = fitted(0.46, 0.0, 0.8)

    chunk_clk: float = fitted(560.0, 100.0, 2000.0)
    chunk_mma_clk: float = fitted(2.0, 0.5, 8.0)
    chunk_read_clk: float = fitted(20.0, 4.0, 60.0)
    chunk_output_clk: float = fitted(33.0, 5.0, 100.0)
    chunk_score_clk: float = fitted(27.0, 5.0, 100.0)
    chunk_missing_register_clk: float = fitted(36.0, 5.0, 150.0)
    chunk_other_registers: float = fitted(50.0, 20.0, 100.0)
    chunk_instruction_clk: float = fitted(2.5, 0.5, 10.0)
    chunk_gradient_clk: float = fitted(60.0, 0.0, 250.0)
    chunk_late_clk_1_stage: float = fitted(800.0, 200.0, 2000.0)
    chunk_late_clk_2_stages: float = fitted(140.0, 0.0, 800.0)
    chunk_second_warp: float = fitted(0.7, 0.1, 1.0)
    chunk_alu_share: float = fitted(0.5, 0.2, 1.5)
    chunk_scores_efficiency: float = fitted(0.5, 0.1, 1.0)
    chunk_auxiliary_bandwidth: float = fitted(0.7, 0.3, 1.0)

    chunk_sm90_clk: float = fitted(1207.0, 300.0, 4000.0)
    chunk_sm90_depth_clk: float = fitted(6.7, 2.0, 25.0)
    chunk_sm90_deep_clk: float = fitted(2.7, 0.0, 20.0)
    chunk_sm90_gradient_clk: float = fitted(178.0, 0.0, 1500.0)
    chunk_sm90_next_group: float = fitted(0.28, 0.0, 1.0)
    chunk_sm90_next_cta: float = fitted(0.46, 0.0, 1.0)
    chunk_sm90_crowded: float = fitted(2.9, 1.0, 4.0)
    chunk_sm90_states_share: float = fitted(0.2, 0.1, 1.0)
    chunk_sm90_start_clk: float = fitted(27.0, 0.0, 150.0)
    chunk_sm90_sum_bytes_per_clk: float = fitted(145.0, 8.0, 400.0)
    chunk_sm90_scan_clk: float = fitted(84.0, 0.0, 2000.0)
    chunk_sm90_uneven_share: float = fitted(0.28, 0.0, 1.0)
    chunk_sm90_launch_share: float = fitted(0.555, 0.2, 1.2)
    chunk_sm90_bandwidth_2_stages: float = fitted(0.94, 0.4, 1.0)
    chunk_sm90_bandwidth: float = fitted(0.99, 0.4, 1.0)
    chunk_sm90_overlap_loss: float = fitted(0.19, 0.0, 0.4)

    recurrent_element_instructions: float = fitted(3.0, 2.0, 8.0)
    recurrent_token_clk: float = fitted(500.0, 100.0, 2000.0)
    recurrent_bandwidth: float = fitted(0.9, 0.5, 1.0)
    recurrent_bytes_to_fill: float = fitted(49152.0, 8192.0, 131072.0)


FITTED = Coefficients()

# What a fit may move, and between which bounds. A constant without influence on the data at hand stays as it is.
BOUNDS: dict[str, tuple[float, float]] = {
    constant.name: constant.metadata["bounds"] for constant in fields(Coefficients)
}
