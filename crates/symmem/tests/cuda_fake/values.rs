//! Values in the pad: what kernels are told. Here they are functions of the test's, which do as the real ones.

use std::sync::atomic::{AtomicU64, Ordering};

use symmem::cuda::Until;
use symmem_sys::cuda::fake::Launched;

use super::{Group, declared, drivers, ranks};

/// Where a handle has its first pad.
const PADS: usize = 616;

fn word<'a>(launched: &Launched, rank: usize, number: u32) -> &'a AtomicU64 {
    let pad = Group::of(launched).u64(PADS + 8 * rank) as usize;
    let at = std::ptr::with_exposed_provenance_mut(pad + 8 * number as usize);
    // SAFETY: the fake driver's addresses are those of this process, and pads have such a word.
    unsafe { AtomicU64::from_ptr(at) }
}

#[test]
fn a_value_is_awaited_by_whom_it_was_put_for() {
    let (put, wait) = (declared("move", "put_value"), declared("move", "wait_value"));
    assert_eq!((&put[1..], &wait[1..]), (&[4, 4, 8][..], &[4, 4, 8, 4][..]));
    ranks(&drivers(2), |world, driver, gpu, stream| {
        driver.kernel("put_value", &put, |l| {
            let (to, number) = (l.u32(1).unwrap() as usize, l.u32(2).unwrap());
            word(l, to, number).store(l.u64(3).unwrap(), Ordering::Release);
        });
        driver.kernel("wait_value", &wait, |l| {
            let (value, least) = (l.u64(3).unwrap(), l.u32(4).unwrap() != 0);
            let at = word(l, Group::of(l).rank(), l.u32(2).unwrap());
            let reached = |now: u64| now == value || (least && now > value);
            while !reached(at.load(Ordering::Acquire)) {
                std::thread::yield_now();
            }
        });
        let mut x = gpu.alloc::<u32>(world, 64).unwrap().rendezvous(world).unwrap();
        let mut own = gpu.alloc::<u32>(world, 8).unwrap();
        own.write(&[world.rank() as u32 + 4; 8], stream).unwrap();
        x.write(&[0; 64], stream).unwrap();
        world.barrier().unwrap();
        let peer = 1 - world.rank();
        let last = x.handle().signal_pad_size() / 8 - 1;
        for (round, until) in
            [Until::Equal(1), Until::AtLeast(1), Until::AtLeast(3)].into_iter().enumerate()
        {
            let value = round as u64 + 1;
            x.put_with_value(peer, 16, own.view(), (last, value), stream).unwrap();
            x.wait_value(peer, last, until, stream).unwrap();
            assert_eq!(x.read(stream).unwrap()[16..24], [peer as u32 + 4; 8]);
            world.barrier().unwrap();
        }
        let before = driver.launches().len();
        let e = x.put_value(peer, last + 1, 1, stream).unwrap_err().to_string();
        assert!(e.contains("a word of 8 bytes among the 1152"), "{e}");
        assert!(x.wait_value(2, 0, Until::Equal(1), stream).is_err());
        assert!(x.put_value(2, 0, 1, stream).is_err());
        assert_eq!(driver.launches().len(), before);
    });
}
