//! Kernels of torch's operators that need no Python, registered with its dispatcher through torch's stable C interface.
//!
//! torch calls them without the interpreter's lock. A reduction that was made before goes straight into the stream
//! (`quick.rs` has what is remembered of it). Any other is handed on, unchanged, to the operator of the same name in the namespace
//! `symmem`, whose kernel is the package's own, in Python.
#![allow(unsafe_code)] // S4: torch's functions, called as its headers say; values on its stack belong to whoever has them

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};
use pyo3::prelude::*;
use symmem::ReduceOp;

use crate::collectives::{Part, reduce_op};
use crate::dtype::Type;
use crate::error::{exception, usage};
use crate::handle::Handle;
use crate::memory::Place;
use crate::quick;
use crate::stream::is_kept;

const OP: &str = "all_reduce";
/// The interface as of 2.10, the first that has strings.
const VERSION: u64 = 2 << 56 | 10 << 48;

/// A value on torch's stack: here always a pointer.
type Value = u64;
type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);
type Ask<T> = unsafe extern "C" fn(Value, *mut T) -> c_int;

macro_rules! table {
    ($($name:ident: $symbol:literal => $type:ty),* $(,)?) => {
        /// torch's functions, by what they do.
        struct Torch {
            $($name: $type,)*
            /// torch's numbers of types.
            types: Vec<(i32, &'static Type)>,
            /// torch's names of operators.
            operators: Vec<(String, ReduceOp)>,
            current_stream: unsafe extern "C" fn(i32, *mut usize) -> c_int,
            error_type: usize,
        }

        impl Torch {
            fn new(
                library: &Library,
                current_stream: unsafe extern "C" fn(i32, *mut usize) -> c_int,
                types: Vec<(i32, &'static Type)>,
                operators: Vec<(String, ReduceOp)>,
            ) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: S4: of the types that torch's headers, or the C++ ABI, give them.
                    $($name: *unsafe { library.get::<$type>($symbol) }?,)*
                    types,
                    operators,
                    current_stream,
                    // SAFETY: only its address is taken.
                    error_type: unsafe { library.get::<*const c_void>(b"_ZTISt13runtime_error\0") }?
                        .into_raw() as usize,
                })
            }
        }
    };
}

table! {
    library: b"aoti_torch_library_init_impl\0" =>
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, u32, *mut usize) -> c_int,
    implement: b"torch_library_impl\0" =>
        unsafe extern "C" fn(usize, *const c_char, Kernel, u64) -> c_int,
    call: b"torch_call_dispatcher\0" =>
        unsafe extern "C" fn(*const c_char, *const c_char, *mut Value, u64) -> c_int,
    text: b"torch_string_c_str\0" => Ask<*const c_char>,
    text_length: b"torch_string_length\0" => Ask<usize>,
    delete_text: b"torch_delete_string\0" => unsafe extern "C" fn(Value) -> c_int,
    delete_tensor: b"aoti_torch_delete_tensor_object\0" => unsafe extern "C" fn(Value) -> c_int,
    address: b"aoti_torch_get_data_ptr\0" => Ask<usize>,
    count: b"aoti_torch_get_numel\0" => Ask<i64>,
    dtype: b"aoti_torch_get_dtype\0" => Ask<i32>,
    contiguous: b"aoti_torch_is_contiguous\0" => Ask<bool>,
    device: b"aoti_torch_get_device_type\0" => Ask<i32>,
    device_index: b"aoti_torch_get_device_index\0" => Ask<i32>,
    dimensions: b"aoti_torch_get_dim\0" => Ask<i64>,
    sizes: b"aoti_torch_get_sizes\0" => Ask<*const i64>,
    strides: b"aoti_torch_get_strides\0" => Ask<*const i64>,
    empty: b"aoti_torch_empty_strided\0" =>
        unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Value) -> c_int,
    make_error: b"__cxa_allocate_exception\0" => unsafe extern "C" fn(usize) -> *mut c_void,
    fill_error: b"_ZNSt13runtime_errorC1EPKc\0" => unsafe extern "C" fn(*mut c_void, *const c_char),
    drop_error: b"_ZNSt13runtime_errorD1Ev\0" => unsafe extern "C" fn(*mut c_void),
    throw: b"__cxa_throw\0" =>
        unsafe extern "C-unwind" fn(*mut c_void, usize, unsafe extern "C" fn(*mut c_void)) -> !,
}

static TORCH: OnceLock<Torch> = OnceLock::new();

