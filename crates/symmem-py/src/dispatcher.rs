//! Kernels of torch's operators that do not run Python, registered with its dispatcher through torch's stable C interface.
//!
//! torch calls them without the GIL. An all-reduce of memory that was at a rendezvous goes straight into the stream (`quick.rs`). Any
//! other call is forwarded, unchanged, to the operator of the same name in the namespace `symmem`, whose kernel is in Python.
#![allow(unsafe_code)] // S4: torch's functions, called as its headers say; values on its stack belong to their current holder

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};
use pyo3::prelude::*;
use symmem::ReduceOp;

use crate::collectives::reduce_op;
use crate::dtype::Type;
use crate::error::{exception, usage};
use crate::memory::Location;
use crate::quick;
use crate::stream::is_kept;
use crate::wait::{raised, signalled};

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
    /// The exception that a kernel in Python raised.
    static ASIDE: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Keeps the exception of a kernel in Python for its native caller: the dispatcher would lose it.
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

/// A tensor of torch's that lives while this is used.
#[derive(Clone, Copy, PartialEq)]
struct Tensor(Value);

/// A string of torch's, likewise.
#[derive(Clone, Copy)]
struct Text(Value);

/// The arguments of an operator.
struct Arguments {
    input: Tensor,
    operator: Text,
    group: Text,
    output: Option<Tensor>,
}

/// # Safety
/// There are `N` values on the stack: a tensor, two texts, and an output where `to` says so. They are ours.
unsafe fn run<const N: usize>(stack: *mut Value, to: To, long: &CStr) {
    let Some(torch) = TORCH.get() else { return };
    // SAFETY: as the caller promises.
    let values: [Value; N] = unsafe { stack.cast::<[Value; N]>().read() };
    let given = Arguments {
        input: Tensor(values[0]),
        operator: Text(values[1]),
        group: Text(values[2]),
        output: values.get(3).copied().map(Tensor),
    };
    match (torch.quick(&given, to), raised()) {
        // The arguments are still ours; the call consumes them.
        (None, _) => torch.hand_on(stack, long),
        (Some(done), Some(raised)) => {
            torch.delete(&given, None);
            if let (To::New, Ok(result)) = (to, done) {
                torch.delete_one(result);
            }
            torch.raise(raised);
        }
        (Some(Ok(result)), None) => {
            torch.delete(&given, Some(result));
            // SAFETY: there is a place for the result, which is torch's again.
            unsafe { stack.write(result.0) };
        }
        (Some(Err(error)), None) => {
            torch.delete(&given, None);
            torch.raise(Python::attach(|py| exception(py, error)));
        }
    }
}

impl Torch {
    /// The result of a function of torch's for a tensor.
    fn ask<T: Copy>(&self, ask: Ask<T>, of: Tensor) -> Option<T> {
        answer(ask, of.0)
    }

    fn bytes(&self, text: Text) -> Option<&[u8]> {
        let (first, len) = (answer(self.text, text.0)?, answer(self.text_length, text.0)?);
        // SAFETY: S4: torch's own bytes, so many, as long as the text lives.
        Some(unsafe { std::slice::from_raw_parts(first.cast(), len) })
    }

    /// The lengths of a tensor's dimensions, or by `of` its strides.
    fn shape(&self, of: Ask<*const i64>, tensor: Tensor) -> Option<&[i64]> {
        let (first, len) = (self.ask(of, tensor)?, self.ask(self.dimensions, tensor)?);
        if len == 0 {
            return Some(&[]);
        }
        // SAFETY: S4: torch's own numbers, so many, as long as the tensor lives.
        Some(unsafe { std::slice::from_raw_parts(first, len as usize) })
    }

    /// Kind and number.
    fn device_of(&self, tensor: Tensor) -> Option<(i32, i32)> {
        Some((self.ask(self.device, tensor)?, self.ask(self.device_index, tensor)?))
    }

    /// Puts an all-reduce into the stream, and returns the tensor with the result. `None` if the call is unusual, and nothing was done.
    fn quick(&self, given: &Arguments, to: To) -> Option<symmem::Result<Tensor>> {
        let input = given.input;
        let address = self.ask(self.address, input)?;
        let (handle, offset) = quick::named(address, self.bytes(given.group)?)?;
        let Location::Cuda(number) = handle.place() else { return None };
        let operator = self.bytes(given.operator)?;
        let (_, op) = self.operators.iter().find(|(name, _)| name.as_bytes() == operator)?;
        let code = self.ask(self.dtype, input)?;
        let (_, dtype) = self.types.iter().find(|(known, _)| *known == code)?;
        if !self.ask(self.contiguous, input)? {
            return None;
        }
        let mut stream = 0;
        // SAFETY: S4: it writes the one word.
        let asked = unsafe { (self.current_stream)(number as i32, &mut stream) };
        if asked != 0 || !is_kept(number, stream) {
            return None;
        }
        let count = usize::try_from(self.ask(self.count, input)?).ok()?;
        let result = match (to, given.output) {
            (To::Itself, _) => input,
            (To::Output, Some(output)) if self.are_alike(input, output)? => output,
            (To::Output, _) => return None,
            (To::New, _) => self.like(input, code)?,
        };
        let out = if to == To::Itself { None } else { Some(self.ask(self.address, result)?) };
        let (what, range) = ((*dtype, *op), (offset, count));
        // The output is like the input, and torch keeps the memory of both until streams are done with it.
        let work = handle.quick_all_reduce(what, range, out, stream);
        let done = work.map(|work| symmem::interruptible(signalled, work));
        if to == To::New && !matches!(done, Some(Ok(()))) {
            self.delete_one(result);
        }
        Some(done?.map(|()| result))
    }

