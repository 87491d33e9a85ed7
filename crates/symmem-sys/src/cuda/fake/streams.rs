//! Streams, events, copies and graphs.
#![allow(unsafe_code)] // S1, S2

use std::ffi::c_void;

use super::Fake;
use super::state::{EventState, Noting, State, StreamState};
use super::work::{End, Work, stream_context};
use crate::cuda::driver::{Streams, refuse};
use crate::cuda::{
    Capture, CaptureMode, Compare, Context, Event, Graph, GraphExec, MemOp, Result, Stream, code,
};

impl Streams for Fake {
    fn stream_create(&self) -> Result<Stream> {
        let call = "cuStreamCreate";
        let mut state = self.enter(call)?;
        let context = state.current(call)?;
        // As the driver may, that of one that is gone.
        let number = state.gone_streams.pop().unwrap_or_else(|| state.number());
        state.streams.insert(number, StreamState { context, capture: None });
        Ok(Stream::new(number))
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let call = "cuStreamDestroy";
        let mut state = self.enter(call)?;
        let gone = state.streams.remove(&stream.raw());
        if gone.is_some() {
            state.gone_streams.push(stream.raw());
        }
        given_back(call, gone)
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        let call = "cuStreamSynchronize";
        idle(call, &*self.enter(call)?, stream)
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        let call = "cuStreamQuery";
        ready(self.enter(call).and_then(|state| idle(call, &state, stream)))
    }

    fn stream_context(&self, stream: Stream) -> Result<Context> {
        let call = "cuStreamGetCtx";
        stream_context(call, &*self.enter(call)?, stream)
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        let call = "cuStreamGetCaptureInfo";
        let state = self.enter(call)?;
        stream_context(call, &state, stream)?;
        let capture = state.streams.get(&stream.raw()).and_then(|found| found.capture.as_ref());
        Ok(match capture {
            None => Capture::None,
            Some(capture) if capture.invalidated => Capture::Invalidated,
            Some(capture) => Capture::Active(capture.id),
        })
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<()> {
        let call = "cuStreamWaitEvent";
        event_of(call, &self.lock(), event)?;
        // SAFETY: it touches no memory: what was before the event is done already.
        unsafe { self.submit(call, stream, vec![Work::Nothing]) }
    }

    fn event_create(&self, timing: bool) -> Result<Event> {
        let call = "cuEventCreate";
        let mut state = self.enter(call)?;
        state.current(call)?;
        let number = state.number();
        state.events.insert(number, EventState { timing, recorded: None });
        Ok(Event::new(number))
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        let call = "cuEventDestroy";
        let gone = self.enter(call)?.events.remove(&event.raw());
        given_back(call, gone)
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let call = "cuEventRecord";
        event_of(call, &self.lock(), event)?;
        // SAFETY: it touches no memory.
        unsafe { self.submit(call, stream, vec![Work::Record(event.raw())]) }
    }

    fn event_synchronize(&self, event: Event) -> Result<()> {
        let call = "cuEventSynchronize";
        event_of(call, &*self.enter(call)?, event).map(|_| ())
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        let call = "cuEventQuery";
        ready(self.enter(call).and_then(|state| event_of(call, &state, event).map(|_| ())))
    }

    fn event_elapsed(&self, start: Event, end: Event) -> Result<f32> {
        let call = "cuEventElapsedTime";
        let state = self.enter(call)?;
        let when = |event| {
            let found = event_of(call, &state, event)?;
            match found.recorded.filter(|_| found.timing) {
                Some(instant) => Ok(instant),
                None => refuse(call, code::INVALID_HANDLE, "it has no timing, or was not recorded"),
            }
        };
        let (start, end) = (when(start)?, when(end)?);
        Ok(end.saturating_duration_since(start).as_secs_f32() * 1e3)
    }

    unsafe fn memset8(&self, address: u64, value: u8, bytes: usize, stream: Stream) -> Result<()> {
        let work = Work::Set { address, pattern: vec![value], count: bytes };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.submit("cuMemsetD8Async", stream, vec![work]) }
    }

