//! DLPack, by which arrays are handed from one Python library to another without a copy: both directions.
//!
//! The structures are those of DLPack 1.0 and, for consumers that do not ask for a version, of those before it.
#![allow(unsafe_code)] // S1 (an export holds what keeps its memory), and the ownership rules of DLPack's capsules

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::dtype::Type;
use crate::error::Op;

/// kDLCPU, kDLCUDA, kDLCUDAHost and kDLCUDAManaged: the host reaches the first and the last two.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const HOST_KINDS: [i32; 3] = [CPU, 3, 13];
/// kDLROCM and kDLROCMHost.
const ROCM: i32 = 10;
const ROCM_HOST: i32 = 11;
const READ_ONLY: u64 = 1;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    /// Kind and number.
    device: [i32; 2],
    ndim: i32,
    dtype: Number,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Number {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// What is handed out: where it lies, its shape in elements, and what keeps it.
pub(crate) struct Export {
    pub(crate) address: usize,
    pub(crate) device: (i32, i32),
    pub(crate) dtype: &'static Type,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    /// Only held.
    pub(crate) _keep: Box<dyn Send + Sync>,
}

/// An export behind the structure that its consumer sees, which comes first so that both have one address.
#[repr(C)]
struct Handed<M> {
    managed: M,
    export: Export,
}

impl Export {
    /// A capsule of the newest kind that the consumer knows.
    pub(crate) fn into_capsule(
        self,
        py: Python<'_>,
        max_version: Option<(u32, u32)>,
    ) -> PyResult<Py<PyAny>> {
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let managed = |tensor| ManagedVersioned {
                version: [1, 0],
                context: std::ptr::null_mut(),
                deleter: Some(delete::<ManagedVersioned>),
                flags: 0,
                tensor,
            };
            return self.hand_out(py, VERSIONED, managed, drop_unused::<ManagedVersioned>);
        }
        let managed = |tensor| Managed {
            tensor,
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Managed>),
        };
        self.hand_out(py, PLAIN, managed, drop_unused::<Managed>)
    }

    fn hand_out<M>(
        mut self,
        py: Python<'_>,
        name: &'static CStr,
        managed: impl FnOnce(Tensor) -> M,
        drop_unused: ffi::PyCapsule_Destructor,
    ) -> PyResult<Py<PyAny>> {
        // The arrays do not move with the export that owns them.
        let tensor = Tensor {
            data: self.address as *mut c_void,
            device: [self.device.0, self.device.1],
            ndim: self.shape.len() as i32,
            dtype: Number { code: self.dtype.code, bits: self.dtype.bits(), lanes: 1 },
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let handed = Box::into_raw(Box::new(Handed { managed: managed(tensor), export: self }));
        // SAFETY: a pointer that is not null and a name that lives for ever; `drop_unused` takes it back once.
        let capsule =
            unsafe { ffi::PyCapsule_New(handed.cast(), name.as_ptr(), Some(drop_unused)) };
        if capsule.is_null() {
            // SAFETY: made above, and no capsule has it.
            drop(unsafe { Box::from_raw(handed) });
        }
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
    }
}

/// The consumer is done.
///
/// # Safety
/// `managed` is the first field of a `Handed<M>` in a box of its own, and is not used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(managed.cast::<Handed<M>>()) });
}

/// The capsule goes; had its consumer taken the contents, it would have renamed it.
///
/// # Safety
/// The capsule was made by `hand_out` with an `M`.
unsafe extern "C" fn drop_unused<M>(capsule: *mut ffi::PyObject) {
    for name in [PLAIN, VERSIONED] {
        // SAFETY: a capsule, and a name that lives for ever.
        if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } != 0 {
            // SAFETY: valid with this name, as just seen.
            let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
            // SAFETY: made by `hand_out`, and no consumer took it.
            unsafe { delete::<M>(managed.cast()) };
        }
    }
}

/// What another library handed to us; lives as long as its capsule.
pub(crate) struct Import {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) dtype: &'static Type,
    pub(crate) on_host: bool,
    /// Its number, if it is not the host.
    pub(crate) device: u32,
    pub(crate) read_only: bool,
    pub(crate) keep: Py<PyAny>,
}

