//! Ranks on one device, and on unlike ones.

use std::sync::Arc;

use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream};
use symmem::{Error, ReduceOp, Result, World};
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{Ranks, test_name};

use super::{configured, on};

/// Tries with all ranks but the last on device 0, and then with each on its own.
fn try_sharing(world: &World, driver: &Arc<Fake>) {
    let rendezvous = |number: usize| {
        let gpu = Gpu::with_driver(driver.clone(), number as u32).unwrap();
        gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).map(drop)
    };
    let (own, last) = (world.rank(), world.size() - 1);
    let e = rendezvous(if own == last { last } else { 0 }).unwrap_err().to_string();
    let expected = "expected a device of its own for each rank, as rank 0 wants, got ranks 0 and 1 \
                    both on GPU-73796d6d-656d-2d66-616b-650000000000";
    assert_eq!(e, format!("rank {own}: rendezvous: {expected}"));
    let own = rendezvous(own);
    own.unwrap();
}

#[test]
fn who_is_strict_shares_no_device() {
    let driver = Fake::plain(3);
    let strict = World::builder().strict_devices(true);
    strict.threads(3, |world| try_sharing(&world, &driver)).unwrap();
    assert_eq!(driver.live(), [""; 0]);
}

#[test]
fn who_is_strict_by_the_environment_shares_no_device() {
    Ranks::new(3).env("SYMMEM_STRICT_DEVICES", "1").run(test_name!(), |world| {
        try_sharing(&world, &Fake::plain(3));
    });
}

fn two_shot(world: &World, gpu: &Gpu, stream: &Stream) {
    let mut x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
    x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
    world.barrier().unwrap();
}

/// Block b of a rank synchronises with block b of every other, and each must be on its device.
#[test]
fn grids_are_alike_on_unlike_devices() {
    let with = |sms, capability| Config { sms, capability, ..Config::default() };
    let alike = [with(8, (9, 0)), with(8, (9, 0))];
    let smaller = [with(8, (9, 0)), with(5, (9, 0))];
    let older = [with(8, (9, 0)), with(8, (8, 0))];
    for (devices, blocks) in [(alike, 8 * 4 / 2), (smaller, 5 / 2), (older, 8 / 2)] {
        let drivers = configured(2, &devices);
        on(&drivers, |rank| rank, |world, _, gpu, stream| two_shot(world, gpu, stream));
        let grids: Vec<_> = drivers.iter().map(|driver| driver.launches()[0].grid).collect();
        assert_eq!(grids, [[blocks, 1, 1]; 2]);
    }
}

/// Which elements a rank reduces depends on the kernel.
#[test]
fn kernels_are_alike_on_devices_with_unlike_caches() {
    for megabytes in [45, 55, 95, 105] {
        let devices = [50, 40].map(|cache| Config { cache: cache << 20, ..Config::default() });
        let drivers = configured(2, &devices);
        on(
            &drivers,
            |rank| rank,
            |world, _, gpu, stream| {
                let bytes = megabytes << 20;
                let mut x = gpu.alloc::<u8>(world, bytes).unwrap().rendezvous(world).unwrap();
                x.all_reduce(ReduceOp::Sum, stream).unwrap();
                world.barrier().unwrap();
            },
        );
        let [a, b] = [0, 1].map(|rank| drivers[rank].launches().pop().unwrap().function);
        assert_eq!((a.as_str(), &a), ("all_reduce_two_shot_alternating", &b), "{megabytes} MiB");
    }
}

#[test]
fn grids_are_alike_where_some_ranks_share_a_device_and_others_have_a_smaller_one() {
    let devices = [Config::default(), Config { sms: 4, ..Config::default() }];
    let drivers = configured(3, &devices);
    on(&drivers, |rank| rank / 2, |world, _, gpu, stream| two_shot(world, gpu, stream));
    let grids: Vec<_> = drivers.iter().map(|driver| driver.launches()[0].grid).collect();
    assert_eq!(grids, [[2, 1, 1]; 3]);
}

/// A rendezvous of all ranks, each on the device that `device` gives for it.
fn try_on(world: &World, driver: &Arc<Fake>, device: impl Fn(usize) -> usize) -> Result<()> {
    let gpu = Gpu::with_driver(driver.clone(), device(world.rank()) as u32).unwrap();
    gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).map(drop)
}

#[test]
fn ranks_that_disagree_whether_a_device_is_new_to_the_group_are_told() {
    let driver = Fake::plain(2);
    World::threads(2, |world| {
        try_on(&world, &driver, |rank| rank).unwrap();
        let e = try_on(&world, &driver, |_| 0).unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
        try_on(&world, &driver, |rank| rank).unwrap();
    })
    .unwrap();
    assert_eq!(driver.live(), [""; 0]);
}

#[test]
fn ranks_that_disagree_where_they_are_are_told() {
    let driver = Fake::plain(3);
    World::threads(3, |world| {
        try_on(&world, &driver, |rank| rank).unwrap();
        try_on(&world, &driver, |rank| (rank + 1) % 3).unwrap();
        let e = try_on(&world, &driver, |rank| if rank == 0 { 0 } else { (rank + 1) % 3 });
        let e = e.unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "placement of ranks", .. }), "{e}");
        try_on(&world, &driver, |rank| rank).unwrap();
        try_on(&world, &driver, |rank| (rank + 1) % 3).unwrap();
    })
    .unwrap();
    assert_eq!(driver.live(), [""; 0]);
}