    /// Whether two tensors have the same shape, type and device, and the second is contiguous.
    fn are_alike(&self, a: Tensor, b: Tensor) -> Option<bool> {
        Some(
            self.shape(self.sizes, a)? == self.shape(self.sizes, b)?
                && self.ask(self.dtype, a)? == self.ask(self.dtype, b)?
                && self.device_of(a)? == self.device_of(b)?
                && self.ask(self.contiguous, b)?,
        )
    }

    /// A new tensor of the same shape and type, on the same device.
    fn like(&self, tensor: Tensor, dtype: i32) -> Option<Tensor> {
        let (sizes, strides) = (self.shape(self.sizes, tensor)?, self.shape(self.strides, tensor)?);
        let (kind, number) = self.device_of(tensor)?;
        let (rank, mut made) = (sizes.len() as i64, 0);
        let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
        // SAFETY: S4: so many sizes and strides.
        let done = unsafe { (self.empty)(rank, sizes, strides, dtype, kind, number, &mut made) };
        (done == 0).then_some(Tensor(made))
    }

    /// Calls the kernel in Python with the arguments on the stack, which it consumes, and raises its exception.
    fn hand_on(&self, stack: *mut Value, to: &CStr) {
        // SAFETY: S4: torch's own stack, of an operator with the same arguments and results.
        let called = unsafe { (self.call)(to.as_ptr(), c"".as_ptr(), stack, VERSION) };
        let raised = ASIDE.take();
        if called != 0 {
            let failed =
                || usage_error(&format!("{to:?} could not be called by torch's dispatcher"));
            return self.raise(raised.unwrap_or_else(failed));
        }
        if let Some(raised) = raised {
            // SAFETY: the kernel returned one of its tensors in the place of a result.
            self.delete_one(Tensor(unsafe { stack.read() }));
            self.raise(raised);
        }
    }

    /// Deletes the arguments of an operator but `kept`.
    fn delete(&self, given: &Arguments, kept: Option<Tensor>) {
        let tensors = [Some(given.input), given.output].into_iter().flatten();
        tensors.filter(|tensor| Some(*tensor) != kept).for_each(|tensor| self.delete_one(tensor));
        for text in [given.operator, given.group] {
            // SAFETY: S4: ours, and not used again.
            unsafe { (self.delete_text)(text.0) };
        }
    }

    fn delete_one(&self, tensor: Tensor) {
        // SAFETY: S4: ours, and not used again.
        unsafe { (self.delete_tensor)(tensor.0) };
    }

    /// Ends the operator with a C++ exception, as torch expects, with the message of the Python exception.
    fn raise(&self, raised: PyErr) {
        let text = Python::attach(|py| {
            let text = raised.value(py).to_string().replace('\0', " ");
            raised.restore(py); // some versions of torch make it the cause of the exception in Python
            text
        });
        let text = CString::new(text).unwrap_or_default();
        // As a `throw std::runtime_error(text)` of C++ does it. SAFETY: S4: as long as such an object.
        let error = unsafe { (self.make_error)(2 * size_of::<usize>()) };
        // SAFETY: S4: fills what was made for it.
        unsafe { (self.fill_error)(error, text.as_ptr()) };
        // SAFETY: S4: a whole exception. The text goes while it passes this frame.
        unsafe { (self.throw)(error, self.error_type, self.drop_error) }
    }
}

/// The result of a function of torch's for a value.
fn answer<T: Copy>(ask: Ask<T>, of: Value) -> Option<T> {
    let mut answer = std::mem::MaybeUninit::uninit();
    // SAFETY: S4: a live value of the kind that is asked, see `Tensor` and `Text`.
    let failed = unsafe { ask(of, answer.as_mut_ptr()) } != 0;
    // SAFETY: where it worked, it has written an answer.
    (!failed).then(|| unsafe { answer.assume_init() })
}

fn usage_error(text: &str) -> PyErr {
    pyo3::exceptions::PyRuntimeError::new_err(text.to_owned())
}

/// Registers kernels for a dispatch key of torch's, whose libraries are in `folder`. `types` and `operators` map torch's names to
/// the library's. Returns the names of the operators; the namespace `symmem` must have the same operators.
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
    let failed = || usage_error("torch's dispatcher refused a kernel");
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
        // SAFETY: S4: the library is never freed, and the kernel takes the arguments of that operator.
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
    let operator =
        |(torchs, name): (String, String)| Ok((torchs, reduce_op(py, OP.into(), &name)?));
    let operators = operators.into_iter().map(operator).collect::<PyResult<_>>()?;
    // They stay loaded until the process ends, as torch does.
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
            let number = number.ok()?;
            // SAFETY: S4: it only answers.
            Some((unsafe { number() }, Type::by_name(&name)?))
        };
        let types = types.into_iter().filter_map(number).collect();
        // SAFETY: S4: of the type that torch's headers give it.
        let current_stream = *unsafe { cuda.get(b"aoti_torch_get_current_cuda_stream\0") }?;
        Torch::new(&torch, current_stream, types, operators)
    };
    Ok(found())
}
