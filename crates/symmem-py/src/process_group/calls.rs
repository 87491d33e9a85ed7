//! What a process group's calls do, once it is their turn.
#![allow(unsafe_code)] // S2, S3 (addresses and lengths of tensors, which the call keeps alive, as documented for users)

use symmem::internals::Registrations;
use symmem::{DType, Error, Group, Result};

use super::parts::{Parts, Room, trim};
use crate::argument::Slice;
use crate::collectives::{Call, Collective, no_element};

/// A collective, and its memory in pieces.
pub(super) struct OnParts {
    pub(super) call: Call,
    pub(super) element: DType,
    pub(super) input: Parts,
    pub(super) out: Parts,
}

/// The result of a collective. If this rank has refused the call, the others do not wait for it.
#[cold]
fn refused<R>(group: &Group, made: Result<R>) -> Result<R> {
    if let Err(Error::Usage { .. }) = made {
        let _ = group.refuse(); // fails if the group is gone, and then nobody waits
    }
    made
}

/// The group of a call, and where its ranks have their memory.
pub(super) type On<'a> = (&'a Group, &'a Registrations);
/// Likewise, without for calls whose tensors are never read in place.
type OnSlices<'a> = (&'a Group, Option<&'a Registrations>);

/// Memory for input and output that are not in one piece.
pub(super) type Rooms = [Room; 2];

impl OnParts {
    /// Bytes of this rank's tensors.
    pub(super) fn bytes(&self) -> usize {
        self.input.bytes() + self.out.bytes()
    }

    /// Makes the collective, by the form for pieces of different sizes if this rank's differ, or another's.
    pub(super) fn run(&self, (group, memory): On<'_>, rooms: &mut Rooms) -> Result<()> {
        let is_even = self.input.are_equal() && self.out.are_equal();
        match self.call.collective {
            Collective::AllGather if !is_even => {
                self.on_vector(group, Collective::AllGatherV, rooms)
            }
            Collective::ReduceScatter if !is_even => self.reduce_each(group),
            Collective::AllToAll => match self.all_to_all(group, is_even, rooms) {
                // All ranks have this error, and nobody's call was made: those whose pieces are equal follow the others.
                Err(Error::Mismatch { what: "operation", theirs, .. })
                    if theirs.starts_with(Collective::AllToAll.shown()) =>
                {
                    self.all_to_all(group, false, rooms)
                }
                result => result,
            },
            _ => self.on_slices((group, Some(memory)), rooms),
        }
    }

    fn all_to_all(&self, group: &Group, is_even: bool, rooms: &mut Rooms) -> Result<()> {
        if is_even {
            return self.on_slices((group, None), rooms);
        }
        self.on_vector(group, Collective::AllToAllV, rooms)
    }

    fn on_slices(&self, (group, memory): OnSlices<'_>, rooms: &mut Rooms) -> Result<()> {
        let [for_input, for_out] = rooms;
        let size = self.element.size();
        let (whole_in, whole_out) = (self.input.whole(size), self.out.whole(size));
        let overlap = match (&whole_in, &whole_out) {
            (Some(input), Some(out)) => input.overlaps(out) && !self.is_own_part(group, input, out),
            _ => false,
        };
        // Of two that overlap, the smaller moves.
        let moves_out = overlap && self.out.bytes() < self.input.bytes();
        let input = match whole_in {
            Some(input) if !overlap || moves_out => input,
            _ => self.input.gathered(for_input),
        };
        let (mut out, moved) = match whole_out {
            Some(out) if !moves_out => (out, false),
            // Without input, the call is in place.
            _ if self.input.bytes() == 0 => (self.out.gathered(for_out), true),
            _ => (self.out.like(for_out), true),
        };
        self.on_elements((group, memory), &input, &mut out)?;
        if moved {
            // SAFETY: the room has the bytes of all pieces, which are tensors of the caller.
            unsafe { self.out.fill(for_out.as_ptr().cast()) };
        }
        rooms.iter_mut().for_each(trim);
        Ok(())
    }

    /// Whether one is this rank's part of the other, as it is where tensors are gathered or scattered in place.
    fn is_own_part(&self, group: &Group, input: &Slice, out: &Slice) -> bool {
        let (rank, ranks) = (group.rank(), group.size());
        let is_part = |part: &Slice, of: &Slice| {
            part.bytes().checked_mul(ranks) == Some(of.bytes())
                && part.address() == of.address() + rank * part.bytes()
        };
        match self.call.collective {
            Collective::AllGather => is_part(input, out),
            Collective::ReduceScatter => is_part(out, input),
            _ => false,
        }
    }

