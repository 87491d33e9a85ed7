//! What memory of every backend must do: the same checks for main memory and for devices.
//!
//! A check is written once, against [`Platform`] and [`Memory`]. [`OnHost`] and [`OnDevice`] are the two ways to implement these.
//! [`every_backend!`](crate::every_backend) makes a test of each, given a function that starts ranks.

mod device;
mod failing;
mod host;
mod memory;
mod moving;
mod one_sided;
mod platform;
mod reducing;

use std::time::Duration;

use symmem::{Number, ReduceOp, World};
use symmem_chaos::element::{Plain, Source};

pub use device::OnDevice;
pub use failing::*;
pub use host::OnHost;
pub use memory::*;
pub use moving::*;
pub use one_sided::*;
pub use platform::{Call, Memory, Platform, Way};
pub use reducing::*;

/// Longer than anything takes, unless it fails.
const LONG: Duration = Duration::from_secs(30);
/// What is waited for in vain.
const SHORT: Duration = Duration::from_millis(200);

/// Makes a test of each check, with how many ranks it wants.
///
/// `every_backend!(host: run, "process")` and `every_backend!(device: run)`: the function `run` gets the test's name, the number
/// of ranks, and what each rank does, with its world, or with its world, device and stream. The backend's name is what
/// handles report. Attributes of the tests may come last.
#[macro_export]
macro_rules! every_backend {
    ($($how:tt)*) => {
        $crate::checks! {
            { $($how)* }
            any_length_works(2);
            memory_starts_as_zero(2);
            a_handle_tells_sizes_and_addresses(3);
            rendezvous_is_remembered(3);
            interior_addresses_resolve_with_their_offset(2);
            an_id_gives_the_same_memory_again(2);
            mismatches_are_told_to_every_rank(3);
            nothing_is_left_of_what_is_dropped(2);
            reductions_give_the_bits_of_their_definition(3);
            every_way_gives_the_same_bits_around_its_limits(3);
            parts_of_a_pool_are_reduced_where_they_lie(3);
            small_collectives_follow_each_other(3);
            blocks_go_where_they_belong(4);
            a_rank_may_change_its_part_once_its_call_is_over(4);
            puts_and_gets_reach_every_rank(3);
            signals_order_data(3);
            signals_in_vain_are_timeouts(3);
            bad_collective_calls_are_named(2);
            bad_one_sided_calls_are_named(2);
            different_calls_are_told_to_every_rank(3);
            a_rank_that_does_not_come_is_a_timeout_until_a_resync(3);
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! checks {
    ($how:tt $($name:ident($ranks:literal);)*) => {
        $($crate::check! { $how $name $ranks })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! check {
    ({ host: $run:path, $backend:literal } $name:ident $ranks:literal) => {
        #[test]
        fn $name() {
            use $crate::conformance::every_backend::{self as checks, OnHost};
            let check = |world| checks::$name(&OnHost(&world, $backend));
            $run($crate::test_name!(), $ranks, check);
        }
    };
    ({ device: $run:path $(, #[$($attribute:tt)*])? } $name:ident $ranks:literal) => {
        #[test]
        $(#[$($attribute)*])?
        fn $name() {
            use $crate::conformance::every_backend::{self as checks, OnDevice};
            $run($crate::test_name!(), $ranks, |world, gpu, stream| {
                checks::$name(&OnDevice::new(world, gpu, stream));
            });
        }
    };
}

fn next(world: &World) -> usize {
    (world.rank() + 1) % world.size()
}

fn previous(world: &World) -> usize {
    (world.rank() + world.size() - 1) % world.size()
}

/// What each rank has in one call of a check.
fn source(call: usize) -> Source {
    Source { seed: 5, call: call as u64 }
}

/// The reduction of `len` elements of all ranks, by the definition.
fn reduced<T: Plain>(world: &World, source: Source, op: ReduceOp, len: usize) -> Vec<T> {
    let ranks: Vec<usize> = (0..world.size()).collect();
    (0..len).map(|i| source.reduced(&ranks, op, i)).collect()
}

/// The bits are equal.
pub(super) fn same<T: Number>(got: &[T], expected: &[T], what: &str) {
    let (a, b): (&[u8], &[u8]) = (bytemuck::cast_slice(got), bytemuck::cast_slice(expected));
    let at = a.iter().zip(b).position(|(a, b)| a != b);
    assert!(a == b, "{what} of {}: byte {at:?} of {} and {}", T::DTYPE, a.len(), b.len());
}
