//! Memory that is lent to messages of ranks on other hosts for as long as a call: results are received where they belong, and not in a
//! mirror.
//!
//! A loan ends before its call does, whatever comes of the call: then nothing more is received there, not even the rest of a message
//! that has begun. So safe code never has memory that a message may still change.
#![allow(unsafe_code)] // S2 (as the lender promises)

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use super::wire::Wire;
use crate::sync::lock;

/// Memory for what a rank stages for an exchange, from byte `at` on.
struct Loan {
    from: usize,
    epoch: u32,
    at: usize,
    first: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it may be written until the loan ends, by any thread.
unsafe impl Send for Loan {}

/// The loans of a group.
#[derive(Default)]
pub(super) struct Lent(Mutex<Vec<Loan>>);

/// The same, none of which ends as long as this is held.
pub(super) struct Held<'l>(MutexGuard<'l, Vec<Loan>>);

impl Lent {
    pub(super) fn hold(&self) -> Held<'_> {
        Held(lock(&self.0))
    }
}

impl Held<'_> {
    /// Where so many bytes that a rank stages for an exchange are received, if that is lent.
    pub(super) fn place(
        &self,
        from: usize,
        epoch: u32,
        at: usize,
        bytes: usize,
    ) -> Option<NonNull<u8>> {
        let has = |loan: &&Loan| {
            let within = at.checked_sub(loan.at).and_then(|within| within.checked_add(bytes));
            (loan.from, loan.epoch) == (from, epoch) && within.is_some_and(|end| end <= loan.bytes)
        };
        let loan = self.0.iter().find(has)?;
        NonNull::new(loan.first.as_ptr().wrapping_add(at - loan.at))
    }
}

/// The loans of a call. They end when it is dropped.
pub(crate) struct Loans<'w>(pub(super) &'w Wire);

impl Loans<'_> {
    /// Receives what rank `from`, of another host, stages for an exchange from byte `at` on there, and not in the mirror. Exchanges
    /// before the last one are over.
    ///
    /// # Safety
    /// From when the rank may send them until this is dropped, nobody else touches so many bytes from `first` on.
    pub(crate) unsafe fn lend(
        &self,
        (from, epoch, at): (usize, u32, usize),
        first: *mut u8,
        bytes: usize,
    ) {
        let Some(first) = NonNull::new(first) else { return };
        let mut loans = lock(&self.0.lent.0);
        loans.retain(|loan| epoch.wrapping_sub(loan.epoch) <= 1);
        loans.push(Loan { from, epoch, at, first, bytes });
    }
}

impl Drop for Loans<'_> {
    fn drop(&mut self) {
        lock(&self.0.lent.0).clear(); // waits for what is being copied there
        self.0.end_loans(); // and for what is being received there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_a_loan_goes_there() {
        let mut memory = [0_u8; 100];
        let first = NonNull::new(memory.as_mut_ptr()).unwrap();
        let lent = Lent::default();
        lent.0.lock().unwrap().push(Loan { from: 3, epoch: 7, at: 1000, first, bytes: 100 });
        let place = |from, epoch, at, bytes| lent.hold().place(from, epoch, at, bytes);
        assert_eq!(place(3, 7, 1000, 100), Some(first));
        let middle = first.as_ptr().wrapping_add(40);
        assert_eq!(place(3, 7, 1040, 60).map(NonNull::as_ptr), Some(middle));
        for (from, epoch, at, bytes) in [
            (2, 7, 1000, 100),
            (3, 8, 1000, 100),
            (3, 7, 999, 100),
            (3, 7, 1000, 101),
            (3, 7, 1040, 61),
            (3, 7, 0, 1),
            (3, 7, 1050, usize::MAX),
        ] {
            assert_eq!(place(from, epoch, at, bytes), None, "{from} {epoch} {at} {bytes}");
        }
    }
}
