//! Reductions and stores by the switch: which kernel, with which parameters, who asks for it, and what is refused.

use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream, Symmetric, View, ViewMut};
use symmem::{Error, Group, Number, Order, ReduceOp, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fake, Launched};

use super::multicast::{able, logged};
use super::{GROUP, configured, declared, load, ranks};

const SUM: ReduceOp = ReduceOp::Sum;

fn able_drivers(n: usize) -> Vec<Arc<Fake>> {
    configured(n, &vec![able(); n])
}

/// What a launch got, with the parameters as numbers; structures are 0.
type Seen = Arc<Mutex<Vec<(String, Vec<u64>)>>>;

/// Has launches of these kernels noted, with parameters as their PTX has them.
fn watch(driver: &Fake, kernels: &[&str]) -> Seen {
    let seen = Seen::default();
    for kernel in kernels {
        let (seen, sizes) = (seen.clone(), declared("multimem_f32", kernel));
        assert_eq!(sizes[0], GROUP, "{kernel}");
        driver.kernel(kernel, &sizes, move |launched: &Launched| {
            let number = |i| launched.u64(i).or(launched.u32(i).map(u64::from)).unwrap_or(0);
            let numbers = (2..launched.count).map(number).collect();
            seen.lock().unwrap().push((launched.function.clone(), numbers));
        });
    }
    seen
}

fn rendezvous<T: Number>(group: &Group, gpu: &Gpu, len: usize) -> Symmetric<T> {
    gpu.alloc::<T>(group, len).unwrap().rendezvous(group).unwrap()
}

fn all_ranks(world: &World, order: Option<Order>) -> Group {
    let all: Vec<usize> = (0..world.size()).collect();
    let builder = world.subgroup_builder(&all);
    order.map_or(builder.clone(), |order| builder.order(order)).build().unwrap()
}

fn each_way<T: Number>(world: &World, driver: &Fake, gpu: &Gpu, stream: &Stream) {
    const WAY: Algorithm = Algorithm::Multimem;
    let (n, rank, len) = (world.size(), world.rank(), 5 * world.size());
    let seen =
        watch(driver, &["multimem_all_reduce", "multimem_reduce_pull", "multimem_all_gather"]);
    let mut x = rendezvous::<T>(world, gpu, len);
    let all = x.handle().multicast_ptr().unwrap() as u64;
    let (to, to_block) = (0x1000, 0x2000);
    // SAFETY: the kernels are noted, and touch nothing.
    let out = || unsafe { ViewMut::from_raw(to, len) };
    // SAFETY: likewise.
    let block = || unsafe { ViewMut::from_raw(to_block, 5) };
    // SAFETY: likewise.
    let input = || unsafe { View::from_raw(to_block, 5) };
    x.all_reduce_with(SUM, WAY, stream).unwrap();
    x.all_reduce_into_with(SUM, out(), WAY, stream).unwrap();
    x.reduce_scatter_with(SUM, block(), WAY, stream).unwrap();
    x.reduce_with(SUM, n - 1, out(), WAY, stream).unwrap();
    x.all_gather_from(input(), WAY, stream).unwrap();
    x.all_gather_from(input(), Algorithm::Auto, stream).unwrap();
    let (len, root, first) = (len as u64, u64::from(rank == n - 1), 5 * rank as u64);
    let stored = vec![all, to_block, 0, 5 * size_of::<T>() as u64];
    let expected = [
        ("multimem_all_reduce", vec![all, 0, len]),
        ("multimem_reduce_pull", vec![all, to, 0, 1, len, len, 1]),
        ("multimem_reduce_pull", vec![all, to_block, first, 1, 5, 5, 1]),
        ("multimem_reduce_pull", vec![all, to, 0, 1, len, len, root]),
        ("multimem_all_gather", stored.clone()),
        ("multimem_all_gather", stored),
    ];
    let expected = expected.map(|(name, numbers)| (name.to_owned(), numbers));
    assert_eq!(*seen.lock().unwrap(), expected, "{}", T::DTYPE);
    assert!(driver.launches().iter().all(|launched| !launched.programmatic));
}

#[test]
fn a_caller_who_asks_gets_the_switchs_kernels() {
    for n in [2, 3] {
        ranks(&able_drivers(n), |world, driver, gpu, stream| {
            each_way::<f32>(world, driver, gpu, stream);
            each_way::<f16>(world, driver, gpu, stream);
            each_way::<bf16>(world, driver, gpu, stream);
        });
    }
}