    unsafe fn memset32(
        &self,
        address: u64,
        value: u32,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        let work = Work::Set { address, pattern: value.to_ne_bytes().to_vec(), count };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.submit("cuMemsetD32Async", stream, vec![work]) }
    }

    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const c_void,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        let from = End::Host(from.expose_provenance() as u64);
        let work = Work::Copy { to: End::Device(to), from, bytes };
        // SAFETY: the caller vouches for both ends.
        unsafe { self.submit("cuMemcpyHtoDAsync", stream, vec![work]) }
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut c_void,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        let to = End::Host(to.expose_provenance() as u64);
        let work = Work::Copy { to, from: End::Device(from), bytes };
        // SAFETY: the caller vouches for both ends.
        unsafe { self.submit("cuMemcpyDtoHAsync", stream, vec![work]) }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        let work = Work::Copy { to: End::Device(to), from: End::Device(from), bytes };
        // SAFETY: the caller vouches for both ends.
        unsafe { self.submit("cuMemcpyDtoDAsync", stream, vec![work]) }
    }

    unsafe fn copy_peer(
        &self,
        to: (u64, Context),
        from: (u64, Context),
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        let (to, from) = (End::Peer(to.0, to.1), End::Peer(from.0, from.1));
        let work = Work::Copy { to, from, bytes };
        // SAFETY: the caller vouches for both ends.
        unsafe { self.submit("cuMemcpyPeerAsync", stream, vec![work]) }
    }

    unsafe fn write32(&self, stream: Stream, address: u64, value: u32) -> Result<()> {
        let work = Work::Write { address, value: value.into(), wide: false };
        // SAFETY: the caller vouches for the word.
        unsafe { self.submit("cuStreamWriteValue32", stream, vec![work]) }
    }

    unsafe fn wait32(
        &self,
        stream: Stream,
        address: u64,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        let work = Work::Wait { address, value: value.into(), wide: false, compare };
        // SAFETY: the caller vouches for the word.
        unsafe { self.submit("cuStreamWaitValue32", stream, vec![work]) }
    }

    unsafe fn mem_ops(&self, stream: Stream, operations: &[MemOp]) -> Result<()> {
        let works = operations.iter().map(|&operation| match operation {
            MemOp::Write32 { address, value } => {
                Work::Write { address, value: value.into(), wide: false }
            }
            MemOp::Write64 { address, value } => Work::Write { address, value, wide: true },
            MemOp::Wait32 { address, value, compare } => {
                Work::Wait { address, value: value.into(), wide: false, compare }
            }
            MemOp::Wait64 { address, value, compare } => {
                Work::Wait { address, value, wide: true, compare }
            }
        });
        // SAFETY: the caller vouches for the words.
        unsafe { self.submit("cuStreamBatchMemOp", stream, works.collect()) }
    }

    fn capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut state = self.enter("cuThreadExchangeStreamCaptureMode")?;
        let had = state.modes.insert(std::thread::current().id(), mode);
        Ok(had.unwrap_or_default())
    }

    fn capture_begin(&self, stream: Stream) -> Result<()> {
        let call = "cuStreamBeginCapture";
        let mut state = self.enter(call)?;
        if stream == Stream::DEFAULT {
            return refuse(call, code::STREAM_CAPTURE_UNSUPPORTED, "not the default stream");
        }
        stream_context(call, &state, stream)?;
        let id = state.number() as u64;
        match state.streams.get_mut(&stream.raw()) {
            Some(found) if found.capture.is_none() => found.capture = Some(Noting::new(id)),
            _ => return refuse(call, code::ILLEGAL_STATE, "it is being captured already"),
        }
        Ok(())
    }

    fn capture_end(&self, stream: Stream) -> Result<Graph> {
        let call = "cuStreamEndCapture";
        let mut state = self.enter(call)?;
        let found = state.streams.get_mut(&stream.raw()).and_then(|found| found.capture.take());
        let Some(capture) = found else {
            return refuse(call, code::ILLEGAL_STATE, "it is not being captured");
        };
        if capture.invalidated {
            return refuse(call, code::STREAM_CAPTURE_INVALIDATED, "a call has ended it");
        }
        let number = state.number();
        state.graphs.insert(number, capture.noted);
        Ok(Graph::new(number))
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let call = "cuGraphInstantiate";
        let mut state = self.enter(call)?;
        let Some(works) = state.graphs.get(&graph.raw()).cloned() else {
            return refuse(call, code::INVALID_VALUE, "that is no graph");
        };
        let number = state.number();
        state.execs.insert(number, works);
        Ok(GraphExec::new(number))
    }

    unsafe fn graph_launch(&self, graph: GraphExec, stream: Stream) -> Result<()> {
        let call = "cuGraphLaunch";
        let Some(works) = self.lock().execs.get(&graph.raw()).cloned() else {
            return refuse(call, code::INVALID_VALUE, "that is no executable graph");
        };
        // SAFETY: the caller vouches for what was captured.
        unsafe { self.submit(call, stream, works) }
    }

    unsafe fn graph_destroy(&self, graph: Graph) -> Result<()> {
        let call = "cuGraphDestroy";
        let gone = self.enter(call)?.graphs.remove(&graph.raw());
        given_back(call, gone)
    }

    unsafe fn graph_exec_destroy(&self, graph: GraphExec) -> Result<()> {
        let call = "cuGraphExecDestroy";
        let gone = self.enter(call)?.execs.remove(&graph.raw());
        given_back(call, gone)
    }
}

/// Success, if there was something to give back.
pub(super) fn given_back<T>(call: &'static str, gone: Option<T>) -> Result<()> {
    match gone {
        Some(_) => Ok(()),
        None => refuse(call, code::INVALID_HANDLE, "it is not there, or not any more"),
    }
}

/// Everything is, unless the test has asked for [`code::NOT_READY`], which is an answer and no failure.
fn ready(asked: Result<()>) -> Result<bool> {
    match asked {
        Err(failure) if failure.code == code::NOT_READY => Ok(false),
        other => other.map(|()| true),
    }
}

/// A stream can be waited for unless it is being captured.
fn idle(call: &'static str, state: &State, stream: Stream) -> Result<()> {
    stream_context(call, state, stream)?;
    if state.streams.get(&stream.raw()).is_some_and(|found| found.capture.is_some()) {
        return refuse(call, code::STREAM_CAPTURE_UNSUPPORTED, "it is being captured");
    }
    Ok(())
}

fn event_of<'a>(call: &'static str, state: &'a State, event: Event) -> Result<&'a EventState> {
    match state.events.get(&event.raw()) {
        Some(found) => Ok(found),
        None => refuse(call, code::INVALID_HANDLE, format!("{event:?} is no event")),
    }
}
