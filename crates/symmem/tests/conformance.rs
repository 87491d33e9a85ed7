//! The conformance suite over main memory: ranks as threads, as threads over host memory, and as processes.
//!
//! The checks that hold for every backend run for devices in `cuda.rs`, `nccl_memory.rs` and `nvshmem.rs`, and against fakes of
//! the driver and of both libraries in `cuda_fake.rs`, `nccl_memory.rs` and `nvshmem_fake.rs`.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use symmem::{World, WorldBuilder};
use symmem_testing::{Ranks, conformance, has_ucx, test_name};

fn options(backend: &str) -> WorldBuilder {
    let timeout = Duration::from_secs(20);
    World::builder().backend(backend).timeout(timeout)
}

fn threads(_: &str, ranks: usize, check: impl Fn(World) + Sync) {
    options("process").threads(ranks, check).unwrap();
}

fn threads_over_host_memory(_: &str, ranks: usize, check: impl Fn(World) + Sync) {
    options("host").threads(ranks, check).unwrap();
}

fn processes(test: &'static str, ranks: usize, check: impl Fn(World)) {
    Ranks::new(ranks).run(test, check);
}

/// On two hosts: the first half of the ranks on one of them, so that each has ranks on its own and on the other.
fn two_hosts(test: &'static str, ranks: usize, check: impl Fn(World)) {
    on_hosts(test, ranks, "mesh", |rank| usize::from(rank >= ranks.div_ceil(2)), check);
}

/// Likewise, with UCX between the hosts, where there is one.
fn two_hosts_over_ucx(test: &'static str, ranks: usize, check: impl Fn(World)) {
    if has_ucx(test) {
        on_hosts(test, ranks, "ucx", |rank| usize::from(rank >= ranks.div_ceil(2)), check);
    }
}

/// Each rank on a host of its own.
fn a_host_each(test: &'static str, ranks: usize, check: impl Fn(World)) {
    on_hosts(test, ranks, "mesh", |rank| rank, check);
}

/// Each rank on the host of this number.
fn on_hosts(
    test: &'static str,
    ranks: usize,
    wire: &str,
    host: impl Fn(usize) -> usize,
    check: impl Fn(World),
) {
    let ranks = Ranks::new(ranks).env("SYMMEM_WIRE", wire).env("UCX_MEM_EVENTS", "n");
    ranks.start(test, || {
        let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_HOST", format!("host-{}", host(rank))) };
        check(World::from_env().unwrap());
    });
}

mod every_backend {
    mod threads {
        symmem_testing::every_backend!(host: crate::threads, "process");
    }

    mod threads_over_host_memory {
        symmem_testing::every_backend!(host: crate::threads_over_host_memory, "host");
    }

    mod processes {
        symmem_testing::every_backend!(host: crate::processes, "host");
    }

    mod two_hosts {
        symmem_testing::every_backend!(host: crate::two_hosts, "host");
    }

    mod two_hosts_over_ucx {
        symmem_testing::every_backend!(host: crate::two_hosts_over_ucx, "host");
    }

