//! Collectives. One table says what each of them takes and how it runs: on host memory, in a device's stream, and on ordinary
//! arrays. Everything else that calls a collective, from Python or from torch's dispatcher, makes a [`Call`] of it.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: no other thread accesses the elements of a call)

pub(crate) mod methods;
pub(crate) mod one_sided;
pub(crate) mod slices;

use pyo3::prelude::*;
use symmem::cuda::{self, Algorithm, Stream, ViewMut};
use symmem::{Element, Error, Number, ReduceOp, Symmetric};

use crate::argument::Slice;
use crate::dtype::Type;
use crate::error::{Op, usage};
use crate::handle::Handle;
use crate::wait::detached;

/// The columns: variant, name in Python, name in errors, whether it `reduces` elements or `moves` them. Then its methods, as far as
/// it has them: of symmetric memory (on a device with a stream as well), of a group for ordinary arrays, and of a group for an
/// output whose length only the call finds out.
macro_rules! collectives {
    (
        ($op:ident, $algorithm:ident, $root:ident, $columns:ident, $rows:ident, $counts:ident, $input:ident, $out:ident)
        $($variant:ident $name:literal $shown:literal $kind:ident
            $(, memory $method:ident($($argument:expr),*))?
            $(, group $slices:ident($($given:expr),*))?
            $(, vector $vector:ident($($sent:expr),*))?;)*
    ) => {
        /// One of the library's collectives.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Collective {
            $($variant,)*
        }

        impl Collective {
            /// Those of symmetric memory, by name.
            pub(crate) const OF_MEMORY: &'static [(&'static str, Self)] =
                &[$($((($name, Self::$variant), stringify!($method)).0,)?)*];

            /// A collective on arrays by its name.
            pub(crate) fn of_arrays(name: &str) -> Option<Self> {
                const KNOWN: &[(&str, Collective)] =
                    &[$($((($name, Collective::$variant), stringify!($slices)).0,)?)*];
                KNOWN.iter().find(|(known, _)| *known == name).map(|(_, found)| *found)
            }

            /// The operation that errors name.
            pub(crate) const fn shown(self) -> &'static str {
                match self {
                    $(Self::$variant => $shown,)*
                }
            }

            const fn reduces(self) -> bool {
                match self {
                    $(Self::$variant => matches!(stringify!($kind).as_bytes(), b"reduces"),)*
                }
            }
        }

        #[allow(unused_variables, reason = "each collective uses some of them")]
        impl Call {
            fn on_host<T: Number>(&mut self, memory: &mut Symmetric<T>, $out: &mut [T]) -> symmem::Result<()> {
                let Self { op: $op, algorithm: $algorithm, root: $root, columns: $columns, rows: $rows, .. } = self;
                let ($op, $root, $columns) = (*$op, *$root, *$columns);
                let $algorithm = $algorithm.on_host().ok_or_else(|| {
                    let got = format!("{:?}", *$algorithm);
                    let refused = Error::usage(self.collective.shown(), "an algorithm for host memory", got);
                    refused.at_rank(memory.group().rank())
                })?;
                match self.collective {
                    $($(Collective::$variant => memory.$method($($argument),*),)?)*
                    _ => Err(self.of_arrays_only(memory.group())),
                }
            }

            fn in_stream<T: Number>(
                &mut self,
                memory: &mut cuda::Symmetric<T>,
                $out: ViewMut<'_, T>,
                stream: &Stream,
            ) -> symmem::Result<()> {
                let Self { op: $op, algorithm: $algorithm, root: $root, columns: $columns, rows: $rows, .. } = self;
                let ($op, $algorithm, $root, $columns) = (*$op, *$algorithm, *$root, *$columns);
                match self.collective {
                    $($(Collective::$variant => memory.$method($($argument,)* stream),)?)*
                    _ => Err(self.of_arrays_only(memory.group())),
                }
            }

            pub(crate) fn on_slices<T: Number>(
                &self,
                group: &symmem::Group,
                $input: &[T],
                $out: &mut [T],
            ) -> symmem::Result<()> {
                let ($op, $root) = (self.op, self.root);
                match self.collective {
                    $($(Collective::$variant => group.$slices($($given),*),)?)*
                    _ => Err(self.of_memory_only(group)),
                }
            }

            /// What the rank receives, and how much from each rank. `counts` are the numbers of elements for each rank.
            pub(crate) fn on_vector<T: Number>(
                &self,
                group: &symmem::Group,
                $input: &[T],
                $counts: &[usize],
            ) -> symmem::Result<(Vec<T>, Vec<usize>)> {
                let mut received = Vec::new();
                let $out = &mut received;
                let lengths = match self.collective {
                    $($(Collective::$variant => group.$vector($($sent),*),)?)*
                    _ => Err(self.of_memory_only(group)),
                }?;
                Ok((received, lengths))
            }
        }
    };
}