/// The error of a call that the switch cannot do, which puts nothing into the stream.
fn refused<T: Number>(x: &mut Symmetric<T>, op: ReduceOp, driver: &Fake, at: &Stream) -> String {
    let before = driver.launches().len();
    let e = x.all_reduce_with(op, Algorithm::Multimem, at).unwrap_err();
    assert!(matches!(e, Error::Usage { op: "all_reduce", rank: Some(_), .. }), "{e}");
    assert_eq!(driver.launches().len(), before);
    e.to_string()
}

#[test]
fn what_the_switch_cannot_add_up_is_refused() {
    ranks(&able_drivers(2), |world, driver, gpu, stream| {
        let e = refused(&mut rendezvous::<f64>(world, gpu, 10), SUM, driver, stream);
        assert!(e.contains("sum of f32, f16 or bf16") && e.contains("sum of f64"), "{e}");
        let e = refused(&mut rendezvous::<i32>(world, gpu, 10), SUM, driver, stream);
        assert!(e.contains("sum of i32"), "{e}");
        let mut x = rendezvous::<f32>(world, gpu, 10);
        for op in [ReduceOp::Max, ReduceOp::Average, ReduceOp::Product] {
            let e = refused(&mut x, op, driver, stream);
            assert!(e.contains(&format!("{op} of f32")), "{e}");
        }
        let e = x.all_reduce_with(SUM, Algorithm::CopyEngine, stream).unwrap_err();
        assert!(e.to_string().contains("CopyEngine"), "{e}");
        let mut out = gpu.alloc(world, 10).unwrap();
        let e = x.all_reduce_into_with(SUM, out.view_mut(), Algorithm::OneShot, stream);
        assert!(e.unwrap_err().to_string().contains("the algorithm Auto or Multimem"));
        let e = x.reduce_with(SUM, 2, out.view_mut(), Algorithm::Multimem, stream).unwrap_err();
        assert!(matches!(e, Error::Usage { op: "reduce", .. }), "{e}");
        assert_eq!(driver.launches().len(), 0);
        x.all_reduce_with(SUM, Algorithm::Multimem, stream).unwrap();
        assert_eq!(driver.launches().len(), 1);
        world.barrier().unwrap();
    });
}

#[test]
fn without_multicast_whoever_asks_is_refused_and_auto_does_without() {
    ranks(&configured(2, &vec![Config::default(); 2]), |world, driver, gpu, stream| {
        let mut x = rendezvous::<f32>(&all_ranks(world, Some(Order::Any)), gpu, 1 << 20);
        let mut out = gpu.alloc(world, 1 << 20).unwrap();
        let e = x.all_reduce_with(SUM, Algorithm::Multimem, stream).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        let text = e.to_string();
        assert!(text.contains(&format!("all_reduce on rank {}", world.rank())), "{text}");
        assert!(text.contains("not every rank has a device of its own that can"), "{text}");
        let e = x.copy_to_multicast(out.view(), 0, stream).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        assert_eq!((driver.launches().len(), driver.calls("cuMemcpyDtoDAsync")), (0, 0));
        x.all_reduce(SUM, stream).unwrap();
        x.all_reduce_into(SUM, out.view_mut(), stream).unwrap();
        let names: Vec<_> = driver.launches().into_iter().map(|l| l.function).collect();
        assert_eq!(names, ["all_reduce_two_shot", "reduce_pull"]);
        world.barrier().unwrap();
    });
}

#[test]
fn memory_that_has_no_multicast_is_told_apart() {
    ranks(&able_drivers(2), |world, driver, gpu, stream| {
        let buffer = gpu.alloc::<f32>(world, 100).unwrap();
        if world.rank() == 1 {
            driver.fail("cuMulticastBindMem", 1, code::NOT_PERMITTED);
        }
        let (mut x, _) = logged(|| buffer.rendezvous(world).unwrap());
        let e = x.all_reduce_with(SUM, Algorithm::Multimem, stream).unwrap_err();
        assert!(e.to_string().contains("a rank could not set it up for this memory"), "{e}");
        let mut y = rendezvous::<f32>(world, gpu, 100);
        y.all_reduce_with(SUM, Algorithm::Multimem, stream).unwrap();
        world.barrier().unwrap();
    });
}

