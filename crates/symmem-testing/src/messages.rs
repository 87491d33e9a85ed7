//! Messages between ranks of which one dies, leaves, stops or gives up: bodies for three ranks on one host or on several.

use std::time::{Duration, Instant};

use symmem::{Deadline, Error, ErrorKind, Result, World};

use crate::{Random, assert_nothing_is_held, die, die_after, stop_until};

const MINUTE: Deadline = Deadline::within(Duration::from_secs(60));
/// More than is buffered.
const LARGE: usize = 3 << 20;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// The rank that the call says is lost; it must have been told soon.
fn lost_in<T: std::fmt::Debug>(call: impl FnOnce() -> Result<T>) -> (usize, String) {
    let begin = Instant::now();
    match call() {
        Err(Error::PeerLost { rank, during, how, .. }) => {
            println!("{during}: rank {rank} is gone: {how}; told after {:?}", begin.elapsed());
            assert!(begin.elapsed() < ms(10_000), "told after {:?}", begin.elapsed());
            (rank, how)
        }
        other => panic!("expected a lost peer, got {other:?}"),
    }
}

fn waited_for<T: std::fmt::Debug>(call: impl FnOnce() -> Result<T>) -> Vec<usize> {
    match call() {
        Err(Error::Timeout { waiting_for, .. }) => waiting_for,
        other => panic!("expected a timeout, got {other:?}"),
    }
}

/// Rank 1 dies while the others wait for it, each in another way; what it has sent before arrives.
pub fn a_death_is_told_to_those_who_wait(world: World) {
    let me = world.rank();
    if me == 1 {
        world.send(&[5_u32; 10], 0, 1).unwrap();
        world.send(&[6_u32; 10], 0, 2).unwrap();
    }
    world.barrier().unwrap();
    if me == 1 {
        std::thread::sleep(ms(100));
        die();
    }
    let mut data = [0_u32; 10];
    if me == 0 {
        // Takes in the other message.
        world.recv(&mut data, 1, 2).unwrap();
        assert_eq!(lost_in(|| world.recv_by(&mut data, 1, 3, MINUTE)).0, 1);
        world.recv(&mut data, 1, 1).unwrap();
        assert_eq!(data, [5; 10]);
    } else {
        assert_eq!(lost_in(|| world.send_by(&vec![0_u8; LARGE], 1, 0, MINUTE)).0, 1);
    }
    assert_eq!(lost_in(|| world.recv_any_by(&mut data, 9, MINUTE)).0, 1);
    assert_eq!(lost_in(|| world.recv_by(&mut data, 2 - me, 9, MINUTE)).0, 1);
    assert_eq!(lost_in(|| world.send_by(&[1_u8], 1, 0, MINUTE)).0, 1);
    assert_eq!(lost_in(|| world.send_by(&[1_u8], 2 - me, 0, MINUTE)).0, 1);
    let survivors = world.shrink().unwrap();
    let other = 1 - survivors.rank();
    survivors.send(&[me], other, 0).unwrap();
    let mut from = [9];
    survivors.recv(&mut from, other, 0).unwrap();
    assert_eq!(from, [2 - me]);
    drop((survivors, world));
    assert_nothing_is_held();
}

/// Rank 1 dies at a moment of the caller's choice, while all send to all. What arrives is whole.
pub fn a_death_at_any_moment_is_told(world: World, after: Duration) {
    let (me, n) = (world.rank(), world.size());
    if me == 1 {
        die_after(after);
    }
    let mut random = Random(7);
    let lengths: Vec<usize> = (0..64).map(|_| 1 + random.below(1 << 18)).collect();
    let value = |from: usize, round: usize| (from * 1000 + round) as u32;
    let round = |round: usize| -> Result<()> {
        let len = lengths[round % lengths.len()];
        for to in (1..n).map(|i| (me + i) % n) {
            world.send_by(&vec![value(me, round); len], to, 3, MINUTE)?;
        }
        let mut data = vec![0; len];
        for from in (1..n).map(|i| (me + i) % n) {
            world.recv_by(&mut data, from, 3, MINUTE)?;
            assert!(data.iter().all(|v| *v == value(from, round)), "not what rank {from} sent");
        }
        Ok(())
    };
    let lost = (0..).find_map(|number| round(number).err()).unwrap();
    let Error::PeerLost { rank, how, .. } = &lost else { panic!("{lost}") };
    assert_eq!(*rank, 1, "{how}");
}

