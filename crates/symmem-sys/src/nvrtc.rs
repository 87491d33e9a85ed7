//! NVRTC: CUDA C++ to PTX, on the machine that runs it, for kernels of users.
//!
//! It needs neither a device nor the driver. The library's own kernels come as PTX and do not need it.
#![allow(unsafe_code)] // S4

use std::ffi::{CString, NulError, c_char, c_int};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

use crate::table::{functions, text};
use crate::{Library, Loaded, Missing};

/// Why there is no PTX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// There is no such library; a path in `SYMMEM_NVRTC` helps where it lies off the beaten track.
    #[error("{0}; its path can be given by SYMMEM_NVRTC")]
    Missing(#[from] Missing),
    /// The compiler refuses the source.
    #[error("{name} does not compile:\n{log}")]
    Refused {
        /// As given to [`compile`].
        name: String,
        /// What the compiler says.
        log: String,
    },
    /// A text has a zero in it, where C's end.
    #[error("a text for NVRTC has a zero in it: {0}")]
    Zero(#[from] NulError),
    /// Anything else.
    #[error("{call} failed: {text} ({code})")]
    Call {
        /// The function.
        call: &'static str,
        /// The library's code; -1 where it does not have the function.
        code: i32,
        /// The code in words.
        text: &'static str,
    },
}

impl Failure {
    /// `NVRTC_ERROR_COMPILATION`
    const COMPILATION: c_int = 6;

    fn missing_symbol(call: &'static str, _symbol: &str) -> Self {
        Self::Call { call, code: -1, text: "missing symbol" }
    }
}

/// What a call answers.
pub type Result<T> = std::result::Result<T, Failure>;

functions! {
    /// The library's functions, from `nvrtc.h`. A program is a pointer, here as a wide integer.
    struct Functions, Failure;
    nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    nvrtcCreateProgram(
        program: *mut usize, source: *const c_char, name: *const c_char, count: c_int,
        headers: *const *const c_char, names: *const *const c_char);
    nvrtcCompileProgram(program: usize, count: c_int, options: *const *const c_char);
    nvrtcGetPTXSize(program: usize, bytes: *mut usize);
    nvrtcGetPTX(program: usize, ptx: *mut c_char);
    nvrtcGetProgramLogSize(program: usize, bytes: *mut usize);
    nvrtcGetProgramLog(program: usize, log: *mut c_char);
    nvrtcDestroyProgram(program: *mut usize);
}

impl Functions {
    /// A code in words.
    fn failure(&self, call: &'static str, code: c_int) -> Failure {
        let text = match code {
            1 => "out of memory",
            2 => "the program cannot be created",
            3 => "invalid input",
            4 => "invalid program",
            5 => "invalid option",
            Failure::COMPILATION => "compilation",
            7 => "its file with built-in functions is missing",
            _ => "see nvrtcResult",
        };
        Failure::Call { call, code, text }
    }
}

/// The compiler.
#[derive(Debug)]
pub struct Nvrtc {
    c: Functions,
}

/// The compiler of this machine; looked for once in a process.
pub fn load() -> std::result::Result<&'static Nvrtc, Missing> {
    static LOADED: OnceLock<std::result::Result<Nvrtc, Missing>> = OnceLock::new();
    LOADED
        .get_or_init(|| crate::load(Library::Nvrtc).map(Nvrtc::new))
        .as_ref()
        .map_err(Clone::clone)
}

/// As [`Nvrtc::compile`], with the compiler of this machine.
pub fn compile(
    source: &str,
    name: &str,
    options: &[&str],
    headers: &[(&str, &str)],
) -> Result<String> {
    load()?.compile(source, name, options, headers)
}

impl Nvrtc {
    /// The compiler in this file.
    pub fn open(file: &Path) -> std::result::Result<Self, Missing> {
        crate::load_file(Library::Nvrtc, file).map(Self::new)
    }

    fn new(library: Loaded) -> Self {
        Self { c: Functions::new(library) }
    }

