//! The conformance suite over every backend: ranks as threads, as threads over host memory, and as processes.

use std::time::Duration;

use symmem::{World, WorldBuilder};
use symmem_testing::{Ranks, conformance, test_name};

fn options(backend: &str) -> WorldBuilder {
    let timeout = Duration::from_secs(20);
    World::builder().backend(backend).timeout(timeout)
}

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {
        mod threads {
            use super::*;
            $(#[test]
            fn $name() {
                options("process").threads($ranks, conformance::$name).unwrap();
            })*
        }

        mod threads_over_host_memory {
            use super::*;
            $(#[test]
            fn $name() {
                options("host").threads($ranks, conformance::$name).unwrap();
            })*
        }

        mod processes {
            use super::*;
            $(#[test]
            fn $name() {
                Ranks::new($ranks).run(test_name!(), conformance::$name);
            })*
        }
    };
}

conforms! {
    phases_show_every_rank_what_every_rank_wrote(4);
    signals_order_data(3);
    signals_reach_oneself_on_every_channel(2);
    a_full_slot_holds_the_sender_back(3);
    bad_ranks_and_channels_are_named(2);
    a_barrier_that_timed_out_is_resumed(3);
    mismatches_are_told_to_every_rank(3);
    different_calls_are_told_to_every_rank(2);
    an_abandoned_share_does_not_block_the_group(3);
    any_length_works(2);
    memory_starts_as_zero(2);
    a_handle_tells_sizes_and_addresses(3);
    rendezvous_is_remembered(3);
    interior_addresses_resolve_with_their_offset(2);
    the_allocations_pad_belongs_to_the_user(3);
    the_pads_layout_is_pytorchs(3);
    groups_may_overlap_and_come_in_any_order(4);
    groups_do_not_share_signals(3);
    group_names_can_be_used_again(3);
    a_name_with_different_members_is_a_mismatch(3);
    pad_sizes_are_checked_and_agreed(3);
    a_split_groups_by_color_and_orders_by_key(5);
    an_id_gives_the_same_memory_again(2);
    a_pools_buffers_are_symmetric(3);
    all_parts_come_as_a_list(3);
    memory_lives_as_long_as_anyone_reads_it(3);
    a_handle_keeps_the_memory(2);
    nothing_is_left_of_what_is_dropped(2);
    senseless_groups_are_refused(2);
    reductions_give_the_bits_of_their_definition(3);
    whatever_is_not_zero_is_true(3);
    structs_of_the_users_can_be_moved(3);
    operators_that_do_not_apply_are_refused(2);
    every_way_gives_the_same_bits_around_its_limits(3);
    small_collectives_follow_each_other(3);
    a_collective_that_gave_up_needs_a_resync(3);
    blocks_go_where_they_belong(4);
    parts_of_a_pool_are_reduced_where_they_lie(3);
    a_gather_pulls_what_all_had_at_the_call(4);
    a_scattered_reduction_pulls_what_all_had_at_the_call(4);
    bad_collective_calls_are_named(2);
    different_collective_calls_are_told_to_every_rank(3);
    slices_give_the_bits_of_symmetric_memory(3);
    slices_of_different_groups_are_kept_apart(3);
    slices_go_to_the_root_and_come_from_it(3);
    scans_reduce_the_ranks_up_to_each(4);
    slices_of_different_lengths_arrive(4);
    lengths_that_do_not_fit_are_told_to_every_rank(3);
    elements_larger_than_a_staging_buffer_arrive_whole(3);
    bad_calls_with_slices_are_named(2);
    rows_go_to_the_ranks_they_are_for(3);
    puts_and_gets_reach_every_rank(3);
    a_put_with_a_signal_shows_its_data(3);
    values_in_the_pad_are_set_and_awaited(3);
    elements_are_never_torn(3);
    atomics_of_all_ranks_count(3);
    words_are_filled_and_written_at_peers(3);
    bad_one_sided_calls_are_named(2);
    giving_up_leaves_a_copy_of_every_element(3);
    experts_get_their_rows_and_give_them_back(3);
    rows_that_do_not_fit_are_refused_by_every_rank(3);
}