collectives! {
    (op, algorithm, root, columns, rows, counts, input, out)
    AllReduce "all_reduce" "all_reduce" reduces, memory all_reduce_with(op, algorithm), group all_reduce(out, op);
    AllReduceInto "all_reduce_into" "all_reduce" reduces, memory all_reduce_into(op, out);
    ReduceScatter "reduce_scatter" "reduce_scatter" reduces,
        memory reduce_scatter(op, out), group reduce_scatter(input, op, out);
    ReduceScatterLastDim "reduce_scatter_last_dim" "reduce_scatter" reduces,
        memory reduce_scatter_last_dim(op, columns, out);
    Reduce "reduce" "reduce" reduces, memory reduce(op, root, out), group reduce(input, op, root, out);
    Scan "scan" "scan" reduces, group scan(out, op);
    ExclusiveScan "exclusive_scan" "exclusive_scan" reduces, group exclusive_scan(out, op);
    AllGather "all_gather" "all_gather" moves, memory all_gather(out), group all_gather(input, out);
    AllGatherV "all_gather_v" "all_gather_v" moves, vector all_gather_v(input, out);
    AllToAll "all_to_all" "all_to_all" moves, memory all_to_all(out), group all_to_all(input, out);
    AllToAllV "all_to_all_v" "all_to_all_v" moves,
        memory all_to_all_rows(rows, out), vector all_to_all_v(input, counts, out);
    Broadcast "broadcast" "broadcast" moves, memory broadcast(root), group broadcast(out, root);
    Gather "gather" "gather" moves, memory gather(root, out), group gather(input, root, out);
    Scatter "scatter" "scatter" moves, memory scatter(root, out), group scatter(input, root, out);
}

/// A collective with its arguments, on `count` elements of `dtype` from byte `offset` of a handle's memory on.
pub(crate) struct Call {
    pub(crate) collective: Collective,
    pub(crate) dtype: &'static Type,
    pub(crate) offset: usize,
    pub(crate) count: usize,
    /// Of a device; 0 is its default stream.
    pub(crate) stream: usize,
    pub(crate) op: ReduceOp,
    pub(crate) algorithm: Algorithm,
    pub(crate) root: usize,
    /// Elements of a row, where rows are divided among ranks.
    pub(crate) columns: usize,
    pub(crate) rows: Option<Rows>,
}

/// What Python names of a call.
pub(crate) struct Named<'a, 'py> {
    pub(crate) collective: &'a str,
    pub(crate) dtype: &'a Bound<'py, PyAny>,
    pub(crate) op: &'a str,
    pub(crate) algorithm: &'a str,
}

impl Call {
    /// A call with the arguments that most have, on `count` elements of `dtype` from byte `offset` on.
    pub(crate) fn new(
        collective: Collective,
        dtype: &'static Type,
        (offset, count): (usize, usize),
        op: ReduceOp,
        stream: usize,
    ) -> Self {
        let (algorithm, root, columns, rows) = (Algorithm::Auto, 0, 0, None);
        Self { collective, dtype, offset, count, stream, op, algorithm, root, columns, rows }
    }

    pub(crate) fn named(
        py: Python<'_>,
        rank: usize,
        named: &Named<'_, '_>,
        range: (usize, usize),
        stream: usize,
    ) -> PyResult<Self> {
        let found = Collective::OF_MEMORY.iter().find(|(name, _)| *name == named.collective);
        let Some(&(_, collective)) = found else {
            let known: Vec<_> = Collective::OF_MEMORY.iter().map(|(name, _)| *name).collect();
            let expected = format!("one of {}", known.join(", "));
            return Err(usage(py, Op::at("collective", rank), expected, named.collective));
        };
        let at = Op::at(collective.shown(), rank);
        let (op, dtype) = (reduce_op(py, at, named.op)?, Type::named(at, named.dtype)?);
        let algorithm = algorithm(py, at, named.algorithm)?;
        Ok(Self { algorithm, ..Self::new(collective, dtype, range, op, stream) })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.count.saturating_mul(self.dtype.size())
    }

    /// The type as which the library takes the elements; `None` if it cannot reduce them as asked.
    pub(crate) fn element(&self) -> Option<symmem::DType> {
        let reduced = self.dtype.number().filter(|dtype| self.op.applies_to(dtype.kind()));
        if self.collective.reduces() { reduced } else { Some(self.dtype.moved) }
    }

