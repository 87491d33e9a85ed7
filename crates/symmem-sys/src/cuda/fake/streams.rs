//! Streams, events, copies and graphs.
#![allow(unsafe_code)] // S1, S2

use std::ffi::c_void;

use super::Fake;
use super::state::{EventState, Noting, State, StreamState};
use super::work::{End, Work};
use crate::cuda::driver::Streams;
use crate::cuda::{
    Capture, CaptureMode, Compare, Context, Event, Failure, Graph, GraphExec, MemOp, Result,
    Stream, code,
};

impl Streams for Fake {
    fn stream_create(&self) -> Result<Stream> {
        let mut state = self.enter("cuStreamCreate")?;
        let context = state.current()?;
        // As the driver may, that of one that is gone.
        let number = state.gone_streams.pop().unwrap_or_else(|| state.number());
        state.streams.insert(number, StreamState { context, capture: None });
        Ok(Stream::new(number))
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let mut state = self.enter("cuStreamDestroy")?;
        let gone = state.streams.remove(&stream.raw());
        if gone.is_some() {
            state.gone_streams.push(stream.raw());
        }
        state.given_back(gone)
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        self.enter("cuStreamSynchronize")?.idle(stream)
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        ready(self.enter("cuStreamQuery").and_then(|state| state.idle(stream)))
    }