/// The names of the kernels that plain calls of a group launch.
fn plain(group: &Group, driver: &Fake, gpu: &Gpu, stream: &Stream) -> Vec<String> {
    let before = driver.launches().len();
    let large = 1 << 20;
    let mut x = rendezvous::<f32>(group, gpu, large);
    let mut out = gpu.alloc(group, large).unwrap();
    x.all_reduce(SUM, stream).unwrap();
    x.all_reduce_into(SUM, out.view_mut(), stream).unwrap();
    x.reduce(SUM, 0, out.view_mut(), stream).unwrap();
    x.all_reduce(ReduceOp::Max, stream).unwrap();
    rendezvous::<f32>(group, gpu, 8).all_reduce(SUM, stream).unwrap();
    rendezvous::<f64>(group, gpu, large).all_reduce(SUM, stream).unwrap();
    let launches = driver.launches().split_off(before);
    launches.into_iter().map(|launched| launched.function).collect()
}

#[test]
fn a_group_whose_order_is_any_takes_the_switch() {
    const RANKED: [&str; 6] = [
        "all_reduce_two_shot",
        "reduce_pull",
        "reduce_pull",
        "all_reduce_two_shot",
        "all_reduce_flagged",
        "all_reduce_two_shot",
    ];
    ranks(&able_drivers(2), |world, driver, gpu, stream| {
        assert_eq!(world.order(), Order::Ranked);
        assert_eq!(plain(world, driver, gpu, stream), RANKED);
        let any = all_ranks(world, Some(Order::Any));
        let mut expected = RANKED;
        expected[..3].copy_from_slice(&[
            "multimem_all_reduce",
            "multimem_reduce_pull",
            "multimem_reduce_pull",
        ]);
        assert_eq!(plain(&any, driver, gpu, stream), expected);
        let within = any.subgroup(&[0, 1]).unwrap();
        assert_eq!(within.order(), Order::Any, "as the group that it is of");
        world.barrier().unwrap();
    });
}

#[test]
fn ranks_that_allow_different_orders_are_told() {
    World::threads(2, |world| {
        let order = if world.rank() == 0 { Order::Any } else { Order::Ranked };
        let e = all_ranks(&world, Some(order)).ready().unwrap_err();
        let Error::Mismatch { what, ours, .. } = &e else { panic!("{e}") };
        assert_eq!((*what, ours.clone()), ("order of reductions", format!("{order:?}")));
        all_ranks(&world, Some(Order::Any)).ready().unwrap();
    })
    .unwrap();
}

#[test]
fn a_copy_to_all_stays_within_the_memory() {
    ranks(&able_drivers(2), |world, driver, gpu, stream| {
        let mut x = rendezvous::<u32>(world, gpu, 10);
        let all = x.handle().multicast_ptr().unwrap() as u64;
        let mut from = gpu.alloc::<u32>(world, 5).unwrap();
        from.write(&[7 + world.rank() as u32; 5], stream).unwrap();
        for at in [6, usize::MAX] {
            let e = x.copy_to_multicast(from.view(), at, stream).unwrap_err();
            assert!(matches!(e, Error::Usage { op: "copy_to_multicast", .. }), "{e}");
            assert!(e.to_string().contains("within the 10 of each rank"), "{e}");
        }
        assert_eq!(driver.calls("cuMemcpyDtoDAsync"), 0);
        x.copy_to_multicast(from.view(), 5 * world.rank(), stream).unwrap();
        world.barrier().unwrap();
        // The fake driver's multicast is memory of its own, which all ranks see there.
        let seen: Vec<u32> = (0..10).map(|i| load(all + 4 * i)).collect();
        assert_eq!(seen, [7, 7, 7, 7, 7, 8, 8, 8, 8, 8]);
        world.barrier().unwrap();
    });
}

#[test]
fn a_multicast_mapping_goes_before_the_memory_it_maps() {
    ranks(&able_drivers(2), |world, driver, gpu, _| {
        let x = rendezvous::<f32>(world, gpu, 10);
        assert!(x.handle().multicast_ptr().is_some());
        let before = driver.history().len();
        drop(x);
        let calls = driver.history().split_off(before);
        let memory: Vec<_> = calls
            .into_iter()
            .filter(|call| call.starts_with("cuMem") || call.starts_with("cuMulticast"))
            .collect();
        let (all, parts) = memory.split_at(5);
        let unmapped = ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind"];
        assert_eq!(all[..3], unmapped, "the address of all, then what is bound");
        assert_eq!(all[3..], ["cuMemRelease"; 2], "the object, and the hold on the memory");
        assert_eq!(parts.iter().filter(|call| **call == "cuMemUnmap").count(), 2);
        assert!(!parts.contains(&"cuMulticastUnbind"));
        world.barrier().unwrap();
    });
}
