//! What is put into a stream: done at once.
#![allow(unsafe_code)] // S1, S2, S4
#![allow(missing_docs, reason = "the functions are those of NVSHMEM's documentation")]

use std::ffi::c_int;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::{PATIENCE, fails, job};

/// Copies between addresses that the caller of the library vouches for.
fn copy(to: u64, from: u64, bytes: usize) {
    let source = with_exposed_provenance::<u8>(from as usize);
    let target = with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: as the caller of the library promises.
    unsafe { target.copy_from(source, bytes) };
}

/// A word that signals go to.
fn word<'a>(address: u64) -> &'a AtomicU64 {
    assert!(address.is_multiple_of(8), "a signal is 8 bytes");
    // SAFETY: as the caller of the library promises.
    unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(address as usize)) }
}

fn signal(address: u64, value: u64, op: c_int) {
    // Release: pairs with the wait's acquire.
    match op {
        9 => word(address).store(value, Ordering::Release),
        10 => drop(word(address).fetch_add(value, Ordering::Release)),
        other => panic!("{other} is no operation of a signal"),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_putmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, _: usize) {
    let _ = fails("nvshmemx_putmem_on_stream");
    copy(job("nvshmemx_putmem_on_stream").counterpart(to, pe as usize), from, bytes);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_getmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, _: usize) {
    let _ = fails("nvshmemx_getmem_on_stream");
    copy(to, job("nvshmemx_getmem_on_stream").counterpart(from, pe as usize), bytes);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_putmem_signal_on_stream(
    to: u64,
    from: u64,
    bytes: usize,
    at: u64,
    value: u64,
    op: c_int,
    pe: c_int,
    _: usize,
) {
    let _ = fails("nvshmemx_putmem_signal_on_stream");
    let job = job("nvshmemx_putmem_signal_on_stream");
    copy(job.counterpart(to, pe as usize), from, bytes);
    signal(job.counterpart(at, pe as usize), value, op);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_signal_op_on_stream(
    at: u64,
    value: u64,
    op: c_int,
    pe: c_int,
    _: usize,
) {
    signal(job("nvshmemx_signal_op_on_stream").counterpart(at, pe as usize), value, op);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_signal_wait_until_on_stream(
    at: u64,
    compare: c_int,
    value: u64,
    _: usize,
) {
    let job = job("nvshmemx_signal_wait_until_on_stream");
    let (word, start) = (word(job.counterpart(at, job.me)), Instant::now());
    loop {
        // Acquire: pairs with the signal's release.
        let now = word.load(Ordering::Acquire);
        let reached = match compare {
            0 => now == value,
            1 => now != value,
            2 => now > value,
            3 => now <= value,
            4 => now < value,
            5 => now >= value,
            other => panic!("{other} is no comparison"),
        };
        if reached {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "a signal does not come: {now}, not {value}");
        std::thread::yield_now();
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_quiet_on_stream(_: usize) {
    let _ = fails("nvshmemx_quiet_on_stream");
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_barrier_on_stream(team: c_int, _: usize) -> c_int {
    job("nvshmemx_barrier_on_stream").barrier(team);
    c_int::from(fails("nvshmemx_barrier_on_stream"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_team_sync_on_stream(team: c_int, _: usize) -> c_int {
    job("nvshmemx_team_sync_on_stream").barrier(team);
    c_int::from(fails("nvshmemx_team_sync_on_stream"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_broadcastmem_on_stream(
    team: c_int,
    to: u64,
    from: u64,
    bytes: usize,
    root: c_int,
    _: usize,
) -> c_int {
    let job = job("nvshmemx_broadcastmem_on_stream");
    let root = job.team(team).pes().nth(root as usize).expect("no such root");
    job.barrier(team);
    let source = job.counterpart(from, root);
    if source != to {
        copy(to, source, bytes);
    }
    job.barrier(team);
    c_int::from(fails("nvshmemx_broadcastmem_on_stream"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_alltoallmem_on_stream(
    team: c_int,
    to: u64,
    from: u64,
    bytes: usize,
    _: usize,
) -> c_int {
    let job = job("nvshmemx_alltoallmem_on_stream");
    let members = job.team(team);
    let own = members.position(job.me).expect("not of this team");
    job.barrier(team);
    for (index, pe) in members.pes().enumerate() {
        let source = job.counterpart(from, pe) + (own * bytes) as u64;
        copy(to + (index * bytes) as u64, source, bytes);
    }
    job.barrier(team);
    c_int::from(fails("nvshmemx_alltoallmem_on_stream"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_fcollectmem_on_stream(
    team: c_int,
    to: u64,
    from: u64,
    bytes: usize,
    _: usize,
) -> c_int {
    let job = job("nvshmemx_fcollectmem_on_stream");
    job.barrier(team);
    for (index, pe) in job.team(team).pes().enumerate() {
        copy(to + (index * bytes) as u64, job.counterpart(from, pe), bytes);
    }
    job.barrier(team);
    c_int::from(fails("nvshmemx_fcollectmem_on_stream"))
}

/// The reductions that tests use, of the hundreds that the real library has.
macro_rules! reductions {
    ($($name:ident($type:ty, $combine:expr);)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(team: c_int, to: u64, from: u64, count: usize, _: usize) -> c_int {
            let job = job(stringify!($name));
            job.barrier(team);
            let element = |address: u64, index: usize| {
                let place = with_exposed_provenance::<$type>(address as usize);
                // SAFETY: as the caller of the library promises.
                unsafe { place.add(index).read() }
            };
            let combine: fn($type, $type) -> $type = $combine;
            let parts: Vec<u64> = job.team(team).pes().map(|pe| job.counterpart(from, pe)).collect();
            let all = (0..count).map(|index| {
                parts.iter().map(|part| element(*part, index)).reduce(combine).unwrap()
            });
            let all: Vec<$type> = all.collect();
            job.barrier(team); // all have read
            copy(to, all.as_ptr().expose_provenance() as u64, size_of_val(&all[..]));
            c_int::from(fails(stringify!($name)))
        }
    )*};
}

reductions! {
    nvshmemx_float_sum_reduce_on_stream(f32, |a, b| a + b);
    nvshmemx_float_max_reduce_on_stream(f32, f32::max);
    nvshmemx_int32_sum_reduce_on_stream(i32, i32::wrapping_add);
    nvshmemx_int32_min_reduce_on_stream(i32, |a, b| a.min(b));
    nvshmemx_int64_prod_reduce_on_stream(i64, i64::wrapping_mul);
}