    fn on_elements(
        &self,
        (group, memory): OnSlices<'_>,
        input: &Slice,
        out: &mut Slice,
    ) -> Result<()> {
        let done = symmem::with_element!(self.element, T => match memory {
            // SAFETY: tensors are aligned to their elements, and rooms for all; the two are apart, or one is this rank's part of the other.
            Some(memory) => unsafe { self.on_registered::<T>(group, memory, input, out) },
            None => {
                // SAFETY: as above, and apart.
                self.call.on_slices(group, unsafe { input.elements::<T>() }, unsafe { out.elements_mut() })
            }
        });
        let made = done.unwrap_or_else(|| Err(no_element(&self.call)));
        if made.is_err() { refused(group, made) } else { made }
    }

    /// The call, in which peers read tensors where they lie if they can.
    ///
    /// # Safety
    /// Input and output are aligned to their elements. They are apart, or one is this rank's part of the other.
    unsafe fn on_registered<T: symmem::Number>(
        &self,
        group: &Group,
        memory: &Registrations,
        input: &Slice,
        out: &mut Slice,
    ) -> Result<()> {
        let Call { collective, op, root, .. } = self.call;
        let (from, to) = (input.address() as *const T, out.address() as *mut T);
        let (given, room) = (input.count::<T>(), out.count::<T>());
        match collective {
            // SAFETY: as the caller promises.
            Collective::AllReduce => memory.all_reduce(unsafe { out.elements_mut::<T>() }, op),
            // SAFETY: as the caller promises.
            Collective::Broadcast => memory.broadcast(unsafe { out.elements_mut::<T>() }, root),
            Collective::AllGather if room == given * group.size() => {
                // SAFETY: as the caller promises, and the lengths are right.
                unsafe { memory.all_gather(from, given, to) }
            }
            Collective::ReduceScatter if given == room * group.size() => {
                // SAFETY: as the caller promises, and the lengths are right.
                unsafe { memory.reduce_scatter(from, given, op, to) }
            }
            // The others have no form in place; those of wrong lengths are refused.
            // SAFETY: as the caller promises; one is not a part of the other, for that the lengths would be right.
            _ => self
                .call
                .on_slices(group, unsafe { input.elements::<T>() }, unsafe { out.elements_mut() }),
        }
    }

    /// The form that agrees on the lengths first.
    fn on_vector(&self, group: &Group, collective: Collective, rooms: &mut Rooms) -> Result<()> {
        let size = self.element.size();
        let expected = self.out.counts(size);
        let counts = self.input.counts(size);
        let input = self.input.whole(size).unwrap_or_else(|| self.input.gathered(&mut rooms[0]));
        let call = Call::new(collective, self.call.dtype, (0, 0), self.call.op, 0);
        let done = symmem::with_element!(self.element, T => {
            // SAFETY: as in `on_elements`.
            let made = call.on_vector(group, unsafe { input.elements::<T>() }, &counts);
            let (received, lengths) = if made.is_err() { refused(group, made) } else { made }?;
            // The others have made the call: this error is of this rank alone.
            if lengths != expected {
                let (expected, got) = (format!("{expected:?} elements by rank"), format!("{lengths:?}"));
                return Err(Error::usage(collective.shown(), expected, got).at_rank(group.rank()));
            }
            // SAFETY: as many elements as the pieces have, in memory of its own.
            unsafe { self.out.fill(received.as_ptr().cast()) };
            Ok(())
        });
        rooms.iter_mut().for_each(trim);
        done.unwrap_or_else(|| Err(no_element(&call)))
    }

    /// Reduces parts of different sizes, each to its rank.
    fn reduce_each(&self, group: &Group) -> Result<()> {
        for (root, input) in self.input.each().enumerate() {
            let out = if root == group.rank() { self.out.clone() } else { Parts::default() };
            let call = Call::new(Collective::Reduce, self.call.dtype, (0, 0), self.call.op, 0);
            let call = Call { root, ..call };
            let part = Self { call, element: self.element, input, out };
            part.on_slices((group, None), &mut Rooms::default())?;
        }
        Ok(())
    }
}
