//! The caller's memory in arguments: arrays of any library, and buffers.
#![allow(unsafe_code)] // S1 (the argument is held), S3 (lengths are checked); aliasing is the caller's, as documented

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use symmem::Element;
use symmem::cuda::{View, ViewMut};

use crate::array::Array;
use crate::dlpack::Import;
use crate::dtype::Type;
use crate::error::{Op, usage};
use crate::memory::Location;

/// The address, size in bytes and type name of any library's array.
#[pyfunction]
pub(crate) fn span(array: &Bound<'_, PyAny>) -> PyResult<(usize, usize, &'static str)> {
    let slice = Slice::input("span", array)?;
    Ok((slice.address, slice.bytes, slice.dtype.unwrap_or(Type::of(symmem::DType::U8)).name))
}

/// The memory of an argument, which this keeps alive.
pub(crate) struct Slice {
    address: usize,
    bytes: usize,
    /// `None` for bytes of any type.
    dtype: Option<&'static Type>,
    /// `None` if the caller has checked it.
    place: Option<Location>,
    _keep: Option<Py<PyAny>>,
}

impl Slice {
    /// No elements.
    pub(crate) const EMPTY: Self =
        Self { address: 0, bytes: 0, dtype: None, place: None, _keep: None };

    /// Memory at an address. The caller keeps it alive during the call, and has checked its type and place.
    pub(crate) const fn raw(address: usize, bytes: usize) -> Self {
        Self { address, bytes, dtype: None, place: None, _keep: None }
    }

    /// An argument that is written to.
    pub(crate) fn output(op: impl Into<Op>, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of(op.into(), given, true)
    }

    /// An argument that is only read.
    pub(crate) fn input(op: impl Into<Op>, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of(op.into(), given, false)
    }

    fn of(op: Op, given: &Bound<'_, PyAny>, write: bool) -> PyResult<Self> {
        if let Ok(array) = given.cast::<Array>() {
            let (keep, array) = (given.clone().unbind(), array.get());
            let bytes = array.elements() * array.dtype.size();
            let (address, place) = (array.address, Some(array.place));
            return Ok(Self { address, bytes, dtype: Some(array.dtype), place, _keep: Some(keep) });
        }
        if let Ok(raw) = given.cast::<PyTuple>() {
            let (address, bytes, owner): (usize, usize, Py<PyAny>) = raw.extract()?;
            return Ok(Self { address, bytes, dtype: None, place: None, _keep: Some(owner) });
        }
        let Some(import) = Import::of(op, given)? else { return Self::of_buffer(op, given, write) };
        if write && import.read_only {
            return Err(usage(given.py(), op, "an array that may be written", "a read-only one"));
        }
        let place = if import.on_host { Location::Host } else { Location::Cuda(import.device) };
        Ok(Self {
            address: import.address,
            bytes: import.bytes,
            dtype: Some(import.dtype),
            place: Some(place),
            _keep: Some(import.keep),
        })
    }

    /// By the buffer protocol, through `ctypes`: the stable ABI has it only since Python 3.11.
    fn of_buffer(op: Op, given: &Bound<'_, PyAny>, write: bool) -> PyResult<Self> {
        let py = given.py();
        let view = py.import("builtins")?.call_method1("memoryview", (given,)).map_err(|_| {
            let got = given.get_type().to_string();
            usage(py, op, "an array (DLPack or the buffer protocol)", got)
        })?;
        let bytes: usize = view.getattr("nbytes")?.extract()?;
        let ctypes = py.import("ctypes")?;
        let kind = ctypes.getattr("c_char")?.mul(bytes)?;
        let read_only: bool = view.getattr("readonly")?.extract()?;
        let buffer = match (read_only, write) {
            (true, true) => {
                return Err(usage(py, op, "a buffer that may be written", "a read-only one"));
            }
            (true, false) => kind.call_method1("from_buffer_copy", (view,))?,
            _ => kind.call_method1("from_buffer", (view,))?,
        };
        let address = ctypes.call_method1("addressof", (&buffer,))?.extract()?;
        let keep = Some(buffer.unbind());
        Ok(Self { address, bytes, dtype: None, place: Some(Location::Host), _keep: keep })
    }

    /// The elements' type, if the argument has one.
    pub(crate) fn dtype(&self) -> Option<&'static Type> {
        self.dtype
    }

    /// Refuses an argument of another type than `dtype`, or on another kind of device than `place`.
    pub(crate) fn check(
        &self,
        py: Python<'_>,
        op: impl Into<Op>,
        dtype: &Type,
        place: Location,
    ) -> PyResult<()> {
        let op = op.into();
        if let Some(other) = self.dtype.filter(|other| *other != dtype) {
            return Err(usage(py, op, format!("an array of {}", dtype.name), other.name));
        }
        if let Some(other) = self.place.filter(|other| *other != place) {
            return Err(usage(py, op, format!("an array on {place}"), format!("one on {other}")));
        }
        let size = dtype.size();
        if !self.address.is_multiple_of(size.min(8)) || !self.bytes.is_multiple_of(size) {
            let expected = format!("whole, aligned elements of {}", dtype.name);
            let got = format!("{} bytes at {:#x}", self.bytes, self.address);
            return Err(usage(py, op, expected, got));
        }
        Ok(())
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many elements there are.
    pub(crate) fn count<T: Element>(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    /// Whether it overlaps the bytes at `address`.
    pub(crate) fn touches(&self, address: usize, bytes: usize) -> bool {
        self.address < address.saturating_add(bytes) && address < self.address + self.bytes
    }

    /// Whether it overlaps another.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.touches(other.address, other.bytes)
    }

    /// The elements, to read.
    ///
    /// # Safety
    /// `check` has accepted the type and the place, and no thread writes them while the slice lives.
    pub(crate) unsafe fn elements<T: Element>(&self) -> &[T] {
        if self.bytes == 0 {
            return &[];
        }
        let first = self.address as *const T;
        // SAFETY: S1 by what is held; S3: this many bytes, aligned, as the caller promises.
        unsafe { std::slice::from_raw_parts(first, self.bytes / size_of::<T>()) }
    }

    /// The elements on a device, to read.
    ///
    /// # Safety
    /// As `elements`, until what is put into the stream of the call is done.
    pub(crate) unsafe fn view<T: Element>(&self) -> View<'_, T> {
        // SAFETY: as the caller promises.
        unsafe { View::from_raw(self.address as u64, self.bytes / size_of::<T>()) }
    }

    /// The elements on a device, to write.
    ///
    /// # Safety
    /// As `elements_mut`, until what is put into the stream of the call is done.
    pub(crate) unsafe fn view_mut<T: Element>(&mut self) -> ViewMut<'_, T> {
        // SAFETY: as the caller promises.
        unsafe { ViewMut::from_raw(self.address as u64, self.bytes / size_of::<T>()) }
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// As `elements`, and no other thread accesses them while the slice lives.
    pub(crate) unsafe fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        if self.bytes == 0 {
            return &mut [];
        }
        let first = self.address as *mut T;
        // SAFETY: as in `elements`.
        unsafe { std::slice::from_raw_parts_mut(first, self.bytes / size_of::<T>()) }
    }
}
