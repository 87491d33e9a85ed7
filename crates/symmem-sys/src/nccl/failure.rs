//! What a call of NCCL can answer instead of success.

/// A call of NCCL that failed, or that is still under way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.sentence())]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// The library's code; [`MISSING`](Self::MISSING) where it does not have the function.
    pub code: i32,
    /// The code in the library's words.
    pub text: String,
    /// What the library has said last of an error, of this or an earlier call; often empty.
    pub last: String,
}

impl Failure {
    /// Not the library's: the function is not in it.
    pub const MISSING: i32 = -1;
    /// `ncclUnhandledCudaError`
    pub const CUDA: i32 = 1;
    /// `ncclSystemError`
    pub const SYSTEM: i32 = 2;
    /// `ncclInternalError`
    pub const INTERNAL: i32 = 3;
    /// `ncclInvalidArgument`
    pub const INVALID_ARGUMENT: i32 = 4;
    /// `ncclInvalidUsage`
    pub const INVALID_USAGE: i32 = 5;
    /// `ncclRemoteError`: another rank has failed, or is gone.
    pub const REMOTE: i32 = 6;
    /// `ncclInProgress`: no error; the call goes on, of a communicator that does not block.
    pub const IN_PROGRESS: i32 = 7;

    /// One of which the library has said nothing.
    pub(super) fn new(call: &'static str, code: i32, text: impl Into<String>) -> Self {
        Self { call, code, text: text.into(), last: String::new() }
    }

    pub(super) fn missing_symbol(call: &'static str, symbol: &str) -> Self {
        Self::new(call, Self::MISSING, format!("this NCCL has no {symbol}"))
    }

    /// Whether nothing is wrong, but the call is not over yet.
    pub const fn is_in_progress(&self) -> bool {
        self.code == Self::IN_PROGRESS
    }

    /// Whether this library cannot do this at all, so that another way should be tried.
    pub const fn is_unsupported(&self) -> bool {
        self.code == Self::MISSING
    }

    fn sentence(&self) -> String {
        let Self { call, code, text, last } = self;
        match (self.is_unsupported(), last.is_empty()) {
            (true, _) => text.clone(),
            (false, true) => format!("{call} failed: {text} ({code})"),
            (false, false) => format!("{call} failed: {text} ({code}): {last}"),
        }
    }
}

/// A code in words, where the library cannot be asked.
pub(super) const fn words(code: i32) -> &'static str {
    match code {
        Failure::CUDA => "unhandled cuda error",
        Failure::SYSTEM => "unhandled system error",
        Failure::INTERNAL => "internal error",
        Failure::INVALID_ARGUMENT => "invalid argument",
        Failure::INVALID_USAGE => "invalid usage",
        Failure::REMOTE => "remote process exited or there was a network error",
        Failure::IN_PROGRESS => "in progress",
        8 => "timeout",
        _ => "unknown result code",
    }
}
