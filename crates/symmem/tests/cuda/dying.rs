//! A rank that is killed while its kernel runs, or that is gone when the others replay a graph. Not under MPS, where a death in
//! a kernel ends the work of every client of the device.

use std::time::{Duration, Instant};

use symmem::cuda::Algorithm;
use symmem::cuda::{Buffer, Gpu, Graph, Stream, Symmetric};
use symmem::{Error, Group, ReduceOp, Result, World};
use symmem_testing::{Ranks, die, stop_until, test_name};

#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_killed_in_its_kernel_is_named_and_the_others_go_on() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let gpu = Gpu::open(0).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(&world, 5000).unwrap().rendezvous(&world).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        x.put_signal(world.rank(), 0, &stream).unwrap();
        x.wait_signal(world.rank(), 0, &stream).unwrap();
        x.synchronize(&stream).unwrap(); // everything that is loaded when first used is there now
        world.barrier().unwrap();
        // Three kernels that wait: of ranks 1 and 2 for rank 0, whose own waits for a signal of rank 1.
        if world.rank() == 0 {
            x.wait_signal(1, 1, &stream).unwrap();
        } else {
            x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        }
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500)); // turns of the device are milliseconds
            assert!(!stream.is_idle().unwrap(), "its kernel waits for rank 0");
            die();
        }
        let e = x.synchronize(&stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        let e = x.put_signal(0, 0, &stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        drop(x);
        let survivors = world.shrink().unwrap();
        let mut x = gpu.alloc::<f32>(&survivors, 5000).unwrap().rendezvous(&survivors).unwrap();
        x.write(&[1.0; 5000], &stream).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [2.0; 5000], "the context lives on");
        let peer = 1 - survivors.rank();
        x.put_signal(peer, 0, &stream).unwrap();
        x.wait_signal(peer, 0, &stream).unwrap();
        x.synchronize(&stream).unwrap();
    });
}

const LEN: usize = 5000;

/// Two buffers of a group, of which a graph reduces one with flags and one in two steps.
struct Captured {
    buffers: [Buffer<f32>; 2],
    parts: [Symmetric<f32>; 2],
    graph: Graph,
    gpu: Gpu,
    stream: Stream,
}

impl Captured {
    /// Captured with the group's limit, and replayed several times.
    fn new(group: &Group) -> Self {
        Self::within(group, None)
    }

    /// Likewise with another limit, which is not that of the first calls: they load kernels.
    fn within(group: &Group, limit: Option<Duration>) -> Self {
        let gpu = Gpu::open(0).unwrap();
        let stream = gpu.stream().unwrap();
        let buffers = [(); 2].map(|()| gpu.alloc::<f32>(group, LEN).unwrap());
        let [mut a, mut b] = [0, 1].map(|i: usize| buffers[i].symmetric(group).unwrap());
        let mut work = || {
            a.all_reduce_with(ReduceOp::Average, Algorithm::Staged, &stream)?;
            b.all_reduce_with(ReduceOp::Average, Algorithm::TwoShot, &stream)
        };
        work().unwrap(); // everything that is loaded when first used is there now
        stream.synchronize().unwrap();
        limit.into_iter().for_each(|limit| group.set_timeout(limit));
        let graph = stream.capture(work).unwrap();
        let mut captured = Self { buffers, parts: [a, b], graph, gpu, stream };
        captured.works();
        captured
    }

    fn replay(&self) -> Result<()> {
        // SAFETY: the memory lives, and all ranks that live launch theirs.
        unsafe { self.graph.launch(&self.stream) }?;
        self.stream.synchronize()
    }

    fn works(&mut self) {
        for round in 0..3 {
            let own = (self.parts[0].group().rank() + round) as f32;
            for part in &mut self.parts {
                part.write(&[own; LEN], &self.stream).unwrap();
            }
            self.replay().unwrap();
            let (n, round) = (self.parts[0].group().size() as f32, round as f32);
            let expected = (n - 1.0) / 2.0 + round;
            for part in &self.parts {
                assert_eq!(part.read(&self.stream).unwrap(), [expected; LEN]);
            }
        }
    }