    mod a_host_each {
        symmem_testing::every_backend!(host: crate::a_host_each, "host");
    }
}

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {
        conforms! { @ threads $($name($ranks);)* }
        conforms! { @ threads_over_host_memory $($name($ranks);)* }
        conforms! { @ processes $($name($ranks);)* }
        conforms! { @ two_hosts $($name($ranks);)* }
        conforms! { @ two_hosts_over_ucx $($name($ranks);)* }
    };
    (on one host: $($name:ident($ranks:expr);)*) => {
        mod one_host {
            use super::*;
            conforms! { @ threads $($name($ranks);)* }
            conforms! { @ threads_over_host_memory $($name($ranks);)* }
            conforms! { @ processes $($name($ranks);)* }
        }
    };
    (@ $how:ident $($name:ident($ranks:expr);)*) => {
        mod $how {
            use super::*;
            $(#[test]
            fn $name() {
                crate::$how(test_name!(), $ranks, conformance::$name);
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
    different_calls_are_told_to_every_rank(2);
    an_abandoned_share_does_not_block_the_group(3);
    the_allocations_pad_belongs_to_the_user(3);
    groups_may_overlap_and_come_in_any_order(4);
    groups_do_not_share_signals(3);
    group_names_can_be_used_again(3);
    a_name_with_different_members_is_a_mismatch(3);
    pad_sizes_are_checked_and_agreed(3);
    a_split_groups_by_color_and_orders_by_key(5);
    a_failed_rendezvous_gives_the_buffer_back(2);
    an_id_gets_new_memory_while_a_peer_may_read(2);
    a_pools_buffers_are_symmetric(3);
    senseless_groups_are_refused(2);
    whatever_is_not_zero_is_true(3);
    structs_of_the_users_can_be_moved(3);
    a_collective_that_gave_up_needs_a_resync(3);
    slices_give_the_bits_of_symmetric_memory(3);
    a_slice_may_change_once_its_call_is_over(4);
    slices_of_different_groups_are_kept_apart(3);
    slices_go_to_the_root_and_come_from_it(3);
    scans_reduce_the_ranks_up_to_each(4);
    slices_of_different_lengths_arrive(4);
    lengths_that_do_not_fit_are_told_to_every_rank(3);
    elements_larger_than_a_staging_buffer_arrive_whole(3);
    bad_calls_with_slices_are_named(2);
    rows_go_to_the_ranks_they_are_for(3);
    values_in_the_pad_are_set_and_awaited(3);
    closing_different_memory_is_told_to_every_rank(2);
    elements_are_never_torn(3);
    atomics_of_all_ranks_count(3);
    words_are_filled_and_written_at_peers(3);
    giving_up_leaves_a_copy_of_every_element(3);
    experts_get_their_rows_and_give_them_back(3);
    rows_that_do_not_fit_are_refused_by_every_rank(3);
    messages_of_every_length_arrive(2);
    many_messages_arrive_in_order(2);
    tags_are_kept_apart(3);
    large_messages_cross(3);
    a_rank_that_waits_holds_nobody_up(3);
    messages_of_any_rank_say_who_sent_them(3);
    messages_to_oneself_arrive(2);
    a_message_that_does_not_fit_is_named(3);
    messages_given_up_leave_no_trace(2);
    a_panic_in_a_wait_for_a_message_leaves_no_trace(2);
    a_message_that_stops_half_way_is_not_in_the_way_of_others(3);
    a_wait_for_the_wrong_tag_is_explained(2);
    threads_send_and_receive_at_the_same_time(3);
    threads_share_the_messages_of_a_tag(2);
    groups_have_messages_of_their_own(3);
    ranks_that_are_none_are_no_receivers(2);
}

conforms! {
    on one host:
    signals_order_plain_stores(3);
    views_beyond_a_part_are_refused(2);
    all_parts_come_as_a_list(3);
    memory_lives_as_long_as_anyone_reads_it(3);
    a_handle_keeps_the_memory(2);
    the_pads_layout_is_pytorchs(3);
    waits_on_a_pad_name_their_channel(3);
}

/// The ranks of a world on hosts in several ways: the number of ranks, and the host of each.
mod wherever {
    use super::*;

    macro_rules! placed {
        ($($name:ident: $ranks:expr, $wire:literal, $host:expr;)*) => {$(
            mod $name {
                use super::*;

                fn placed(test: &'static str, check: impl Fn(World)) {
                    if $wire != "ucx" || has_ucx(test) {
                        on_hosts(test, $ranks, $wire, $host, check);
                    }
                }

                #[test]
                fn reductions_give_the_same_bits_wherever_ranks_are() {
                    placed(test_name!(), conformance::reductions_give_the_same_bits_wherever_ranks_are);
                }

                #[test]
                fn nothing_is_written_by_calls_that_differ() {
                    placed(test_name!(), conformance::nothing_is_written_by_calls_that_differ);
                }

                #[test]
                fn data_arrives_wherever_ranks_are() {
                    placed(test_name!(), conformance::data_arrives_wherever_ranks_are);
                }
            }
        )*};
    }

    placed! {
        one_host_of_four: 4, "mesh", |_| 0;
        two_hosts_of_two: 4, "mesh", |rank| rank / 2;
        two_hosts_of_two_over_ucx: 4, "ucx", |rank| rank / 2;
        four_hosts_of_one: 4, "mesh", |rank| rank;
        three_hosts_of_two: 6, "mesh", |rank| rank / 2;
        two_hosts_of_three: 6, "mesh", |rank| rank / 3;
        hosts_in_turn: 4, "mesh", |rank| rank % 2;
        one_more_on_the_second: 5, "mesh", |rank| usize::from(rank >= 2);
        two_hosts_of_one: 2, "mesh", |rank| rank;
    }

    #[test]
    fn every_way_between_hosts_is_taken() {
        conformance::every_way_between_hosts_is_taken();
    }
}
