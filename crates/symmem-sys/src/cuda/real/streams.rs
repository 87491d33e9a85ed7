//! Streams, events, copies and graphs.
#![allow(unsafe_code)] // S4

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::{Cuda, ended};
use crate::cuda::driver::{Streams, refuse};
use crate::cuda::raw::{self, BatchMemOp};
use crate::cuda::{
    Capture, CaptureMode, Compare, Context, Event, Graph, GraphExec, MemOp, Result, Stream, code,
};
use crate::table::written;

impl Streams for Cuda {
    fn stream_create(&self) -> Result<Stream> {
        // SAFETY: it only writes the handle.
        written(|stream| unsafe { self.c.cuStreamCreate(stream, raw::STREAM_NON_BLOCKING) })
            .map(Stream::new)
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the handle is live, and the caller does not use it again.
        unsafe { self.c.cuStreamDestroy(stream.raw()) }
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuStreamSynchronize(stream.raw()) }
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the handle is live.
        ended(unsafe { self.c.cuStreamQuery(stream.raw()) })
    }

    fn stream_context(&self, stream: Stream) -> Result<Context> {
        // SAFETY: the handle is live.
        written(|context| unsafe { self.c.cuStreamGetCtx(stream.raw(), context) }).map(Context::new)
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        let (mut status, mut id, c): (c_int, _, _) = (0, 0, &self.c);
        let (graph, dependencies, count) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the handle is live; what we do not want to know may be null.
        unsafe {
            let stream = stream.raw();
            c.cuStreamGetCaptureInfo(stream, &mut status, &mut id, graph, dependencies, count)
        }?;
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active(id),
            _ => Capture::Invalidated,
        })
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: the handles are live.
        unsafe { self.c.cuStreamWaitEvent(stream.raw(), event.raw(), 0) }
    }

    fn event_create(&self, timing: bool) -> Result<Event> {
        let flags = if timing { raw::EVENT_DEFAULT } else { raw::EVENT_NO_TIMING };
        // SAFETY: it only writes the handle.
        written(|event| unsafe { self.c.cuEventCreate(event, flags) }).map(Event::new)
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        // SAFETY: the handle is live, and the caller does not use it again.
        unsafe { self.c.cuEventDestroy(event.raw()) }
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the handles are live.
        unsafe { self.c.cuEventRecord(event.raw(), stream.raw()) }
    }

    fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuEventSynchronize(event.raw()) }
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: the handle is live.
        ended(unsafe { self.c.cuEventQuery(event.raw()) })
    }

    fn event_elapsed(&self, start: Event, end: Event) -> Result<f32> {
        // SAFETY: the handles are live.
        written(|time| unsafe { self.c.cuEventElapsedTime(time, start.raw(), end.raw()) })
    }

    unsafe fn memset8(&self, address: u64, value: u8, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller vouches for the memory, the handle is live.
        unsafe { self.c.cuMemsetD8Async(address, value, bytes, stream.raw()) }
    }

    unsafe fn memset32(
        &self,
        address: u64,
        value: u32,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory, the handle is live.
        unsafe { self.c.cuMemsetD32Async(address, value, count, stream.raw()) }
    }

    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const c_void,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller vouches for both ends, the handle is live.
        unsafe { self.c.cuMemcpyHtoDAsync(to, from, bytes, stream.raw()) }
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut c_void,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller vouches for both ends, the handle is live.
        unsafe { self.c.cuMemcpyDtoHAsync(to, from, bytes, stream.raw()) }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller vouches for both ends, the handle is live.
        unsafe { self.c.cuMemcpyDtoDAsync(to, from, bytes, stream.raw()) }
    }

    unsafe fn copy_peer(
        &self,
        to: (u64, Context),
        from: (u64, Context),
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        let (there, here, stream) = (to.1.raw(), from.1.raw(), stream.raw());
        // SAFETY: the caller vouches for both ends, the handles are live.
        unsafe { self.c.cuMemcpyPeerAsync(to.0, there, from.0, here, bytes, stream) }
    }

    unsafe fn write32(&self, stream: Stream, address: u64, value: u32) -> Result<()> {
        // SAFETY: the caller vouches for the word, the handle is live.
        unsafe { self.c.cuStreamWriteValue32(stream.raw(), address, value, 0) }
    }

    unsafe fn wait32(
        &self,
        stream: Stream,
        address: u64,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the word, the handle is live.
        unsafe { self.c.cuStreamWaitValue32(stream.raw(), address, value, compare as c_uint) }
    }

    unsafe fn mem_ops(&self, stream: Stream, operations: &[MemOp]) -> Result<()> {
        let mut list: Vec<_> = operations.iter().map(BatchMemOp::from).collect();
        let Ok(count) = c_uint::try_from(list.len()) else {
            return refuse("cuStreamBatchMemOp", code::INVALID_VALUE, "too many operations");
        };
        // SAFETY: the caller vouches for the words, the list is read during the call.
        unsafe { self.c.cuStreamBatchMemOp(stream.raw(), count, list.as_mut_ptr(), 0) }
    }

    fn capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut mode = mode as c_int;
        // SAFETY: it reads and writes the mode.
        unsafe { self.c.cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(match mode {
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => CaptureMode::Global,
        })
    }

    fn capture_begin(&self, stream: Stream) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuStreamBeginCapture(stream.raw(), CaptureMode::ThreadLocal as c_int) }
    }

    fn capture_end(&self, stream: Stream) -> Result<Graph> {
        // SAFETY: the handle is live.
        written(|graph| unsafe { self.c.cuStreamEndCapture(stream.raw(), graph) }).map(Graph::new)
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        // SAFETY: the handle is live.
        written(|exec| unsafe { self.c.cuGraphInstantiate(exec, graph.raw(), 0) })
            .map(GraphExec::new)
    }

    unsafe fn graph_launch(&self, graph: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the handles are live, and the caller vouches for what was captured.
        unsafe { self.c.cuGraphLaunch(graph.raw(), stream.raw()) }
    }

    unsafe fn graph_destroy(&self, graph: Graph) -> Result<()> {
        // SAFETY: the handle is live, and the caller does not use it again.
        unsafe { self.c.cuGraphDestroy(graph.raw()) }
    }

    unsafe fn graph_exec_destroy(&self, graph: GraphExec) -> Result<()> {
        // SAFETY: the handle is live, and the caller does not use it again.
        unsafe { self.c.cuGraphExecDestroy(graph.raw()) }
    }
}
