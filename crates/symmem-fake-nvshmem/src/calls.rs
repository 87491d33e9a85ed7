//! What is not put into a stream.
#![allow(unsafe_code)] // S4
#![allow(missing_docs, reason = "the functions are those of NVSHMEM's documentation")]

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::sync::{Arc, PoisonError};

use crate::shared::{Job, Team, found};
use crate::{JOB, fails, job};

/// What a structure of the first version begins with.
const fn version(bytes: c_int) -> c_int {
    (1 << 16) + bytes
}

#[repr(C)]
pub struct UniqueId {
    version: c_int,
    internal: [u8; 124],
}

#[repr(C)]
pub struct InitAttr {
    version: c_int,
    mpi_comm: *mut c_void,
    args_version: c_int,
    args_padding: c_int,
    unique_id_version: c_int,
    unique_id_padding: c_int,
    id: *const UniqueId,
    rank: c_int,
    ranks: c_int,
    content: [u8; 96],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_vendor_get_version_info(
    major: *mut c_int,
    minor: *mut c_int,
    patch: *mut c_int,
) {
    for (number, value) in [(major, 3), (minor, 99), (patch, 0)] {
        // SAFETY: as the caller promises.
        unsafe { *number = value };
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_init_status() -> c_int {
    let joined = JOB.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    let said = std::env::var("SYMMEM_FAKE_NVSHMEM_STATUS").ok().and_then(|said| said.parse().ok());
    if joined { said.unwrap_or(2) } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_get_uniqueid(id: *mut UniqueId) -> c_int {
    // SAFETY: as the caller promises.
    let id = unsafe { &mut *id };
    if fails("nvshmemx_get_uniqueid") || id.version != version(128) {
        return 1;
    }
    let name = found();
    id.internal[..name.len()].copy_from_slice(name.as_bytes());
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_hostlib_init_attr(
    flags: c_uint,
    attributes: *mut InitAttr,
) -> c_int {
    // SAFETY: as the caller promises.
    let attributes = unsafe { &*attributes };
    let versions = [attributes.version, attributes.args_version, attributes.unique_id_version];
    let known = versions == [version(144), version(128), version(24)];
    let mut joined = JOB.lock().unwrap_or_else(PoisonError::into_inner);
    if fails("nvshmemx_hostlib_init_attr") || flags != 1 << 3 || !known || joined.is_some() {
        return 7;
    }
    // SAFETY: as the caller promises.
    let id = unsafe { &*attributes.id };
    let end = id.internal.iter().position(|byte| *byte == 0).unwrap();
    let name = std::str::from_utf8(&id.internal[..end]).unwrap();
    let (rank, ranks) = (attributes.rank as usize, attributes.ranks as usize);
    *joined = Some(Arc::new(Job::join(name, rank, ranks)));
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_hostlib_finalize() {
    job("nvshmemx_hostlib_finalize").barrier(0);
    let _ = fails("nvshmemx_hostlib_finalize");
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_malloc(bytes: usize) -> u64 {
    if fails("nvshmem_malloc") {
        return 0;
    }
    job("nvshmem_malloc").allocate(512, bytes as u64).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_align(alignment: usize, bytes: usize) -> u64 {
    if fails("nvshmem_align") {
        return 0;
    }
    assert!(alignment.is_power_of_two());
    job("nvshmem_align").allocate(alignment as u64, bytes as u64).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_free(address: u64) {
    let _ = fails("nvshmem_free");
    job("nvshmem_free").free(address);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_ptr(address: u64, pe: c_int) -> u64 {
    let job = job("nvshmem_ptr");
    let there = job.counterpart(address, pe as usize);
    if job.reaches(pe as usize) { there } else { 0 }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_mc_ptr(team: c_int, address: u64) -> u64 {
    let job = job("nvshmemx_mc_ptr");
    job.multicast(job.team(team), address).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmem_team_split_strided(
    parent: c_int,
    start: c_int,
    stride: c_int,
    size: c_int,
    config: *const c_void,
    mask: c_long,
    team: *mut c_int,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *team = -1 };
    assert!(config.is_null() && mask == 0);
    if fails("nvshmem_team_split_strided") || start < 0 || stride < 1 || size < 1 {
        return 1;
    }
    let [start, stride, size] = [start, stride, size].map(|number| number as usize);
    let wanted = Team { start, stride, size };
    match job("nvshmem_team_split_strided").split(parent, wanted) {
        Ok(made) => {
            // SAFETY: as the caller promises.
            unsafe { *team = made.unwrap_or(-1) };
            0
        }
        Err(()) => 1,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_team_destroy(team: c_int) {
    let _ = fails("nvshmem_team_destroy");
    job("nvshmem_team_destroy").destroy(team);
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_team_my_pe(team: c_int) -> c_int {
    let job = job("nvshmem_team_my_pe");
    job.team(team).position(job.me).map_or(-1, |index| index as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_team_n_pes(team: c_int) -> c_int {
    job("nvshmem_team_n_pes").team(team).size as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_team_translate_pe(from: c_int, pe: c_int, to: c_int) -> c_int {
    let job = job("nvshmem_team_translate_pe");
    let there = job.team(from).pes().nth(pe as usize).and_then(|pe| job.team(to).position(pe));
    there.map_or(-1, |index| index as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_cumodule_init(module: usize) -> c_int {
    c_int::from(fails("nvshmemx_cumodule_init") || module == 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_cumodule_finalize(module: usize) -> c_int {
    c_int::from(fails("nvshmemx_cumodule_finalize") || module == 0)
}