    /// `nvrtcVersion`: such as 12 and 4. PTX of version 12.x or 13.x wants a driver that supports as much.
    pub fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it only writes the two numbers.
        unsafe { self.c.nvrtcVersion(&mut major, &mut minor) }?;
        Ok((major, minor))
    }

    /// The PTX of `source`, which the compiler's messages call `name`.
    ///
    /// `headers` are names and texts of what the source may include; files are looked for only where an option such as
    /// `-I/usr/include` says so. Without an option `--gpu-architecture=compute_80` or so it is for the oldest device
    /// that the compiler knows.
    pub fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[&str],
        headers: &[(&str, &str)],
    ) -> Result<String> {
        let (source, called) = (CString::new(source)?, CString::new(name)?);
        let options = Strings::new(options.iter().copied())?;
        let texts = Strings::new(headers.iter().map(|header| header.1))?;
        let names = Strings::new(headers.iter().map(|header| header.0))?;
        let mut program = Program { c: &self.c, raw: 0 };
        let (text, called) = (source.as_ptr(), called.as_ptr());
        let (count, texts, names) = (texts.count(), texts.as_ptr(), names.as_ptr());
        // SAFETY: texts that end with a zero, as many headers as names; all live until the call returns, which copies.
        unsafe { self.c.nvrtcCreateProgram(&mut program.raw, text, called, count, texts, names) }?;
        let (count, options) = (options.count(), options.as_ptr());
        // SAFETY: a live program, and so many options.
        let compiled = unsafe { self.c.nvrtcCompileProgram(program.raw, count, options) };
        match compiled {
            Ok(()) => program.ptx(),
            Err(Failure::Call { code: Failure::COMPILATION, .. }) => {
                Err(Failure::Refused { name: name.to_owned(), log: program.log()? })
            }
            // An option that it does not know stands in the log as well.
            Err(failure) => match program.log() {
                Ok(log) if !log.is_empty() => Err(Failure::Refused { name: name.to_owned(), log }),
                _ => Err(failure),
            },
        }
    }
}

/// A program; destroyed when dropped.
struct Program<'a> {
    c: &'a Functions,
    raw: usize,
}

impl Program<'_> {
    fn ptx(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.nvrtcGetPTXSize(self.raw, &mut bytes) }?;
        let mut ptx = vec![0_u8; bytes];
        // SAFETY: it writes as many bytes as it has just said.
        unsafe { self.c.nvrtcGetPTX(self.raw, ptx.as_mut_ptr().cast()) }?;
        Ok(text(&ptx))
    }

    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.nvrtcGetProgramLogSize(self.raw, &mut bytes) }?;
        let mut log = vec![0_u8; bytes];
        // SAFETY: it writes as many bytes as it has just said.
        unsafe { self.c.nvrtcGetProgramLog(self.raw, log.as_mut_ptr().cast()) }?;
        Ok(text(&log).trim().to_owned())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if self.raw != 0 {
            // SAFETY: made by this library, and not used again. There is nothing to do about a failure.
            let _ = unsafe { self.c.nvrtcDestroyProgram(&mut self.raw) };
        }
    }
}

/// Texts for C, and pointers to them.
struct Strings {
    _texts: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self> {
        let texts = texts.map(CString::new).collect::<std::result::Result<Vec<_>, _>>()?;
        let pointers = texts.iter().map(|text| text.as_ptr()).collect();
        Ok(Self { _texts: texts, pointers })
    }

    fn count(&self) -> c_int {
        c_int::try_from(self.pointers.len()).unwrap_or(c_int::MAX)
    }

    fn as_ptr(&self) -> *const *const c_char {
        if self.pointers.is_empty() { ptr::null() } else { self.pointers.as_ptr() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_compiler_is_told_how_to_give_one() {
        if let Err(failure) = compile("", "empty.cu", &[], &[]) {
            let text = failure.to_string();
            assert!(text.contains("NVRTC could not be loaded"), "{text}");
            assert!(text.ends_with("its path can be given by SYMMEM_NVRTC"), "{text}");
        }
    }

    #[test]
    fn a_library_that_is_something_else_is_an_error_of_the_call() {
        let nvrtc = Nvrtc::new(Loaded::without_functions());
        let failure = nvrtc.compile("", "empty.cu", &[], &[]).unwrap_err();
        assert_eq!(failure.to_string(), "nvrtcCreateProgram failed: missing symbol (-1)");
    }

    #[test]
    fn a_zero_in_a_text_is_refused() {
        let nvrtc = Nvrtc::new(Loaded::without_functions());
        let failure = nvrtc.compile("a\0b", "zero.cu", &[], &[]).unwrap_err();
        assert!(matches!(failure, Failure::Zero(_)), "{failure}");
    }
}