    /// Nothing ends without the error: every replay, every synchronisation, every copy to the host, every call.
    fn fails(&mut self, is_right: impl Fn(&Error) -> bool) {
        let begin = Instant::now();
        for _ in 0..5 {
            let results = [
                self.replay(),
                self.stream.synchronize(),
                self.parts[0].synchronize(&self.stream),
                self.parts[0].read(&self.stream).map(drop),
                self.buffers[1].read(&self.stream).map(drop),
                self.parts[0].all_reduce(ReduceOp::Sum, &self.stream),
                self.gpu.check_failures(),
            ];
            for (call, result) in results.into_iter().enumerate() {
                assert!(result.as_ref().is_err_and(&is_right), "call {call}: {result:?}");
            }
        }
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

fn is_loss(e: &Error) -> bool {
    matches!(e, Error::PeerLost { rank: 1, .. })
}

/// What survivors do: a group of their own works, and the old one stays broken.
fn goes_on(world: &World, mut old: Captured, ran_after: bool) {
    let survivors = world.shrink().unwrap();
    Captured::new(&survivors).works();
    let e = old.replay().unwrap_err();
    assert!(is_loss(&e), "{e}");
    if ran_after {
        // Nobody asked, and what lies there is no result all the same.
        for buffer in &old.buffers {
            let left = buffer.read(&old.stream).unwrap();
            assert!(left.iter().all(|x| x.is_nan()), "what failed leaves no numbers");
        }
    }
    old.fails_alone();
}

impl Captured {
    /// Calls on it are errors, although another group has taken its place.
    fn fails_alone(&mut self) {
        let e = self.parts[0].all_reduce(ReduceOp::Sum, &self.stream).unwrap_err();
        assert!(is_loss(&e), "{e}");
        self.gpu.check_failures().unwrap();
    }
}

/// With the limit that devices have by default: half an hour.
fn unhurried(n: usize) -> Ranks<'static> {
    Ranks::new(n).env("SYMMEM_TIMEOUT", "")
}

#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_killed_between_replays_is_the_error_of_every_later_replay() {
    unhurried(2).dying(&[1]).run(test_name!(), |world| {
        let mut captured = Captured::new(&world);
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        while world.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begin = Instant::now();
        let e = captured.replay().unwrap_err();
        assert!(is_loss(&e) && begin.elapsed() < Duration::from_secs(1), "{e}");
        captured.fails(is_loss);
        goes_on(&world, captured, false);
    });
}

/// The survivor's graph waits for it already.
#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_killed_between_replays_ends_a_replay_that_waits_for_it() {
    unhurried(2).dying(&[1]).run(test_name!(), |world| {
        let mut captured = Captured::new(&world);
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
            die();
        }
        let begin = Instant::now();
        let e = captured.replay().unwrap_err();
        assert!(is_loss(&e) && begin.elapsed() < Duration::from_millis(1500), "{e}");
        captured.fails(is_loss);
        goes_on(&world, captured, true);
    });
}

#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_that_leaves_between_replays_is_named() {
    unhurried(2).run(test_name!(), |world| {
        let mut captured = Captured::new(&world);
        world.barrier().unwrap();
        if world.rank() == 1 {
            return; // in order, but the other goes on
        }
        let begin = Instant::now();
        let e = captured.replay().unwrap_err();
        assert!(is_loss(&e) && begin.elapsed() < Duration::from_secs(5), "{e}");
        captured.fails(is_loss);
    });
}

/// It lives: once it goes on, both find out, and the group can be put back in step.
#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_stopped_between_replays_is_a_timeout_until_all_resync() {
    Ranks::new(2).run(test_name!(), |world| {
        let (group, limit) = (world.subgroup(&[0, 1]).unwrap(), Duration::from_secs(1));
        let mut captured = Captured::within(&group, Some(limit));
        world.barrier().unwrap();
        if world.rank() == 1 {
            stop_until(Duration::from_secs(6));
        } else {
            let begin = Instant::now();
            let e = captured.replay().unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(4), "{e} after {:?}", begin.elapsed());
            captured.fails(|e| {
                matches!(e, Error::Timeout { op: "all_reduce", waiting_for, after, .. }
                    if *waiting_for == [1] && *after == limit)
            });
        }
        world.barrier().unwrap();
        if world.rank() == 1 {
            let e = captured.replay().unwrap_err();
            assert!(matches!(e, Error::PeerFailed { rank: 0, .. }), "{e}");
            captured.fails(|e| matches!(e, Error::PeerFailed { rank: 0, .. }));
        }
        group.resync_by(Duration::from_secs(20)).unwrap();
        for buffer in &captured.buffers {
            let left = buffer.read(&captured.stream).unwrap();
            assert!(left.iter().all(|x| x.is_nan()), "what failed leaves no numbers");
        }
        world.barrier().unwrap();
        captured.works();
        world.barrier().unwrap();
    });
}
