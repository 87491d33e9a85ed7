//! Space on a device for all kernels that wait for each other: how large grids are, and what may come early.

use std::sync::Arc;

use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream, Symmetric};
use symmem::store::{MemoryStore, SharedStore};
use symmem::{ReduceOp, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::Fake;
use symmem_testing::{Ranks, test_name};

use super::{drivers, on};

/// Blocks of 512 threads that the fake's devices hold at once.
const FIT: u32 = 8 * 4;

fn two_shot(x: &mut Symmetric<f32>, stream: &Stream) {
    x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
}

/// Blocks of the last launch of each rank.
fn last_grids(drivers: &[Arc<Fake>]) -> Vec<u32> {
    drivers.iter().map(|driver| driver.launches().pop().unwrap().grid[0]).collect()
}

/// Ranks of one parity each have a group.
fn in_two_groups(world: &World, gpu: &Gpu, stream: &Stream) {
    let all = 0..world.size();
    let half: Vec<usize> = all.filter(|rank| rank % 2 == world.rank() % 2).collect();
    let group = world.subgroup(&half).unwrap();
    let mut x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(&group).unwrap();
    two_shot(&mut x, stream);
    world.barrier().unwrap();
}

#[test]
fn who_has_a_device_alone_leaves_half_of_it() {
    let drivers = drivers(2);
    on(
        &drivers,
        |rank| rank,
        |world, _, gpu, stream| {
            let mut x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
            two_shot(&mut x, stream);
            world.barrier().unwrap();
        },
    );
    assert_eq!(last_grids(&drivers), [FIT / 2; 2]);
}

/// Nothing is known of where those are that are not in the group.
#[test]
fn groups_on_a_device_leave_room_for_others() {
    let drivers = drivers(4);
    on(&drivers, |_| 0, |world, _, gpu, stream| in_two_groups(world, gpu, stream));
    assert_eq!(last_grids(&drivers), [FIT / 4; 4]);
    let drivers = self::drivers(4);
    on(&drivers, |rank| rank, |world, _, gpu, stream| in_two_groups(world, gpu, stream));
    assert_eq!(last_grids(&drivers), [FIT / 2; 4]);
}

/// The largest number counts, so that grids are alike.
#[test]
fn a_world_can_be_told_how_many_use_a_device() {
    for (told, device, expected) in [
        ([Some(2), None, None, None], 0, [FIT / 2, FIT / 4, FIT / 2, FIT / 4]),
        ([Some(4); 4], 1, [FIT / 4; 4]),
        ([Some(1); 4], 0, [FIT; 4]),
    ] {
        let drivers = drivers(4);
        let store: SharedStore = Arc::new(MemoryStore::new());
        std::thread::scope(|scope| {
            for (rank, ranks_per_device) in told.into_iter().enumerate() {
                let (store, driver) = (store.clone(), drivers[rank].clone());
                scope.spawn(move || {
                    let mut options = World::builder();
                    if let Some(ranks) = ranks_per_device {
                        options = options.ranks_per_device(ranks);
                    }
                    let world = options.join(rank, 4, store).unwrap();
                    let gpu = Gpu::with_driver(driver, (device * rank) as u32).unwrap();
                    in_two_groups(&world, &gpu, &gpu.stream().unwrap());
                });
            }
        });
        assert_eq!(last_grids(&drivers), expected, "{told:?}");
    }
}

#[test]
fn numbers_of_ranks_on_a_device_that_cannot_be_are_no_matter() {
    for (told, blocks) in [(usize::MAX, 1), (FIT as usize + 1, 1), (FIT as usize, 1), (3, FIT / 3)]
    {
        let (driver, store) = (Fake::plain(1), Arc::new(MemoryStore::new()));
        let options = World::builder().ranks_per_device(told);
        let world = options.join(0, 1, store).unwrap();
        let gpu = Gpu::with_driver(driver.clone(), 0).unwrap();
        let mut x = gpu.alloc::<f32>(&world, 1 << 20).unwrap().rendezvous(&world).unwrap();
        (0..2).for_each(|_| two_shot(&mut x, &gpu.stream().unwrap()));
        assert_eq!(driver.launches()[1].grid, [blocks, 1, 1], "{told}");
    }
    let options = World::builder().ranks_per_device(0);
    let e = options.join(0, 1, Arc::new(MemoryStore::new())).unwrap_err();
    let expected = "world: expected a number of ranks per device of at least 1, got 0";
    assert_eq!(e.to_string(), expected);
}

/// Whether each launch of rank 0 came early, of ranks that share a device.
fn early(calls: impl Fn(&World, &Gpu, &Stream) + Sync) -> Vec<bool> {
    let drivers = drivers(2);
    on(
        &drivers,
        |_| 0,
        |world, _, gpu, stream| {
            calls(world, gpu, stream);
            world.barrier().unwrap();
        },
    );
    drivers[0].launches().iter().map(|launched| launched.programmatic).collect()
}

#[test]
fn what_comes_early_leaves_room_for_what_others_have_before_it() {
    let seen = early(|world, gpu, stream| {
        let mut large = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
        let mut small = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        small.barrier(stream).unwrap(); // nothing is known of what was before
        small.barrier(stream).unwrap();
        small.all_reduce(ReduceOp::Sum, stream).unwrap();
        small.put_signal(world.rank(), 0, stream).unwrap();
        two_shot(&mut large, stream); // more than half of the device
        small.barrier(stream).unwrap(); // behind it
        small.barrier(stream).unwrap();
    });
    assert_eq!(seen, [false, true, true, true, false, false, true]);
}

/// What was before it is still there.
#[test]
fn a_launch_that_fails_leaves_nothing_known() {
    let drivers = drivers(1);
    on(
        &drivers,
        |_| 0,
        |world, driver, gpu, stream| {
            let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
            let early = || driver.launches().last().unwrap().programmatic;
            x.barrier(stream).unwrap();
            x.barrier(stream).unwrap();
            assert!(early());
            driver.fail("cuLaunchKernelEx", 1, code::UNKNOWN);
            x.barrier(stream).unwrap_err();
            x.barrier(stream).unwrap();
            assert!(!early());
        },
    );
}

/// Groups share streams.
#[test]
fn what_another_group_has_before_it_counts() {
    let seen = early(|world, gpu, stream| {
        let other = world.subgroup_builder(&[0, 1]).build().unwrap();
        let mut large = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
        let small = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&other).unwrap();
        small.barrier(stream).unwrap();
        two_shot(&mut large, stream);
        small.barrier(stream).unwrap();
        small.barrier(stream).unwrap();
    });
    assert_eq!(seen, [false, false, false, true]);
}

