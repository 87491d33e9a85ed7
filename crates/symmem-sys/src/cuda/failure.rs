//! What a call of the driver can answer instead of success.

/// A call of the CUDA driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code}){}{text}", if .text.is_empty() { "" } else { ": " })]
pub struct Failure {
    /// The function, without the suffix of its version.
    pub call: &'static str,
    /// The driver's code; [`code::MISSING_SYMBOL`] where the driver does not have the function.
    pub code: i32,
    /// The code's name, such as `CUDA_ERROR_NOT_SUPPORTED`, or `missing symbol`.
    pub name: String,
    /// The driver's explanation, or the compiler's log.
    pub text: String,
}

impl Failure {
    /// The failure of `call` with one of the codes in [`code`], where no driver can be asked for its words.
    pub fn new(call: &'static str, code: i32, text: impl Into<String>) -> Self {
        Self { call, code, name: code::name(code).to_owned(), text: text.into() }
    }

    pub(super) fn missing_symbol(call: &'static str, symbol: &str) -> Self {
        Self::new(call, code::MISSING_SYMBOL, format!("this driver has no {symbol}"))
    }

    /// Whether the device or the driver cannot do this at all, so that another way should be tried.
    pub const fn is_unsupported(&self) -> bool {
        matches!(self.code, code::MISSING_SYMBOL | code::NOT_SUPPORTED | code::NOT_PERMITTED)
    }
}

/// Codes that the library acts upon, and that the fake driver answers with.
pub mod code {
    macro_rules! codes {
        ($($(#[$doc:meta])* $short:ident = $value:literal $name:literal;)*) => {
            $($(#[$doc])* pub const $short: i32 = $value;)*

            /// The name of a code as in `cuda.h`.
            pub const fn name(code: i32) -> &'static str {
                match code { $($short => $name,)* _ => "an unknown code" }
            }
        };
    }

    codes! {
        /// Not the driver's: the function is not in the library.
        MISSING_SYMBOL = -1 "missing symbol";
        /// An argument is wrong.
        INVALID_VALUE = 1 "CUDA_ERROR_INVALID_VALUE";
        /// No memory left.
        OUT_OF_MEMORY = 2 "CUDA_ERROR_OUT_OF_MEMORY";
        /// `cuInit` was not called.
        NOT_INITIALIZED = 3 "CUDA_ERROR_NOT_INITIALIZED";
        /// There is no device.
        NO_DEVICE = 100 "CUDA_ERROR_NO_DEVICE";
        /// No such device.
        INVALID_DEVICE = 101 "CUDA_ERROR_INVALID_DEVICE";
        /// No context is current, or not this one.
        INVALID_CONTEXT = 201 "CUDA_ERROR_INVALID_CONTEXT";
        /// The compiler refuses the PTX.
        INVALID_PTX = 218 "CUDA_ERROR_INVALID_PTX";
        /// Not a live handle.
        INVALID_HANDLE = 400 "CUDA_ERROR_INVALID_HANDLE";
        /// Not now.
        ILLEGAL_STATE = 401 "CUDA_ERROR_ILLEGAL_STATE";
        /// A name that is not there.
        NOT_FOUND = 500 "CUDA_ERROR_NOT_FOUND";
        /// Not an error: work is still going on.
        NOT_READY = 600 "CUDA_ERROR_NOT_READY";
        /// A kernel or copy went where nothing is mapped.
        ILLEGAL_ADDRESS = 700 "CUDA_ERROR_ILLEGAL_ADDRESS";
        /// A wait took too long.
        LAUNCH_TIMEOUT = 702 "CUDA_ERROR_LAUNCH_TIMEOUT";
        /// A cooperative grid does not fit on the device at once.
        COOPERATIVE_LAUNCH_TOO_LARGE = 720 "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE";
        /// Somebody has to allow it first.
        NOT_PERMITTED = 800 "CUDA_ERROR_NOT_PERMITTED";
        /// The device cannot.
        NOT_SUPPORTED = 801 "CUDA_ERROR_NOT_SUPPORTED";
        /// Something of the system, such as the fabric manager, is not up yet.
        SYSTEM_NOT_READY = 802 "CUDA_ERROR_SYSTEM_NOT_READY";
        /// Not while a stream is being captured.
        STREAM_CAPTURE_UNSUPPORTED = 900 "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        /// An earlier error has ended the capture.
        STREAM_CAPTURE_INVALIDATED = 901 "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        /// Anything else.
        UNKNOWN = 999 "CUDA_ERROR_UNKNOWN";
    }
}