thread_local! {
    /// What a kernel in Python raised.
    static ASIDE: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Keeps an exception for whoever called the kernel in Python that it ended: the dispatcher would lose it.
#[pyfunction]
pub(crate) fn set_aside(raised: Bound<'_, PyAny>) {
    ASIDE.set(Some(PyErr::from_value(raised)));
}

/// Where the result of a reduction goes.
#[derive(Clone, Copy, PartialEq)]
enum To {
    Itself,
    Output,
    New,
}

/// The operators with such kernels.
const KERNELS: [(&CStr, Kernel); 3] = [
    (c"two_shot_all_reduce_", two_shot_all_reduce_),
    (c"one_shot_all_reduce", one_shot_all_reduce),
    (c"one_shot_all_reduce_out", one_shot_all_reduce_out),
];

/// # Safety
/// For torch to call, with the operator's arguments on the stack.
unsafe extern "C-unwind" fn two_shot_all_reduce_(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as the caller promises.
    unsafe { run::<3>(stack, To::Itself, c"symmem::two_shot_all_reduce_") }
}

/// # Safety
/// Likewise.
unsafe extern "C-unwind" fn one_shot_all_reduce(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as the caller promises.
    unsafe { run::<3>(stack, To::New, c"symmem::one_shot_all_reduce") }
}

/// # Safety
/// Likewise.
unsafe extern "C-unwind" fn one_shot_all_reduce_out(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as the caller promises.
    unsafe { run::<4>(stack, To::Output, c"symmem::one_shot_all_reduce_out") }
}

/// # Safety
/// There are `N` values on the stack: a tensor, two texts, and an output where `to` says so. They are ours.
unsafe fn run<const N: usize>(stack: *mut Value, to: To, long: &CStr) {
    let Some(torch) = TORCH.get() else { return };
    // SAFETY: as the caller promises.
    let values: [Value; N] = unsafe { stack.cast::<[Value; N]>().read() };
    let output = values.get(3).copied().unwrap_or(0);
    // SAFETY: S4: tensors and texts, as the caller promises.
    let result = match unsafe { torch.quick((values[0], values[1], values[2]), to, output) } {
        Some(Ok(result)) => result,
        // SAFETY: S4: the values are still ours, and go with the call.
        None => return unsafe { torch.hand_on(stack, long) },
        Some(Err(error)) => {
            let raised = Python::attach(|py| exception(py, error));
            // SAFETY: S4: nobody else has them.
            unsafe { torch.delete(&values, 0) };
            return torch.raise(raised);
        }
    };
    // SAFETY: S4: nobody else has them; the result is torch's again.
    unsafe {
        torch.delete(&values, result);
        stack.write(result);
    }
}

impl Torch {
    /// What torch says of a tensor, or of a text.
    ///
    /// # Safety
    /// S4: it is one, of the kind that is asked.
    unsafe fn ask<T: Copy>(&self, ask: Ask<T>, of: Value) -> Option<T> {
        let mut answer = std::mem::MaybeUninit::uninit();
        // SAFETY: S4: as the caller promises; where it says that it worked, it has written an answer.
        unsafe { (ask(of, answer.as_mut_ptr()) == 0).then(|| answer.assume_init()) }
    }

    /// # Safety
    /// S4: a text, which lives as long.
    unsafe fn bytes<'a>(&self, text: Value) -> Option<&'a [u8]> {
        // SAFETY: S4: as the caller promises.
        let (first, len) =
            unsafe { (self.ask(self.text, text)?, self.ask(self.text_length, text)?) };
        // SAFETY: S4: torch's own bytes, so many.
        Some(unsafe { std::slice::from_raw_parts(first.cast(), len) })
    }

    /// The lengths of a tensor's dimensions, or by `of` its strides.
    ///
    /// # Safety
    /// S4: a tensor, which lives as long.
    unsafe fn shape<'a>(&self, of: Ask<*const i64>, tensor: Value) -> Option<&'a [i64]> {
        // SAFETY: S4: as the caller promises.
        let (first, len) = unsafe { (self.ask(of, tensor)?, self.ask(self.dimensions, tensor)?) };
        if len == 0 {
            return Some(&[]);
        }
        // SAFETY: S4: torch's own numbers, so many.
        Some(unsafe { std::slice::from_raw_parts(first, len as usize) })
    }

    /// Puts a reduction that was made before into the stream; the tensor that has the result. `None`: it was not, or there is
    /// something unusual about it, and nothing was done.
    ///
    /// # Safety
    /// S4: a tensor and two texts; a tensor where `to` says that there is an output.
    unsafe fn quick(
        &self,
        (input, operator, group): (Value, Value, Value),
        to: To,
        output: Value,
    ) -> Option<symmem::Result<Value>> {
        // SAFETY: S4: as the caller promises, here and below.
        unsafe {
            let address = self.ask(self.address, input)?;
            let (handle, offset) = quick::named(address, self.bytes(group)?)?;
            let Place::Cuda(number) = handle.place() else { return None };
            let operator = self.bytes(operator)?;
            let (_, op) = self.operators.iter().find(|(name, _)| name.as_bytes() == operator)?;
            let code = self.ask(self.dtype, input)?;
            let (_, dtype) = self.types.iter().find(|(known, _)| *known == code)?;
            if !self.ask(self.contiguous, input)? {
                return None;
            }
            let mut stream = 0;
            if (self.current_stream)(number as i32, &mut stream) != 0 || !is_kept(number, stream) {
                return None;
            }
            let count = usize::try_from(self.ask(self.count, input)?).ok()?;
            let part = Part { op: OP, dtype, offset, count, stream };
            let result = match to {
                To::Itself => input,
                To::Output if self.are_alike(input, output)? => output,
                To::Output => return None,
                To::New => self.like(input, code)?,
            };
            let out = if to == To::Itself { None } else { Some(self.ask(self.address, result)?) };
            let done = launch(&handle, part, *op, out);
            if to == To::New && !matches!(done, Some(Ok(()))) {
                (self.delete_tensor)(result);
            }
            Some(done?.map(|()| result))
        }
    }

    /// Whether two tensors have the same shape, type and device, and the second is contiguous.
    ///
    /// # Safety
    /// S4: tensors.
    unsafe fn are_alike(&self, a: Value, b: Value) -> Option<bool> {
        // SAFETY: S4: as the caller promises.
        unsafe {
            let device = |of| Some((self.ask(self.device, of)?, self.ask(self.device_index, of)?));
            Some(
                self.shape(self.sizes, a)? == self.shape(self.sizes, b)?
                    && self.ask(self.dtype, a)? == self.ask(self.dtype, b)?
                    && device(a)? == device(b)?
                    && self.ask(self.contiguous, b)?,
            )
        }
    }

    /// A new tensor of the same shape and on the same device.
    ///
    /// # Safety
    /// S4: a tensor of that type.
    unsafe fn like(&self, tensor: Value, dtype: i32) -> Option<Value> {
        // SAFETY: S4: as the caller promises.
        unsafe {
            let (sizes, strides) =
                (self.shape(self.sizes, tensor)?, self.shape(self.strides, tensor)?);
            let device = (self.ask(self.device, tensor)?, self.ask(self.device_index, tensor)?);
            let (rank, mut made) = (sizes.len() as i64, 0);
            let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
            let done = (self.empty)(rank, sizes, strides, dtype, device.0, device.1, &mut made);
            (done == 0).then_some(made)
        }
    }

    /// Has the kernel in Python do it, and raises what it raised.
    ///
    /// # Safety
    /// S4: the stack has the operator's arguments, which go with the call.
    unsafe fn hand_on(&self, stack: *mut Value, to: &CStr) {
        // SAFETY: S4: as the caller promises.
        let called = unsafe { (self.call)(to.as_ptr(), c"".as_ptr(), stack, VERSION) };
        let raised = ASIDE.take();
        if called != 0 {
            let failed =
                || usage_error(&format!("{to:?} could not be called by torch's dispatcher"));
            return self.raise(raised.unwrap_or_else(failed));
        }
        if let Some(raised) = raised {
            // SAFETY: S4: the kernel returned one of its tensors in the place of a result.
            unsafe { (self.delete_tensor)(stack.read()) };
            self.raise(raised);
        }
    }

    /// Deletes the arguments of an operator but `kept`.
    ///
    /// # Safety
    /// S4: tensors and, in the second and third place, texts, which nobody uses any more.
    unsafe fn delete(&self, values: &[Value], kept: Value) {
        for (place, &value) in values.iter().enumerate().filter(|(_, value)| **value != kept) {
            let delete = if matches!(place, 1 | 2) { self.delete_text } else { self.delete_tensor };
            // SAFETY: S4: as the caller promises.
            unsafe { delete(value) };
        }
    }

    /// Ends the operator with an exception, as torch knows them: of C++, with the text of the one in Python, which torch makes the
    /// cause of the one that Python sees.
    fn raise(&self, raised: PyErr) {
        let text = Python::attach(|py| {
            let text = raised.value(py).to_string().replace('\0', " ");
            raised.restore(py);
            text
        });
        let text = CString::new(text).unwrap_or_default();
        // SAFETY: S4: as a `throw std::runtime_error(text)` of C++ does it. This frame has nothing to drop but the text,
        // which goes while the exception passes.
        unsafe {
            let error = (self.make_error)(2 * size_of::<usize>());
            (self.fill_error)(error, text.as_ptr());
            (self.throw)(error, self.error_type, self.drop_error)
        }
    }
}

fn launch(
    handle: &Handle,
    part: Part,
    op: ReduceOp,
    out: Option<usize>,
) -> Option<symmem::Result<()>> {
    // SAFETY: the output was compared with the input, or made like it; torch keeps its memory until streams are done.
    unsafe { handle.reduce_in_stream(part, op, out) }
}

fn usage_error(text: &str) -> PyErr {
    pyo3::exceptions::PyRuntimeError::new_err(text.to_owned())
}

/// Registers kernels for a dispatch key of torch's, whose libraries lie in `folder`. `types` and `operators` are torch's
/// names, by the library's. The names of the operators that have them now; the namespace `symmem` must have the same.
#[pyfunction]
pub(crate) fn register_kernels(
    py: Python<'_>,
    folder: &str,
    key: &str,
    types: Vec<(String, String)>,
    operators: Vec<(String, String)>,
) -> PyResult<Vec<String>> {
    let missing =
        |e: libloading::Error| usage(py, "register_kernels", "torch 2.10 or later", e.to_string());
    if TORCH.get().is_none() {
        let torch = load(py, Path::new(folder), types, operators)?.map_err(missing)?;
        let _ = TORCH.set(torch); // another thread's is the same
    }
    let key = CString::new(key)?;
    let Some(torch) = TORCH.get() else { return Ok(Vec::new()) };
    let failed = || usage_error("torch's dispatcher took no kernel");
    let mut library = 0;
    // SAFETY: S4: texts that live as long as the call.
    let made = unsafe {
        (torch.library)(c"symm_mem".as_ptr(), key.as_ptr(), c"symmem".as_ptr(), 0, &mut library)
    };
    if made != 0 {
        return Err(failed());
    }
    let mut names = Vec::new();
    for (name, kernel) in KERNELS {
        // SAFETY: S4: the library is never let go, and the kernel takes what an operator of that name has.
        if unsafe { (torch.implement)(library, name.as_ptr(), kernel, VERSION) } != 0 {
            return Err(failed());
        }
        names.push(name.to_string_lossy().into_owned());
    }
    Ok(names)
}

/// torch's functions, from libraries that it has loaded; the outer error is one of the arguments.
fn load(
    py: Python<'_>,
    folder: &Path,
    types: Vec<(String, String)>,
    operators: Vec<(String, String)>,
) -> PyResult<Result<Torch, libloading::Error>> {
    let operator = |(torchs, name): (String, String)| Ok((torchs, reduce_op(py, OP, &name)?));
    let operators = operators.into_iter().map(operator).collect::<PyResult<_>>()?;
    // They stay for the life of the process, as torch does.
    let open = |name: &str| {
        // SAFETY: torch itself has loaded it.
        unsafe { Library::open(Some(folder.join(name)), RTLD_NOW) }.map(std::mem::ManuallyDrop::new)
    };
    let found = || {
        let (torch, cuda) = (open("libtorch_cpu.so")?, open("libtorch_cuda.so")?);
        let number = |(torchs, name): (String, String)| {
            let symbol = format!("aoti_torch_dtype_{torchs}\0");
            // SAFETY: S4: of the type that torch's headers give it.
            let number = unsafe { torch.get::<unsafe extern "C" fn() -> i32>(symbol.as_bytes()) };
            // SAFETY: S4: it only answers.
            Some((unsafe { number.ok()?() }, Type::by_name(&name)?))
        };
        let types = types.into_iter().filter_map(number).collect();
        // SAFETY: S4: of the type that torch's headers give it.
        let current_stream = *unsafe { cuda.get(b"aoti_torch_get_current_cuda_stream\0") }?;
        Torch::new(&torch, current_stream, types, operators)
    };
    Ok(found())
}