    fn of_arrays_only(&self, group: &symmem::Group) -> Error {
        let op = self.collective.shown();
        Error::usage(op, "an ordinary array", "symmetric memory").at_rank(group.rank())
    }

    fn of_memory_only(&self, group: &symmem::Group) -> Error {
        let op = self.collective.shown();
        Error::usage(op, "symmetric memory", "an ordinary array").at_rank(group.rank())
    }

    pub(crate) fn checked_element(&self, py: Python<'_>, at: Op) -> PyResult<symmem::DType> {
        self.element().ok_or_else(|| {
            let expected = format!("a type that {:?} applies to", self.op.name());
            usage(py, at, expected, self.dtype.name)
        })
    }
}

pub(crate) fn reduce_op(py: Python<'_>, at: Op, name: &str) -> PyResult<ReduceOp> {
    ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
        let known: Vec<_> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
        usage(py, at, format!("one of the operators {}", known.join(", ")), name)
    })
}

/// The algorithms of all-reduce; the last two run on devices.
const ALGORITHMS: [(&str, Algorithm); 6] = [
    ("auto", Algorithm::Auto),
    ("staged", Algorithm::Staged),
    ("one_shot", Algorithm::OneShot),
    ("two_shot", Algorithm::TwoShot),
    ("multimem", Algorithm::Multimem),
    ("copy_engine", Algorithm::CopyEngine),
];

fn algorithm(py: Python<'_>, at: Op, name: &str) -> PyResult<Algorithm> {
    let known = ALGORITHMS.into_iter().find(|(known, _)| *known == name);
    known.map(|(_, algorithm)| algorithm).ok_or_else(|| {
        let names = ALGORITHMS.map(|(name, _)| name).join(", ");
        usage(py, at, format!("one of the algorithms {names}"), name)
    })
}

impl Handle {
    /// A part of the memory, to call collectives on.
    fn part<T: Element>(&self, offset: usize, count: usize) -> symmem::Result<Symmetric<T>> {
        // SAFETY: S2 as documented for users; bounds and alignment are checked there.
        unsafe { self.raw().part(offset, count) }
    }

    /// Checks a call and its output, and makes it without the interpreter's lock.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        mut call: Call,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let at = self.op(call.collective.shown());
        self.check_open(py, at.name)?;
        call.checked_element(py, at)?;
        let out = match out {
            None => Slice::EMPTY,
            Some(out) => Slice::output(at, out)?,
        };
        out.check(py, at, call.dtype, self.place())?;
        if self.overlaps(&call, &out) {
            let expected = "an output apart from the memory that is read";
            return Err(usage(py, at, expected, "one that overlaps it"));
        }
        // SAFETY: all that it asks for is checked above; S2 as documented for users.
        detached(py, || unsafe { self.perform(&mut call, out) })
    }

    /// The work of an all-reduce in place, or into as many elements at `out`. `None` if it needs checks that are made elsewhere: its
    /// type, its operator or its output is unusual, or there is nothing to do.
    pub(crate) fn quick_all_reduce(
        &self,
        (dtype, op): (&'static Type, ReduceOp),
        range: (usize, usize),
        out: Option<usize>,
        stream: usize,
    ) -> Option<impl FnOnce() -> symmem::Result<()> + Send> {
        let collective = out.map_or(Collective::AllReduce, |_| Collective::AllReduceInto);
        let mut call = Call::new(collective, dtype, range, op, stream);
        let out = out.map_or(Slice::EMPTY, |address| Slice::raw(address, call.bytes()));
        let is_usual = call.count > 0 && call.element().is_some() && self.is_open();
        if !is_usual || self.overlaps(&call, &out) {
            return None;
        }
        // SAFETY: checked above, and S2 and S3 for the output: callers hold a tensor of that type and length on this device.
        Some(move || unsafe { self.perform(&mut call, out) })
    }

    /// Whether an output is a part of what peers read during the call.
    pub(crate) fn overlaps(&self, call: &Call, out: &Slice) -> bool {
        let touches = |base: &usize| out.touches(base.saturating_add(call.offset), call.bytes());
        self.mapped().buffers.iter().any(touches)
    }

    /// Makes a call, or puts it into its stream. Needs no interpreter.
    ///
    /// # Safety
    /// The world is open. The call has an [`Call::element`]. `out` has elements of its type, on the same device, apart from the
    /// memory of the call, until the stream is done with them.
    pub(crate) unsafe fn perform(&self, call: &mut Call, mut out: Slice) -> symmem::Result<()> {
        let (range, dtype) = ((call.offset, call.count), call.element());
        let done = symmem::with_element!(dtype.unwrap_or(call.dtype.moved), T => match self.cuda() {
            None => {
                let mut memory = self.part::<T>(range.0, range.1)?;
                // SAFETY: as the caller promises.
                call.on_host(&mut memory, unsafe { out.elements_mut() })
            }
            Some(device) => {
                let stream = self.stream(device, call.stream);
                // SAFETY: as the caller promises.
                let out = unsafe { out.view_mut::<T>() };
                self.mapped().with_part(device, range, |memory| call.in_stream(memory, out, &stream))
            }
        });
        done.unwrap_or_else(|| Err(no_element(call)))
    }
}