/// Rank 1 leaves in order: what it has sent arrives, then it is gone; others are not affected.
pub fn messages_of_a_rank_that_left_arrive(world: World) {
    let me = world.rank();
    world.barrier().unwrap();
    if me == 1 {
        world.send(&[5_u32; 1000], 0, 1).unwrap();
        world.send(&[6_u32; 1000], 0, 2).unwrap();
        world.send(&[7_u32; 1000], 2, 2).unwrap();
        return;
    }
    std::thread::sleep(ms(300));
    let mut data = [0_u32; 1000];
    if me == 2 {
        assert_eq!(world.recv_any_by(&mut data, 2, MINUTE).unwrap(), 1);
        assert_eq!(data, [7; 1000]);
    } else {
        world.recv_by(&mut data, 1, 2, MINUTE).unwrap();
        assert_eq!(data, [6; 1000]);
        world.recv_by(&mut data, 1, 1, MINUTE).unwrap();
        assert_eq!(data, [5; 1000]);
    }
    let (rank, how) = lost_in(|| world.recv_by(&mut data, 1, 1, MINUTE));
    assert_eq!((rank, how.as_str()), (1, "it left"));
    assert_eq!(lost_in(|| world.send_by(&[1_u8], 1, 1, MINUTE)).0, 1);
    // The other one is there.
    let others: Vec<usize> = (0..3).filter(|rank| *rank != me).collect();
    assert_eq!(waited_for(|| world.recv_any_by(&mut data, 8, ms(50))), others);
    world.send(&[me as u32; 1000], 2 - me, 4).unwrap();
    assert_eq!(world.recv_any_by(&mut data, 4, MINUTE).unwrap(), 2 - me);
    // Until both are ready to go.
    world.send(&[0_u8], 2 - me, 5).unwrap();
    world.recv_by(&mut [0_u8], 2 - me, 5, MINUTE).unwrap();
}

/// When all others have left, nobody can send.
pub fn when_all_have_left_no_message_can_come(world: World) {
    world.barrier().unwrap();
    if world.rank() > 0 {
        return;
    }
    lost_in(|| world.recv_any_by(&mut [0_u8], 0, MINUTE));
}

/// Rank 1 stops in the middle of large messages. It is waited for, and named at a deadline; then all goes on.
pub fn a_stopped_rank_is_named_and_goes_on(world: World) {
    const TIMES: u32 = 30;
    let me = world.rank();
    world.barrier().unwrap();
    match me {
        0 => {
            let mut data = vec![0; LARGE / 4];
            for i in 0..TIMES {
                while let Err(late) = world.recv_by(&mut data, 1, 0, ms(20)) {
                    assert!(
                        matches!(&late, Error::Timeout { waiting_for, .. } if *waiting_for == [1])
                    );
                }
                assert!(data.iter().all(|value| *value == i));
            }
        }
        1 => {
            let stopping = std::thread::spawn(|| {
                std::thread::sleep(ms(5));
                stop_until(ms(400));
            });
            for i in 0..TIMES {
                world.send_by(&vec![i; LARGE / 4], 0, 0, MINUTE).unwrap();
            }
            stopping.join().unwrap();
        }
        _ => {}
    }
    world.barrier_on(1, MINUTE).unwrap();
}

/// Whoever waits can be interrupted, and tries again.
pub fn waits_for_messages_are_interrupted(world: World) {
    let (me, n) = (world.rank(), world.size());
    let (to, from) = ((me + 1) % n, (me + n - 1) % n);
    let large = vec![me as u32; LARGE / 4];
    let end = |waited: Result<()>, expected: &[usize]| {
        let Err(Error::Interrupted { waiting_for, .. }) = waited else { panic!("{waited:?}") };
        assert_eq!(waiting_for, expected);
    };
    end(symmem::interruptible(|| true, || world.recv_by(&mut [0_u8], from, 0, MINUTE)), &[from]);
    let others: Vec<usize> = (0..n).filter(|rank| *rank != me).collect();
    let any = || world.recv_any_by(&mut [0_u8], 0, MINUTE).map(drop);
    end(symmem::interruptible(|| true, any), &others);
    world.barrier().unwrap();
    // One after the other: a rank that waits would take the message in.
    for sender in 0..n {
        if me == sender {
            end(symmem::interruptible(|| true, || world.send_by(&large, to, 0, MINUTE)), &[to]);
        }
        world.barrier().unwrap();
    }
    let late = world.recv_by(&mut large.clone(), from, 0, ms(50));
    let late = late.expect_err("a message that was withdrawn");
    assert_eq!(late.kind(), ErrorKind::Timeout);
    world.barrier().unwrap();
    world.send_by(&large, to, 0, MINUTE).unwrap();
    let mut got = vec![0; LARGE / 4];
    world.recv_by(&mut got, from, 0, MINUTE).unwrap();
    assert!(got.iter().all(|value| *value == from as u32));
    world.barrier().unwrap();
}
