//! What the collectives on main memory promise besides what [`every_backend`](super::every_backend) checks.

use super::SOON;
use symmem::{Bool, Element, Error, ReduceOp, World};

/// Bytes that are no truth value of Rust's count as true, and results are 0 or 1.
pub fn whatever_is_not_zero_is_true(world: World) {
    let rank = world.rank();
    let mut bytes = world.alloc::<u8>(4).unwrap().rendezvous(&world).unwrap();
    bytes.local_mut().copy_from_slice(&[0, 2, if rank == 0 { 4 } else { 0 }, rank as u8 + 1]);
    // SAFETY: nobody touches the bytes while there is a part of them.
    let mut truth = unsafe { bytes.handle().part::<Bool>(0, 4) }.unwrap();
    truth.all_reduce(ReduceOp::Product).unwrap();
    drop(truth);
    assert_eq!(bytes.local(), [0, 1, u8::from(world.size() == 1), 1]);
}

/// A type of the user's: as many bytes as none of the library's.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Particle {
    position: [f32; 3],
    charge: i16,
    kind: [u8; 2],
}

impl Element for Particle {}

/// Structs move through memory and slices as numbers do; ranks with other structs are told.
pub fn structs_of_the_users_can_be_moved(world: World) {
    let n = world.size();
    let one = |rank: usize, i: usize| Particle {
        position: [(rank * 1000 + i) as f32 / 16.0, i as f32, -1.0],
        charge: rank as i16,
        kind: [i as u8, 7],
    };
    for len in [1, 3, 100, 20_000] {
        let own: Vec<Particle> = (0..len).map(|i| one(world.rank(), i)).collect();
        let mut x = world.alloc::<Particle>(len).unwrap().rendezvous(&world).unwrap();
        x.local_mut().copy_from_slice(&own);
        let mut all = vec![one(0, 0); len * n];
        x.all_gather(&mut all).unwrap();
        let right =
            |all: &[Particle]| all.iter().enumerate().all(|(i, got)| *got == one(i / len, i % len));
        assert!(right(&all));
        all.fill(one(0, 0));
        world.all_gather(&own, &mut all).unwrap();
        assert!(right(&all));
        x.broadcast(n - 1).unwrap();
        assert_eq!(x.local()[len - 1], one(n - 1, len - 1));
        let open = x.open().unwrap();
        open.put((world.rank() + 1) % n, 0, &own[..1]).unwrap();
        let x = open.close().unwrap();
        assert_eq!(x.local()[0], one((world.rank() + n - 1) % n, 0));
    }
    if n > 1 {
        let own = [one(0, 0)];
        let e = if world.rank() == 0 {
            world.broadcast(&mut own.clone(), 0).unwrap_err()
        } else {
            world.broadcast(&mut [0.0_f32], 0).unwrap_err()
        };
        assert!(e.to_string().contains("a struct of 16 bytes"), "{e}");
    }
}

/// A collective that gave up leaves the group out of step on every rank, whatever they call, until all resynchronise; the
/// memory is as it was, because nobody came to the work.
pub fn a_collective_that_gave_up_needs_a_resync(world: World) {
    let all: Vec<usize> = (0..world.size()).collect();
    let timeout = std::time::Duration::from_millis(800);
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    group.ready().unwrap();
    let out_of_step = |e: Error| {
        let what = "gave up all_reduce of";
        let told = matches!(&e, Error::OutOfStep { rank: 0, what: w, .. } if w.starts_with(what));
        assert!(told, "{e}");
    };
    for len in [2, 40, 100_000] {
        let mut x = group.alloc::<u32>(len).unwrap().rendezvous(&group).unwrap();
        world.barrier().unwrap();
        x.local_mut().fill(1);
        if world.rank() == 0 {
            let e = x.all_reduce(ReduceOp::Sum).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
            assert!(x.local().len() == len && x.local().iter().all(|v| *v == 1));
        }
        world.barrier().unwrap();
        out_of_step(x.all_reduce(ReduceOp::Sum).unwrap_err());
        out_of_step(group.broadcast(&mut [1.0], 0).unwrap_err());
        out_of_step(group.barrier().unwrap_err());
        out_of_step(group.barrier_on(1, SOON).unwrap_err());
        let x = x.share().err().unwrap();
        out_of_step(x.error);
        let mut x = x.kept.give_up().unwrap();
        world.barrier().unwrap();
        group.resync_by(SOON).unwrap();
        x.local_mut().fill(world.rank() as u32);
        x.all_reduce(ReduceOp::Sum).unwrap();
        let sum = (0..world.size() as u32).sum::<u32>();
        assert!(x.local().len() == len && x.local().iter().all(|v| *v == sum));
        x.share().unwrap().release().unwrap();
        group.barrier_on(1, SOON).unwrap();
    }
}
