//! Puts, gets and signals.

use symmem::Error;

use super::platform::{Memory, Platform};
use super::{LONG, SHORT, next, previous, same, source};

/// What is put is there after the phase, and what is there can be got in it.
pub fn puts_and_gets_reach_every_rank(platform: &impl Platform) {
    let (n, own) = (platform.world().size(), platform.world().rank());
    let tag = |from: usize, to: usize| (from * 100 + to) as u64;
    let mut x = platform.memory::<u64>(platform.world(), 3 * n).unwrap();
    x.open();
    for rank in 0..n {
        x.put(rank, 3 * own, &[tag(own, rank); 3]).unwrap();
        x.put(rank, 3 * n, &[]).unwrap();
    }
    x.close();
    let expected: Vec<u64> = (0..3 * n).map(|i| tag(i / 3, own)).collect();
    assert_eq!(x.read().unwrap(), expected);
    x.open();
    for rank in 0..n {
        let mut got = [0; 2];
        x.get(rank, 3 * own + 1, &mut got).unwrap();
        assert_eq!(got, [tag(own, rank); 2]);
    }
    x.close();
}

/// A rank that consumes a signal sees the data that was put before it, on the first and the last channel, also from itself.
pub fn signals_order_data(platform: &impl Platform) {
    let (world, own, len) = (platform.world(), platform.world().rank(), 5001);
    let (next, previous) = (next(world), previous(world));
    let mut x = platform.memory::<f32>(world, len + 3).unwrap();
    let last = x.handle().signal_pad_size() / (4 * world.size()) - 1;
    x.open();
    for round in 0..30 {
        let data = |rank: usize| source(round).elements::<f32>(rank, len);
        let channel = if round % 2 == 0 { 0 } else { last };
        x.put_with_signal(next, 3, &data(own), channel).unwrap();
        x.wait_signal(previous, channel, LONG).unwrap();
        let mut got = vec![0.0; len];
        x.get(own, 3, &mut got).unwrap();
        same(&got, &data(previous), "what came with the signal");
        // It was read: the next may come.
        x.put_signal(previous, 1, LONG).unwrap();
        x.wait_signal(next, 1, LONG).unwrap();
        x.put_signal(own, 2, LONG).unwrap();
        x.wait_signal(own, 2, LONG).unwrap();
    }
    x.close();
    assert_eq!(x.read().unwrap()[..3], [0.0; 3]);
    assert!(x.pad().iter().all(|word| *word == 0), "zero at rest");
    x.barrier().unwrap();
}

/// A signal that nobody sends, and one that nobody takes, are timeouts that name the rank. All go on after a resync.
pub fn signals_in_vain_are_timeouts(platform: &impl Platform) {
    let world = platform.world();
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_builder(&all).timeout(LONG).build().unwrap();
    let peer = world.size() - 1;
    for (name, on) in [("wait", 4), ("put", 0)] {
        let mut x = platform.memory::<u32>(&group, 10).unwrap();
        x.barrier().unwrap();
        if world.rank() == 0 {
            let e = if name == "put" {
                x.put_signal(peer, on, LONG).unwrap();
                x.put_signal(peer, on, SHORT).unwrap_err() // the first is not taken
            } else {
                x.wait_signal(peer, on, SHORT).unwrap_err()
            };
            let Error::Timeout { op, channel, waiting_for, .. } = e else { panic!("{e}") };
            assert_eq!(waiting_for, [peer]);
            // On the host it is `signal_pad.wait`, without the channel.
            assert!(op.contains(name) && channel.is_none_or(|told| told == on), "{op} {channel:?}");
        }
        world.barrier().unwrap();
        group.resync().unwrap();
        x.put_signal(next(world), 7, LONG).unwrap();
        x.wait_signal(previous(world), 7, LONG).unwrap();
        x.write(&[3; 10]);
        x.barrier().unwrap();
    }
}
