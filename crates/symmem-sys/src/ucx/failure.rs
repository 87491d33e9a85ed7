//! What a call of UCX can answer instead of success.

/// A call of UCX, or an operation that it has begun, that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {text}{}", self.number())]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// The library's status; none where the library was not asked.
    pub status: Option<i8>,
    /// The same in words.
    pub text: String,
}

impl Failure {
    /// `UCS_ERR_INVALID_PARAM`
    pub const INVALID_PARAM: i8 = -5;
    /// `UCS_ERR_UNREACHABLE`
    pub const UNREACHABLE: i8 = -6;
    /// `UCS_ERR_INVALID_ADDR`
    pub const INVALID_ADDRESS: i8 = -7;
    /// `UCS_ERR_MESSAGE_TRUNCATED`
    pub const TRUNCATED: i8 = -9;
    /// `UCS_ERR_BUSY`
    pub const BUSY: i8 = -15;
    /// `UCS_ERR_CANCELED`: the endpoint was closed.
    pub const CANCELED: i8 = -16;
    /// `UCS_ERR_TIMED_OUT`
    pub const TIMED_OUT: i8 = -20;
    /// `UCS_ERR_REJECTED`: the receiver did not want the message.
    pub const REJECTED: i8 = -23;
    /// `UCS_ERR_NOT_CONNECTED`
    pub const NOT_CONNECTED: i8 = -24;
    /// `UCS_ERR_CONNECTION_RESET`
    pub const CONNECTION_RESET: i8 = -25;
    /// `UCS_ERR_ENDPOINT_TIMEOUT`
    pub const ENDPOINT_TIMEOUT: i8 = -80;

    /// A failure that was found before the library was asked.
    pub(super) fn refused(call: &'static str, text: impl Into<String>) -> Self {
        Self { call, status: None, text: text.into() }
    }

    /// A status in words of our own.
    pub(super) fn of(call: &'static str, status: i8) -> Self {
        Self { call, status: Some(status), text: words(status).to_owned() }
    }

    /// Whether the connection is gone: the peer's process has ended, or the network does not reach it.
    pub fn is_disconnected(&self) -> bool {
        match self.status {
            Some(-3 | Self::UNREACHABLE | Self::TIMED_OUT) => true,
            Some(Self::NOT_CONNECTED | Self::CONNECTION_RESET) => true,
            // Failures of links and of endpoints.
            Some(status) => (-89..=-40).contains(&status),
            None => false,
        }
    }

    /// Whether the endpoint was closed on this side.
    pub fn is_canceled(&self) -> bool {
        self.status == Some(Self::CANCELED)
    }

    fn number(&self) -> String {
        self.status.map(|status| format!(" ({status})")).unwrap_or_default()
    }
}

/// A status in words, where the library is not asked.
const fn words(status: i8) -> &'static str {
    match status {
        0 => "success",
        -3 => "input or output error",
        Failure::INVALID_PARAM => "invalid parameter",
        Failure::UNREACHABLE => "destination is unreachable",
        Failure::INVALID_ADDRESS => "address not valid",
        Failure::TRUNCATED => "message truncated",
        Failure::BUSY => "device is busy",
        Failure::CANCELED => "request canceled",
        Failure::TIMED_OUT => "operation timed out",
        Failure::REJECTED => "operation rejected by remote peer",
        Failure::NOT_CONNECTED => "endpoint is not connected",
        Failure::CONNECTION_RESET => "connection reset by remote peer",
        Failure::ENDPOINT_TIMEOUT => "endpoint timeout",
        _ => "unknown error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_call_and_the_status() {
        let failure = Failure::of("ucp_am_send_nbx", Failure::CONNECTION_RESET);
        let text = "ucp_am_send_nbx failed: connection reset by remote peer (-25)";
        assert_eq!(failure.to_string(), text);
        assert!(failure.is_disconnected());
        assert!(!failure.is_canceled());
        let failure = Failure::refused("post", "a header of 300 bytes, 256 is the most");
        assert_eq!(failure.to_string(), "post failed: a header of 300 bytes, 256 is the most");
        assert!(!failure.is_disconnected());
    }
}
