//! Calls that are refused, that differ between ranks, and that end in vain.

use symmem::{Error, ReduceOp};

use super::platform::{Call, Memory, Platform, Way};
use super::{LONG, SHORT, reduced, same, source};

fn contains(result: symmem::Result<()>, why: &str) {
    let e = result.unwrap_err();
    assert!(matches!(e, Error::Usage { rank: Some(_), .. }), "{e:?}");
    assert!(e.to_string().contains(why), "{e}");
}

/// Wrong lengths, roots and operators are refused before anything is done, and the next call works.
pub fn bad_collective_calls_are_named(platform: &impl Platform) {
    let (world, n) = (platform.world(), platform.world().size());
    let data: Vec<f32> = source(1).elements(world.rank(), 10 * n);
    let mut x = platform.filled(&data);
    let (none, few) = (&mut [][..], &mut [0.0; 3]);
    contains(x.all_reduce(ReduceOp::Xor, Way::Auto), "an operator that f32 has, got xor");
    contains(x.call(Call::ReduceScatter(ReduceOp::Or), &mut [0.0; 10]), "an operator that f32 has");
    contains(x.broadcast(n), &format!("a rank in [0, {n}), got {n}"));
    contains(x.call(Call::Reduce(ReduceOp::Sum, n), few), "a rank in [0");
    contains(x.call(Call::Gather(n), few), "a rank in [0");
    contains(x.call(Call::Scatter(usize::MAX), few), "a rank in [0");
    contains(x.call(Call::AllGather, few), &format!("an output of {} elements, got 3", 10 * n * n));
    contains(x.call(Call::AllReduce(ReduceOp::Sum), few), "an output of");
    contains(x.call(Call::AllToAll, few), "an output of");
    contains(x.call(Call::Scatter(0), few), "an output of 10 elements, got 3");
    contains(
        x.call(Call::ReduceColumns(ReduceOp::Sum, 0), none),
        "a number of columns that divides",
    );
    if n > 1 {
        let mut odd = platform.memory::<f32>(world, 10 * n + 1).unwrap();
        contains(odd.call(Call::ReduceScatter(ReduceOp::Sum), none), "divisible by the");
        contains(odd.call(Call::AllToAll, none), "divisible by the");
    }
    same(&x.read().unwrap(), &data, "the input");
    x.all_reduce(ReduceOp::Sum, Way::Auto).unwrap();
    same(&x.read().unwrap(), &reduced(world, source(1), ReduceOp::Sum, 10 * n), "the next call");
}

/// Ranks, ranges and channels that there are not are refused, and the next call works.
pub fn bad_one_sided_calls_are_named(platform: &impl Platform) {
    let n = platform.world().size();
    let mut x = platform.memory::<f32>(platform.world(), 10).unwrap();
    let channels = x.handle().signal_pad_size() / (4 * n);
    x.open();
    contains(x.put(0, 8, &[1.0; 3]), "elements within the 10 of rank 0, got 3 at 8");
    contains(x.put(n, 0, &[1.0]), &format!("a rank in [0, {n}), got {n}"));
    for at in [8, 10, usize::MAX] {
        let why = format!("elements within the 10 of rank {}, got 3 at {at}", n - 1);
        contains(x.get(n - 1, at, &mut [1.0; 3]), &why);
    }
    contains(x.get(usize::MAX, 0, &mut [1.0]), "a rank in [0");
    contains(x.put_signal(n, 0, LONG), "a rank in [0");
    contains(x.wait_signal(n, 0, LONG), "a rank in [0");
    for channel in [channels, usize::MAX] {
        contains(x.put_signal(0, channel, LONG), "a channel ");
        contains(x.wait_signal(0, channel, LONG), "a channel ");
    }
    x.close();
    assert_eq!(x.read().unwrap(), [0.0; 10]);
    assert!(x.pad().iter().all(|word| *word == 0));
    x.barrier().unwrap();
}

/// The error of a call that ranks made differently, and how they go on.
fn goes_on<P: Platform>(
    platform: &P,
    x: &mut P::Memory<f32>,
    made: symmem::Result<()>,
    what: &str,
) {
    platform.check_told(&made.unwrap_err(), what);
    platform.world().barrier().unwrap();
    platform.world().resync().unwrap();
    let len = x.handle().buffer_size() / 4;
    let data: Vec<f32> = source(2).elements(platform.world().rank(), len);
    if P::KEEPS {
        same(&x.read().unwrap(), &data, "nothing was done");
    }
    x.write(&data);
    x.barrier().unwrap();
}

/// Ranks that call different things all learn it, and the next call works.
pub fn different_calls_are_told_to_every_rank(platform: &impl Platform) {
    let (world, first) = (platform.world(), platform.world().rank() == 0);
    if world.size() == 1 {
        return;
    }
    for len in [100, 200_000] {
        let data: Vec<f32> = source(2).elements(world.rank(), len);
        let (mut x, mut y) = (platform.filled(&data), platform.filled(&data));
        let made = x.all_reduce(if first { ReduceOp::Sum } else { ReduceOp::Max }, Way::Auto);
        goes_on(platform, &mut x, made, "operator");
        let made = x.broadcast(usize::from(!first));
        goes_on(platform, &mut x, made, "root");
        let made = if first { x.barrier() } else { x.all_reduce(ReduceOp::Sum, Way::Auto) };
        goes_on(platform, &mut x, made, "operation");
        let memory = if first { &mut x } else { &mut y };
        let made = memory.all_reduce(ReduceOp::Sum, Way::Auto);
        goes_on(platform, &mut x, made, "memory");
        x.all_reduce(ReduceOp::Sum, Way::Auto).unwrap();
        let expected = reduced(world, source(2), ReduceOp::Sum, len);
        same(&x.read().unwrap(), &expected, "the next call");
    }
}

/// A rank that waits in vain is told for whom, the others are told when they call, and all continue after a resync.
pub fn a_rank_that_does_not_come_is_a_timeout_until_a_resync(platform: &impl Platform) {
    let world = platform.world();
    let all: Vec<usize> = (0..world.size()).collect();
    if world.size() == 1 {
        return;
    }
    let group = world.subgroup_builder(&all).timeout(LONG).build().unwrap();
    for (len, way) in [(2, Way::Auto), (5000, Way::Staged), (5000, Way::TwoShot)] {
        let data: Vec<f32> = source(len).elements(world.rank(), len);
        let mut x = platform.memory::<f32>(&group, len).unwrap();
        x.all_reduce(ReduceOp::Sum, way).unwrap(); // what is loaded when it is first used is there
        x.write(&data);
        world.barrier().unwrap();
        if world.rank() == 0 {
            group.set_timeout(SHORT);
            let e = x.all_reduce(ReduceOp::Sum, way).unwrap_err();
            let Error::Timeout { op: "all_reduce", waiting_for, .. } = e else { panic!("{e}") };
            assert!(!waiting_for.is_empty() && !waiting_for.contains(&0), "{waiting_for:?}");
            group.set_timeout(LONG);
        }
        world.barrier().unwrap();
        if world.rank() != 0 {
            let e = x.all_reduce(ReduceOp::Sum, way).unwrap_err();
            let told = matches!(e, Error::OutOfStep { rank: 0, .. } | Error::PeerFailed { .. });
            assert!(told, "{e}");
        }
        world.barrier().unwrap();
        group.resync().unwrap();
        x.write(&data);
        x.all_reduce(ReduceOp::Sum, way).unwrap();
        let expected = reduced(world, source(len), ReduceOp::Sum, len);
        same(&x.read().unwrap(), &expected, "after the resync");
    }
}
