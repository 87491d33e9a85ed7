//! What several threads of one rank may do with one group.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::time::Duration;

use symmem::{Deadline, ReduceOp, World};

const ROUNDS: u32 = 300;
const SOON: Deadline = Deadline::within(Duration::from_secs(60));

/// Runs both on each rank, in threads of their own.
fn side_by_side(ranks: usize, one: fn(&World), other: fn(&World)) {
    let both = |world: World| {
        std::thread::scope(|scope| {
            scope.spawn(|| one(&world));
            other(&world);
        });
    };
    for backend in ["process", "host"] {
        World::builder().backend(backend).threads(ranks, both).unwrap();
    }
}

#[test]
fn collectives_signals_and_barriers_on_channels_do_not_disturb_each_other() {
    fn collectives(world: &World) {
        let mut x = world.alloc::<u32>(1000).unwrap().rendezvous(world).unwrap();
        for round in 0..ROUNDS {
            x.local_mut().fill(round + world.rank() as u32);
            x.all_reduce(ReduceOp::Sum).unwrap();
            assert_eq!(x.local()[999], 3 * round + 3);
            world.barrier().unwrap();
        }
    }
    fn channels(world: &World) {
        let (next, last) = ((world.rank() + 1) % 3, (world.rank() + 2) % 3);
        for round in 0..ROUNDS {
            world.put_signal(next, 2, SOON).unwrap();
            world.wait_signal(last, 2, SOON).unwrap();
            if round % 10 == 0 {
                world.barrier_on(1, SOON).unwrap();
            }
        }
    }
    side_by_side(3, collectives, channels);
}

#[test]
fn threads_with_a_group_each_do_not_wait_for_each_other() {
    fn sums(world: &World, name: &str, of: u32) {
        let group = world.subgroup_builder(&[0, 1]).name(name).build().unwrap();
        for round in 0..ROUNDS {
            let mut data = vec![of + round; 5000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|sum| *sum == 2 * (of + round)));
        }
    }
    side_by_side(2, |world| sums(world, "one", 1000), |world| sums(world, "other", 0));
}

/// They come one after the other, so which thread's call pairs with which does not matter.
#[test]
fn equal_collective_calls_of_two_threads_all_pair_up() {
    fn sums(world: &World) {
        for _ in 0..ROUNDS {
            let mut data = [1_u64; 100];
            world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [2; 100]);
        }
    }
    side_by_side(2, sums, sums);
}

#[test]
fn what_users_hold_can_go_to_other_threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<World>();
    is_sync::<World>();
    is_send::<symmem::Group>();
    is_sync::<symmem::Group>();
    is_send::<symmem::Buffer<f32>>();
    is_send::<symmem::Symmetric<f32>>();
    is_send::<symmem::Shared<f32>>();
    is_sync::<symmem::Shared<f32>>();
    is_send::<symmem::Open<f32>>();
    is_sync::<symmem::Open<f32>>();
    is_send::<symmem::Handle>();
    is_sync::<symmem::Handle>();
    is_send::<symmem::Pool>();
    is_sync::<symmem::Pool>();
    is_send::<symmem::Queue>();
    is_sync::<symmem::Queue>();
    is_send::<symmem::Pending<Vec<f32>>>();
    is_sync::<symmem::Pending<Vec<f32>>>();
    is_sync::<symmem::Scope<'_, '_>>();
    is_send::<symmem::Error>();
    is_sync::<symmem::Error>();
    is_send::<symmem::cuda::Gpu>();
    is_sync::<symmem::cuda::Gpu>();
    is_send::<symmem::cuda::Symmetric<f32>>();
    is_send::<symmem::cuda::Stream>();
}
