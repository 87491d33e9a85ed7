//! The collectives on arrays, once for every class that has them.

/// Gives a class the collectives on arrays. It has `run` and `run_on_vector`, which return `$done` and `$received`.
macro_rules! array_collectives {
    ($class:ident, $done:ty, $received:ty) => {
        #[pymethods]
        impl $class {
            /// Reduces all ranks' `data` element by element, in place. Collective. `data` is any contiguous array on the host.
            #[pyo3(signature = (data, op="sum", *, dtype=None))]
            fn all_reduce(
                &self,
                data: &Bound<'_, PyAny>,
                op: &str,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(data.py(), Collective::AllReduce, (None, Some(data)), (op, 0), dtype)
            }

            /// Copies all ranks' `data` to `out`, in rank order. Collective.
            #[pyo3(signature = (data, out, *, dtype=None))]
            fn all_gather(
                &self,
                data: &Bound<'_, PyAny>,
                out: &Bound<'_, PyAny>,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(
                    data.py(),
                    Collective::AllGather,
                    (Some(data), Some(out)),
                    ("sum", 0),
                    dtype,
                )
            }

            /// Reduces all ranks' `data`, and copies the r-th equal part to `out` of rank r. Collective.
            #[pyo3(signature = (data, out, op="sum", *, dtype=None))]
            fn reduce_scatter(
                &self,
                data: &Bound<'_, PyAny>,
                out: &Bound<'_, PyAny>,
                op: &str,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(
                    data.py(),
                    Collective::ReduceScatter,
                    (Some(data), Some(out)),
                    (op, 0),
                    dtype,
                )
            }

            /// Copies rank `root`'s `data` to all ranks. Collective.
            #[pyo3(signature = (data, root=0, *, dtype=None))]
            fn broadcast(
                &self,
                data: &Bound<'_, PyAny>,
                root: usize,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(data.py(), Collective::Broadcast, (None, Some(data)), ("sum", root), dtype)
            }

            /// Sends the r-th equal part of `data` to rank r; `out` receives the parts in rank order. Collective.
            #[pyo3(signature = (data, out, *, dtype=None))]
            fn all_to_all(
                &self,
                data: &Bound<'_, PyAny>,
                out: &Bound<'_, PyAny>,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(
                    data.py(),
                    Collective::AllToAll,
                    (Some(data), Some(out)),
                    ("sum", 0),
                    dtype,
                )
            }

            /// Reduces all ranks' `data` element by element into `out` of rank `root`. Collective. On other ranks `out` is not used.
            #[pyo3(signature = (data, out=None, op="sum", root=0, *, dtype=None))]
            fn reduce(
                &self,
                data: &Bound<'_, PyAny>,
                out: Option<&Bound<'_, PyAny>>,
                op: &str,
                root: usize,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                let arrays = (Some(data), out.filter(|_| self.rank() == root));
                self.run(data.py(), Collective::Reduce, arrays, (op, root), dtype)
            }

            /// Copies all ranks' `data` to `out` of rank `root`, in rank order. Collective. On other ranks `out` is not used.
            #[pyo3(signature = (data, out=None, root=0, *, dtype=None))]
            fn gather(
                &self,
                data: &Bound<'_, PyAny>,
                out: Option<&Bound<'_, PyAny>>,
                root: usize,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                let arrays = (Some(data), out.filter(|_| self.rank() == root));
                self.run(data.py(), Collective::Gather, arrays, ("sum", root), dtype)
            }

            /// Copies the r-th equal part of rank `root`'s `data` to `out` of rank r. Collective. On other ranks `data` is not used, and may
            /// be None.
            #[pyo3(signature = (data, out, root=0, *, dtype=None))]
            fn scatter(
                &self,
                data: Option<&Bound<'_, PyAny>>,
                out: &Bound<'_, PyAny>,
                root: usize,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                let arrays = (data.filter(|_| self.rank() == root), Some(out));
                self.run(out.py(), Collective::Scatter, arrays, ("sum", root), dtype)
            }

            /// Reduces the `data` of ranks 0 to this one element by element, in place. Collective. `op` is any operator but "avg".
            #[pyo3(signature = (data, op="sum", *, dtype=None))]
            fn scan(
                &self,
                data: &Bound<'_, PyAny>,
                op: &str,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(data.py(), Collective::Scan, (None, Some(data)), (op, 0), dtype)
            }

            /// As `scan`, but of the ranks before this one. Rank 0's `data` stays as it is.
            #[pyo3(signature = (data, op="sum", *, dtype=None))]
            fn exclusive_scan(
                &self,
                data: &Bound<'_, PyAny>,
                op: &str,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$done> {
                self.run(data.py(), Collective::ExclusiveScan, (None, Some(data)), (op, 0), dtype)
            }

            /// Returns all ranks' `data`, one after the other in rank order, and the number of elements from each rank. Collective. Ranks may
            /// have different numbers of elements.
            #[pyo3(signature = (data, *, dtype=None))]
            fn all_gather_v(
                &self,
                data: &Bound<'_, PyAny>,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$received> {
                self.run_on_vector(Collective::AllGatherV, data, Vec::new(), dtype)
            }

            /// Sends the first `counts[0]` elements of `data` to rank 0, the next `counts[1]` to rank 1, and so on. Returns the elements for
            /// this rank, in the order of their senders, and the number of elements from each rank. Collective.
            #[pyo3(signature = (data, counts, *, dtype=None))]
            fn all_to_all_v(
                &self,
                data: &Bound<'_, PyAny>,
                counts: Vec<usize>,
                dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<$received> {
                self.run_on_vector(Collective::AllToAllV, data, counts, dtype)
            }
        }
    };
}

pub(crate) use array_collectives;