impl Import {
    /// Asks `owner` for its memory; `None` where it has no DLPack.
    pub(crate) fn of(op: Op, owner: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = owner.py();
        let Ok(method) = owner.getattr("__dlpack__") else { return Ok(None) };
        let asked = PyDict::new(py);
        asked.set_item("max_version", (1, 0))?;
        let (kind, _): (i32, i32) = owner.call_method0("__dlpack_device__")?.extract()?;
        check_kind(op, kind)?;
        if !HOST_KINDS.contains(&kind) {
            asked.set_item("stream", -1)?; // the call's own stream orders what comes
        }
        let capsule = match method.call((), Some(&asked)) {
            Err(e) if e.is_instance_of::<PyTypeError>(py) => method.call0()?, // from before versions
            other => other?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let (tensor, flags) = read(&capsule)?;
        check_kind(op, tensor.device[0])?;
        let dtype = (tensor.dtype.lanes == 1)
            .then(|| Type::by_code(tensor.dtype.code, tensor.dtype.bits))
            .flatten()
            .ok_or_else(|| {
                let Number { code, bits, lanes } = tensor.dtype;
                let got = format!("DLPack's type code {code} of {bits} bits and {lanes} lanes");
                refusal(op, "an array of a type that symmem has", &got)
            })?;
        let elements = contiguous(&tensor).ok_or_else(|| {
            let (shape, strides) = tensor.dimensions();
            let got = format!("shape {shape:?} with strides {strides:?}");
            refusal(op, "an array that is contiguous (C order)", &got)
        })?;
        Ok(Some(Self {
            address: tensor.data as usize + tensor.byte_offset as usize,
            bytes: elements * dtype.size(),
            dtype,
            on_host: HOST_KINDS.contains(&tensor.device[0]),
            device: tensor.device[1].try_into().unwrap_or(0),
            read_only: flags & READ_ONLY != 0,
            keep: capsule.into_any().unbind(),
        }))
    }
}

/// Refuses memory that neither the host nor CUDA reaches: addresses of other devices mean something else.
fn check_kind(op: Op, kind: i32) -> PyResult<()> {
    if kind == CUDA || HOST_KINDS.contains(&kind) {
        return Ok(());
    }
    let name = if kind == ROCM || kind == ROCM_HOST { "ROCm" } else { "another device" };
    let got = format!("one of {name} (DLPack's kind {kind})");
    Err(refusal(op, "an array of the host or of CUDA", &got))
}

/// The exception that DLPack wants of a consumer that cannot take an array.
fn refusal(op: Op, expected: &str, got: &str) -> PyErr {
    PyBufferError::new_err(format!("{op}: expected {expected}, got {got}"))
}

/// The tensor in a capsule that has no consumer yet, and its flags.
fn read(capsule: &Bound<'_, PyCapsule>) -> PyResult<(Tensor, u64)> {
    let pointer = |name: &CStr| capsule.pointer_checked(Some(name)).ok();
    if let Some(managed) = pointer(VERSIONED).map(NonNull::cast::<ManagedVersioned>) {
        // SAFETY: DLPack's contract for a capsule of this name; only plain data is copied.
        let managed = unsafe { managed.as_ref() };
        if managed.version[0] > 1 {
            return Err(PyBufferError::new_err("an array of a DLPack version beyond 1"));
        }
        return Ok((managed.tensor, managed.flags));
    }
    let managed = pointer(PLAIN).map(NonNull::cast::<Managed>);
    let managed = managed.ok_or_else(|| PyBufferError::new_err("a capsule that is no DLPack's"))?;
    // SAFETY: as above.
    Ok((unsafe { managed.as_ref() }.tensor, 0))
}

impl Tensor {
    /// Shape and strides, in elements.
    fn dimensions(&self) -> (&[i64], &[i64]) {
        let dims = usize::try_from(self.ndim).unwrap_or(0);
        (entries(self.shape, dims), entries(self.strides, dims))
    }
}

/// How many elements there are, if they lie one after the other.
fn contiguous(tensor: &Tensor) -> Option<usize> {
    let (shape, strides) = tensor.dimensions();
    let count = shape.iter().try_fold(1_i64, |all, len| all.checked_mul(*len))?;
    let mut expected = 1_i64;
    for (len, stride) in shape.iter().zip(strides).rev().filter(|(len, _)| **len > 1) {
        if *stride != expected && count != 0 {
            return None;
        }
        expected = expected.checked_mul(*len)?;
    }
    usize::try_from(count).ok()
}

/// One number for each dimension; none where the producer left them out.
fn entries<'a>(first: *const i64, dims: usize) -> &'a [i64] {
    if first.is_null() || dims == 0 {
        return &[];
    }
    // SAFETY: DLPack's contract: as many entries as dimensions, which the capsule keeps.
    unsafe { std::slice::from_raw_parts(first, dims) }
}