/// Structs have no name in Python, and so are in no call.
pub(crate) fn no_element(call: &Call) -> Error {
    Error::usage(call.collective.shown(), "a type that Python has", "a struct")
}

/// A part of a device's memory, to call collectives on.
pub(crate) fn device_part<T: Element>(
    device: &cuda::Symmetric<u8>,
    offset: usize,
    count: usize,
) -> symmem::Result<cuda::Symmetric<T>> {
    // SAFETY: S2 as documented for users; bounds and alignment are checked there.
    unsafe { device.part(offset, count) }
}

const ROWS: &str = "all_to_all_v";

/// How Python gives them: elements of a row; handle, offset and count of the splits; the output for what was received; and the
/// alignment of experts' rows, or 0 for the way back from them.
pub(crate) type RowsGiven<'py> =
    (usize, (Bound<'py, Handle>, usize, usize), Bound<'py, PyAny>, Option<usize>);

/// The arguments that only this collective has.
pub(crate) struct Rows {
    len: usize,
    /// `None`: rows by rank. 0: back from experts. Else to experts, whose rows begin at a multiple of it.
    align: Option<usize>,
    /// Numbers of rows in symmetric memory: handle, byte offset and count.
    splits: (Handle, usize, usize),
    received: Slice,
}

impl Rows {
    /// The arguments for rows in the memory of `handle`, checked.
    pub(crate) fn new(py: Python<'_>, handle: &Handle, given: RowsGiven<'_>) -> PyResult<Self> {
        let (len, (splits, offset, count), received, align) = given;
        let at: Op = handle.op(ROWS);
        let received = Slice::output(at, &received)?;
        received.check(py, at, Type::of(symmem::DType::I64), handle.place())?;
        Ok(Self { len, align, splits: (splits.get().share(), offset, count), received })
    }

    fn of(given: &mut Option<Self>) -> symmem::Result<&mut Self> {
        given.as_mut().ok_or_else(|| Error::usage(ROWS, "rows", "none"))
    }
}

trait HostRows<T> {
    fn all_to_all_rows(&mut self, rows: &mut Option<Rows>, out: &mut [T]) -> symmem::Result<()>;
}

impl<T: Element> HostRows<T> for Symmetric<T> {
    fn all_to_all_rows(&mut self, rows: &mut Option<Rows>, out: &mut [T]) -> symmem::Result<()> {
        let Rows { len, align, splits: (handle, offset, count), received } = Rows::of(rows)?;
        let splits = &mut handle.part(*offset, *count)?;
        // SAFETY: `Rows::new` checked type and place; S2 as documented for users.
        let got = unsafe { received.elements_mut() };
        match *align {
            None => self.all_to_all_v(*len, splits, out, got),
            Some(0) => self.all_to_all_v_2d_offset(*len, splits, out, got),
            Some(align) => self.all_to_all_v_2d(*len, splits, align, out, got),
        }
    }
}

trait DeviceRows<T> {
    fn all_to_all_rows(
        &mut self,
        rows: &mut Option<Rows>,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> symmem::Result<()>;
}

impl<T: Element> DeviceRows<T> for cuda::Symmetric<T> {
    fn all_to_all_rows(
        &mut self,
        rows: &mut Option<Rows>,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> symmem::Result<()> {
        let Rows { len, align, splits: (handle, offset, count), received } = Rows::of(rows)?;
        let device = handle.cuda().ok_or_else(|| {
            let refused =
                Error::usage(ROWS, "splits on the device of the rows", "splits on the host");
            refused.at_rank(handle.raw().rank())
        })?;
        let splits = &mut device_part(device, *offset, *count)?;
        // SAFETY: `Rows::new` checked type and place; S2 as documented for users.
        let got = unsafe { received.view_mut() };
        match *align {
            None => self.all_to_all_v(*len, splits, out, got, stream),
            Some(0) => self.all_to_all_v_2d_offset(*len, splits, out, got, stream),
            Some(align) => self.all_to_all_v_2d(*len, splits, align, out, got, stream),
        }
    }
}
