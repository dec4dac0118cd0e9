"""The smoke suite: GPU tests that run in minutes and cover all operations, directions, families and dtypes.

``pytest tests/gpu -m smoke`` runs the suite. Functions that run whole are named here; from lists of cases and from
samples a few are taken for each kernel, evenly over the list, so that odd lengths, layouts and masks stay in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import pytest

# Module -> functions that run with all their parameters.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "test_arch_on_device": (
        "test_probing_agrees_with_torch",
        "test_detect_follows_the_current_device",
        "test_the_spec_of_this_gpu_agrees_with_the_device",
        "test_doctor_finds_the_gpu",
    ),
    "test_attention_backward_numerics": ("test_parts_of_a_group",),
    "test_attention_forward_numerics": ("test_an_aligned_kernel_refuses_unaligned_tensors",),
    "test_bundle": (
        "test_the_first_call_from_a_bundle",
        "test_without_a_compiler_and_without_kernels_the_error_says_so",
    ),
    "test_flash_attn_backward": (
        "test_gradients_match_the_reference",
        "test_inputs_of_any_layout",
        "test_repeats_agree_bit_for_bit",
        "test_the_ops_follow_torchs_rules",
        "test_double_backward_matches_the_reference",
    ),
    "test_flash_attn_func": (
        "test_results_match_the_reference",
        "test_transposed_and_unaligned_views_are_read_without_a_copy",
        "test_the_kernel_runs_on_the_current_stream",
        "test_a_warm_call_waits_for_nothing",
        "test_a_warm_call_touches_no_file",
        "test_a_graph_replays_on_new_inputs",
        "test_a_graph_may_hold_a_new_shape_of_a_warm_kernel",
        "test_a_cold_call_under_capture_is_refused_and_leaves_the_capture_alone",
        "test_dispatch_names_the_source_of_a_pick",
    ),
    "test_retention_mistakes": (
        "test_causal_is_not_ignored",
        "test_gradients_need_no_atomics_and_repeat_their_bits",
    ),
    "test_retention_numerics": ("test_a_sequence_may_be_split_anywhere_and_its_state_carried",),
    "test_retention_ops": (
        "test_results_match_the_reference",
        "test_one_token",
        "test_a_state_in_place",
        "test_decoding_by_a_graph",
        "test_a_training_step_by_a_graph",
        "test_gradients",
        "test_gradients_of_narrow_inputs",
        "test_compiled_training_of_any_length",
    ),
    "test_retnet_ops": (
        "test_results_match_the_reference",
        "test_a_decay_equals_its_mask",
        "test_an_odd_number_of_keys",
        "test_gradients",
        "test_gradients_in_bf16",
        "test_gradients_of_a_decay",
        "test_a_training_step_by_a_graph",
        "test_a_graph_of_a_decay",
        "test_compiled_training_of_any_length",
    ),
    "test_stream_order": (
        "test_a_forward_call_waits_for_what_is_ahead",
        "test_a_call_waits_for_another_stream",
        "test_a_call_joins_two_branches_of_a_graph",
        "test_documents_may_come_late",
        "test_lengths_of_packed_sequences_may_come_late",
        "test_a_product_waits_for_what_is_ahead",
        "test_a_backward_call_waits_for_what_is_ahead",
    ),
    "test_toy_kernel": ("test_results_match_the_reference",),
    "test_training_step": (
        "test_a_block_compiles_into_one_graph",
        "test_later_steps_of_a_graph_go_beside_the_dispatcher",
        "test_a_whole_step_is_captured",
        "test_graphed_callables_train",
        "test_a_graph_may_hold_a_new_shape_of_a_warm_backward",
    ),
    "test_tuning_on_device": (
        "test_the_search_builds_checks_times_and_records",
        "test_a_kernel_and_a_peer_race_in_one_run",
        "test_a_second_process_times_the_same_kernels",
    ),
}
# Module -> the function that runs a list of cases, see tests/numerics.
CASES = {
    "test_attention_backward_numerics": "test_shape",
    "test_attention_forward_numerics": "test_shape",
    "test_retention_numerics": "test_shape",
    "test_retnet_numerics": "test_call",
}
CLASSES = {(64, 64), (128, 128)}  # padded head dims of these cases
SLOW_CLASSES = {(256, 512)}  # padded head dims that compile slowly: in fp16 alone
CASES_PER_KERNEL = 4
# Module -> the function that runs samples of a search space.
SAMPLES = {
    "test_attention_backward_candidates": "test_candidate",
    "test_attention_forward_candidates": "test_candidate",
    "test_retention_candidates": "test_candidate",
}
SAMPLES_PER_KIND = 1


def select(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items of the suite, in their order.

    Args:
        items: collected tests of any folder.
    """
    items = list(items)
    chosen = {id(item) for item in items if _function(item) in FUNCTIONS.get(_module(item), ())}
    chosen |= {id(item) for item in _drawn(items, CASES, _kernel_of_case, CASES_PER_KERNEL)}
    chosen |= {id(item) for item in _drawn(items, SAMPLES, _kind_of_sample, SAMPLES_PER_KIND)}
    return [item for item in items if id(item) in chosen]


def _drawn(
    items: Iterable[pytest.Item], functions: dict[str, str], key_of: Any, count: int
) -> list[pytest.Item]:
    """A few items for every key, evenly from the items that share the key; items without a key are left out."""
    sharing: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if functions.get(_module(item)) == _function(item):
            key = key_of(item.callspec.params)  # type: ignore[attr-defined]  # parametrized ones
            if key is not None:
                sharing[_module(item), key].append(item)
    return [
        item
        for alike in sharing.values()
        for item in alike[:: max(1, -(-len(alike) // count))][:count]
    ]


def _kernel_of_case(parameters: dict[str, Any]) -> Hashable:
    """The compile-time parameters of a case's kernel without the form; None where the suite has no such kernel."""
    case = parameters["case"]
    p = case.problem
    classes = CLASSES if p.dtype == "bf16" else CLASSES | SLOW_CLASSES
    if case.policy or (p.padded_dim_qk, p.padded_dim_v) not in classes:
        return None
    return (p.direction, p.mask, p.dtype, p.padded_dim_qk, p.padded_dim_v, p.alignment_bytes)


def _kind_of_sample(parameters: dict[str, Any]) -> Hashable:
    return str(getattr(parameters["sampled"], "kind", "attention"))


def _module(item: pytest.Item) -> str:
    return item.path.stem if item.path.parent.name == "gpu" else ""


def _function(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name
