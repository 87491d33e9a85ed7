//! Telling an engine's events.

use super::Fake;
use super::state::{Content, Event, Parcel};
use crate::ucx::Failure;
use crate::ucx::engine::{Answer, Data, ReceiveBuffer};

impl Fake {
    pub(super) fn tell(&self, event: Event) {
        match event {
            Event::Message(parcel) => self.message(parcel),
            Event::Sent { token, result, body } => {
                drop(body);
                self.events.sent(token, result);
            }
            Event::Received { token, buffer, result } => {
                self.events.received(token, buffer, result);
            }
            Event::Failed { endpoint, failure } => self.events.failed(endpoint, failure),
        }
    }

    fn message(&self, parcel: Parcel) {
        let data = match &parcel.content {
            Content::Inline(bytes) => Data::Inline(bytes),
            Content::Rendezvous(body) => Data::Rendezvous(body.len()),
        };
        let bytes = data.len();
        match self.events.message(&parcel.header, data) {
            Answer::Done => self.finish(&parcel, Ok(())),
            Answer::Refuse => self.finish(&parcel, refused()),
            Answer::Receive { buffer, token } if bytes > buffer.len() => {
                let failure = too_small(&buffer, bytes);
                self.events.received(token, buffer, Err(failure));
                self.finish(&parcel, refused());
            }
            Answer::Receive { mut buffer, token } => match &parcel.content {
                Content::Inline(bytes) => {
                    buffer.take(bytes);
                    self.events.received(token, buffer, Ok(()));
                }
                Content::Rendezvous(_) => {
                    self.network.lock().receive(self.number, parcel, token, buffer);
                }
            },
        }
    }

    /// Tells the sender, if it still has the body.
    fn finish(&self, parcel: &Parcel, result: crate::ucx::Result<()>) {
        if matches!(parcel.content, Content::Rendezvous(_)) {
            self.network.lock().finish(parcel.from, parcel.number, result);
        }
    }
}

fn refused() -> crate::ucx::Result<()> {
    Err(Failure::of("post", Failure::REJECTED))
}

fn too_small(buffer: &ReceiveBuffer, bytes: usize) -> Failure {
    let text = format!("a body of {bytes} bytes, for a buffer of {}", buffer.len());
    Failure { call: "receive", status: Some(Failure::TRUNCATED), text }
}