/// What is noted in a capture is not before what runs.
#[test]
fn a_capture_and_its_stream_are_two_places() {
    let seen = early(|world, gpu, stream| {
        let mut large = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
        let small = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        two_shot(&mut large, stream);
        let noted = stream.capture(|| small.barrier(stream).and_then(|()| small.barrier(stream)));
        small.barrier(stream).unwrap(); // behind the large one
        // SAFETY: the memory is there, and the fake kernels wait for nobody.
        unsafe { noted.unwrap().launch(stream) }.unwrap();
    });
    assert_eq!(seen, [false, false, false, true]);
}

/// Of a job of which the world is a part only, the launcher says how many ranks there are.
#[test]
fn a_world_leaves_room_for_its_whole_job() {
    Ranks::new(2).env("LOCAL_WORLD_SIZE", 8).run(test_name!(), |world| {
        let driver = Fake::plain(1);
        let gpu = Gpu::with_driver(driver.clone(), 0).unwrap();
        let mut x = gpu.alloc::<f32>(&world, 1 << 20).unwrap().rendezvous(&world).unwrap();
        two_shot(&mut x, &gpu.stream().unwrap());
        assert_eq!(driver.launches()[0].grid, [FIT / 8, 1, 1]);
        world.barrier().unwrap();
    });
}
