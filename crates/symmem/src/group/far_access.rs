//! What a rank does in its own memory for members on other hosts: puts, reads and atomics, within bounds.
#![allow(unsafe_code)] // S2 (by atomics, in a phase that the caller checked or that is checked here), S3 (bounds checked here)

use super::far_message::Request;
use crate::memory::block::{Access, Block};
use crate::memory::region::Region;
use crate::memory::units::{load_units, store_units};
use crate::signal::InvalidMessage;
use crate::sync::Ordering;
use crate::sync::shared::{AtomicU32, AtomicU64};

/// What was found, or why the request was refused.
pub(super) type Reply = Result<Vec<u8>, String>;

/// `bytes` of the data of a block at a multiple of `unit`, which is a size of atomics.
fn data_at(block: &Block, at: usize, bytes: usize, unit: usize) -> Option<*mut u8> {
    let fits = at.checked_add(bytes).is_some_and(|end| end <= block.shape().bytes);
    let is_whole = [1, 2, 4, 8].contains(&unit) && at.is_multiple_of(unit);
    let data: &Region = block.region();
    let first = data.at::<u8>(at, bytes).ok().filter(|_| fits && is_whole)?;
    bytes.is_multiple_of(unit).then_some(first.as_ptr())
}

/// Stores bytes from byte `at` of a block on, which everyone may write.
pub(super) fn put(
    block: &Block,
    (at, unit): (usize, usize),
    bytes: &[u8],
) -> Result<(), InvalidMessage> {
    let to = data_at(block, at, bytes.len(), unit).ok_or(InvalidMessage)?;
    crate::sync::atomic::fence(Ordering::Release); // whoever sees a word sees all earlier messages
    // SAFETY: within the data of a block that is held here, at a multiple of the unit; in this phase everyone touches it by such
    // atomics.
    unsafe { store_units(unit, bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

/// Executes a peer's request, which reads at most so many bytes.
pub(super) fn answer(
    block: &Block,
    (at, unit): (usize, usize),
    request: Request,
    most: usize,
) -> Result<Reply, InvalidMessage> {
    let (bytes, access) = match request {
        Request::Read(bytes) => (bytes, Access::Read),
        Request::Add(_) | Request::Swap { .. } => (unit, Access::Write),
    };
    if !block.allows(access) {
        return Ok(Err("a refusal: the memory is in another phase on that rank".to_owned()));
    }
    if bytes > most {
        return Err(InvalidMessage);
    }
    let data = data_at(block, at, bytes, unit).ok_or(InvalidMessage)?;
    macro_rules! change {
        ($atomic:ty, $value:ty) => {{
            // SAFETY: within the data of a block that is held here, at a multiple of the unit; in this phase everyone touches it by
            // such atomics.
            let word = unsafe { <$atomic>::from_ptr(data.cast()) };
            let before = match request {
                Request::Swap { expected, new } => {
                    let (expected, new) = (expected as $value, new as $value);
                    word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
                        .unwrap_or_else(|found| found)
                }
                Request::Add(value) => word.fetch_add(value as $value, Ordering::AcqRel),
                Request::Read(_) => return Err(InvalidMessage),
            };
            Ok(Ok(before.to_le_bytes().to_vec()))
        }};
    }
    match (request, unit) {
        (Request::Read(_), _) => {
            let mut found = vec![0; bytes];
            // SAFETY: as above; or nobody writes it in this phase.
            unsafe { load_units(unit, data, found.as_mut_ptr(), bytes) };
            Ok(Ok(found))
        }
        (_, 4) => change!(AtomicU32, u32),
        (_, 8) => change!(AtomicU64, u64),
        _ => Err(InvalidMessage),
    }
}