    fn stream_context(&self, stream: Stream) -> Result<Context> {
        self.enter("cuStreamGetCtx")?.context_of(stream)
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        let state = self.enter("cuStreamGetCaptureInfo")?;
        state.context_of(stream)?;
        let capture = state.streams.get(&stream.raw()).and_then(|found| found.capture.as_ref());
        Ok(match capture {
            None => Capture::None,
            Some(capture) if capture.invalidated => Capture::Invalidated,
            Some(capture) => Capture::Active(capture.id),
        })
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<()> {
        let call = "cuStreamWaitEvent";
        self.begin(call).event_of(event)?;
        // SAFETY: it touches no memory: what was before the event is done already.
        unsafe { self.submit(call, stream, vec![Work::Nothing]) }
    }

    fn event_create(&self, timing: bool) -> Result<Event> {
        let mut state = self.enter("cuEventCreate")?;
        state.current()?;
        let number = state.number();
        state.events.insert(number, EventState { timing, recorded: None });
        Ok(Event::new(number))
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        let mut state = self.enter("cuEventDestroy")?;
        let gone = state.events.remove(&event.raw());
        state.given_back(gone)
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let call = "cuEventRecord";
        self.begin(call).event_of(event)?;
        // SAFETY: it touches no memory.
        unsafe { self.submit(call, stream, vec![Work::Record(event.raw())]) }
    }

    fn event_synchronize(&self, event: Event) -> Result<()> {
        self.enter("cuEventSynchronize")?.event_of(event).map(drop)
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        ready(self.enter("cuEventQuery").and_then(|state| state.event_of(event).map(drop)))
    }

    fn event_elapsed(&self, start: Event, end: Event) -> Result<f32> {
        let state = self.enter("cuEventElapsedTime")?;
        let when = |event| {
            let found = state.event_of(event)?;
            let none =
                || state.failure(code::INVALID_HANDLE, "it has no timing, or was not recorded");
            found.recorded.filter(|_| found.timing).ok_or_else(none)
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
        let work = Work::Word(MemOp::Write32 { address, value });
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
        let work = Work::Word(MemOp::Wait32 { address, value, compare });
        // SAFETY: the caller vouches for the word.
        unsafe { self.submit("cuStreamWaitValue32", stream, vec![work]) }
    }

    unsafe fn mem_ops(&self, stream: Stream, operations: &[MemOp]) -> Result<()> {
        let works = operations.iter().copied().map(Work::Word).collect();
        // SAFETY: the caller vouches for the words.
        unsafe { self.submit("cuStreamBatchMemOp", stream, works) }
    }

    fn capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut state = self.enter("cuThreadExchangeStreamCaptureMode")?;
        let had = state.modes.insert(std::thread::current().id(), mode);
        Ok(had.unwrap_or_default())
    }

    fn capture_begin(&self, stream: Stream) -> Result<()> {
        let mut state = self.enter("cuStreamBeginCapture")?;
        if stream == Stream::DEFAULT {
            return state.refuse(code::STREAM_CAPTURE_UNSUPPORTED, "not the default stream");
        }
        state.context_of(stream)?;
        let id = state.number() as u64;
        match state.streams.get_mut(&stream.raw()) {
            Some(found) if found.capture.is_none() => found.capture = Some(Noting::new(id)),
            _ => return state.refuse(code::ILLEGAL_STATE, "it is being captured already"),
        }
        Ok(())
    }

    fn capture_end(&self, stream: Stream) -> Result<Graph> {
        let mut state = self.enter("cuStreamEndCapture")?;
        let found = state.streams.get_mut(&stream.raw()).and_then(|found| found.capture.take());
        let Some(capture) = found else {
            return state.refuse(code::ILLEGAL_STATE, "it is not being captured");
        };
        if capture.invalidated {
            return state.refuse(code::STREAM_CAPTURE_INVALIDATED, "a call has ended it");
        }
        let number = state.number();
        state.graphs.insert(number, capture.noted);
        Ok(Graph::new(number))
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let mut state = self.enter("cuGraphInstantiate")?;
        let Some(works) = state.graphs.get(&graph.raw()).cloned() else {
            return state.refuse(code::INVALID_VALUE, "that is no graph");
        };
        let number = state.number();
        state.execs.insert(number, works);
        Ok(GraphExec::new(number))
    }

    unsafe fn graph_launch(&self, graph: GraphExec, stream: Stream) -> Result<()> {
        let call = "cuGraphLaunch";
        let none = || Failure::new(call, code::INVALID_VALUE, "that is no executable graph");
        let works = self.begin(call).execs.get(&graph.raw()).cloned().ok_or_else(none)?;
        // SAFETY: the caller vouches for what was captured.
        unsafe { self.submit(call, stream, works) }
    }

    unsafe fn graph_destroy(&self, graph: Graph) -> Result<()> {
        let mut state = self.enter("cuGraphDestroy")?;
        let gone = state.graphs.remove(&graph.raw());
        state.given_back(gone)
    }

    unsafe fn graph_exec_destroy(&self, graph: GraphExec) -> Result<()> {
        let mut state = self.enter("cuGraphExecDestroy")?;
        let gone = state.execs.remove(&graph.raw());
        state.given_back(gone)
    }
}

/// Everything is, unless the test has asked for [`code::NOT_READY`], which is an answer and no failure.
fn ready(asked: Result<()>) -> Result<bool> {
    match asked {
        Err(failure) if failure.code == code::NOT_READY => Ok(false),
        other => other.map(|()| true),
    }
}

impl State {
    /// A stream can be waited for unless it is being captured.
    fn idle(&self, stream: Stream) -> Result<()> {
        self.context_of(stream)?;
        if self.streams.get(&stream.raw()).is_some_and(|found| found.capture.is_some()) {
            return self.refuse(code::STREAM_CAPTURE_UNSUPPORTED, "it is being captured");
        }
        Ok(())
    }

    fn event_of(&self, event: Event) -> Result<&EventState> {
        let none = || self.failure(code::INVALID_HANDLE, format!("{event:?} is no event"));
        self.events.get(&event.raw()).ok_or_else(none)
    }

    /// Success, if there was something to give back.
    pub(super) fn given_back<T>(&self, gone: Option<T>) -> Result<()> {
        let none = || self.failure(code::INVALID_HANDLE, "it is not there, or not any more");
        gone.map(drop).ok_or_else(none)
    }
}
