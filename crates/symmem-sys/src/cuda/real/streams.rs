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

impl Streams for Cuda {
    fn stream_create(&self) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: it only writes the handle.
        unsafe { self.c.cuStreamCreate(&mut stream, raw::STREAM_NON_BLOCKING) }?;
        Ok(Stream::new(stream))
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
        let mut context = 0;
        // SAFETY: the handle is live.
        unsafe { self.c.cuStreamGetCtx(stream.raw(), &mut context) }?;
        Ok(Context::new(context))
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        let (mut status, mut id, stream): (c_int, _, _) = (0, 0, stream.raw());
        // SAFETY: the handle is live; what we do not want to know may be null.
        unsafe {
            self.c.cuStreamGetCaptureInfo(
                stream,
                &mut status,
                &mut id,
                null_mut(),
                null_mut(),
                null_mut(),
            )
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
        let mut event = 0;
        let flags = if timing { raw::EVENT_DEFAULT } else { raw::EVENT_NO_TIMING };
        // SAFETY: it only writes the handle.
        unsafe { self.c.cuEventCreate(&mut event, flags) }?;
        Ok(Event::new(event))
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
        let mut milliseconds = 0.0;
        // SAFETY: the handles are live.
        unsafe { self.c.cuEventElapsedTime(&mut milliseconds, start.raw(), end.raw()) }?;
        Ok(milliseconds)
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
        let mut graph = 0;
        // SAFETY: the handle is live.
        unsafe { self.c.cuStreamEndCapture(stream.raw(), &mut graph) }?;
        Ok(Graph::new(graph))
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let mut exec = 0;
        // SAFETY: the handle is live.
        unsafe { self.c.cuGraphInstantiate(&mut exec, graph.raw(), 0) }?;
        Ok(GraphExec::new(exec))
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
