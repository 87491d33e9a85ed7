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
use crate::table::{methods, written};

impl Streams for Cuda {
    methods! {
        // It only writes the handle.
        fn stream_create() -> Stream =
            |stream| cuStreamCreate(stream, raw::STREAM_NON_BLOCKING) => Stream::new;
        // The handle is live, and the caller does not use it again.
        unsafe fn stream_destroy(stream: Stream) = cuStreamDestroy(stream.raw());
        // The handle is live.
        fn stream_synchronize(stream: Stream) = cuStreamSynchronize(stream.raw());
        // The handle is live.
        fn stream_context(stream: Stream) -> Context =
            |context| cuStreamGetCtx(stream.raw(), context) => Context::new;
        // The handles are live.
        fn stream_wait(stream: Stream, event: Event) =
            cuStreamWaitEvent(stream.raw(), event.raw(), 0);
        // The handle is live, and the caller does not use it again.
        unsafe fn event_destroy(event: Event) = cuEventDestroy(event.raw());
        // The handles are live.
        fn event_record(event: Event, stream: Stream) = cuEventRecord(event.raw(), stream.raw());
        // The handle is live.
        fn event_synchronize(event: Event) = cuEventSynchronize(event.raw());
        // The handles are live.
        fn event_elapsed(start: Event, end: Event) -> f32 =
            |time| cuEventElapsedTime(time, start.raw(), end.raw());
        // The caller vouches for the memory, the handle is live.
        unsafe fn memset8(address: u64, value: u8, bytes: usize, stream: Stream) =
            cuMemsetD8Async(address, value, bytes, stream.raw());
        // The caller vouches for the memory, the handle is live.
        unsafe fn memset32(address: u64, value: u32, count: usize, stream: Stream) =
            cuMemsetD32Async(address, value, count, stream.raw());
        // The caller vouches for both ends, the handle is live.
        unsafe fn copy_to_device(to: u64, from: *const c_void, bytes: usize, stream: Stream) =
            cuMemcpyHtoDAsync(to, from, bytes, stream.raw());
        // The caller vouches for both ends, the handle is live.
        unsafe fn copy_to_host(to: *mut c_void, from: u64, bytes: usize, stream: Stream) =
            cuMemcpyDtoHAsync(to, from, bytes, stream.raw());
        // The caller vouches for both ends, the handle is live.
        unsafe fn copy(to: u64, from: u64, bytes: usize, stream: Stream) =
            cuMemcpyDtoDAsync(to, from, bytes, stream.raw());
        // The caller vouches for both ends, the handles are live.
        unsafe fn copy_peer(
            to: (u64, Context), from: (u64, Context), bytes: usize, stream: Stream,
        ) = cuMemcpyPeerAsync(to.0, to.1.raw(), from.0, from.1.raw(), bytes, stream.raw());
        // The caller vouches for the word, the handle is live.
        unsafe fn write32(stream: Stream, address: u64, value: u32) =
            cuStreamWriteValue32(stream.raw(), address, value, 0);
        // The caller vouches for the word, the handle is live.
        unsafe fn wait32(stream: Stream, address: u64, value: u32, compare: Compare) =
            cuStreamWaitValue32(stream.raw(), address, value, compare as c_uint);
        // The handle is live.
        fn capture_begin(stream: Stream) =
            cuStreamBeginCapture(stream.raw(), CaptureMode::ThreadLocal as c_int);
        // The handle is live.
        fn capture_end(stream: Stream) -> Graph =
            |graph| cuStreamEndCapture(stream.raw(), graph) => Graph::new;
        // The handle is live.
        fn graph_instantiate(graph: Graph) -> GraphExec =
            |exec| cuGraphInstantiate(exec, graph.raw(), 0) => GraphExec::new;
        // The handles are live, and the caller vouches for what was captured.
        unsafe fn graph_launch(graph: GraphExec, stream: Stream) =
            cuGraphLaunch(graph.raw(), stream.raw());
        // The handle is live, and the caller does not use it again.
        unsafe fn graph_destroy(graph: Graph) = cuGraphDestroy(graph.raw());
        // The handle is live, and the caller does not use it again.
        unsafe fn graph_exec_destroy(graph: GraphExec) = cuGraphExecDestroy(graph.raw());
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the handle is live.
        ended(unsafe { self.c.cuStreamQuery(stream.raw()) })
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

    fn event_create(&self, timing: bool) -> Result<Event> {
        let flags = if timing { raw::EVENT_DEFAULT } else { raw::EVENT_NO_TIMING };
        // SAFETY: it only writes the handle.
        written(|event| unsafe { self.c.cuEventCreate(event, flags) }).map(Event::new)
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: the handle is live.
        ended(unsafe { self.c.cuEventQuery(event.raw()) })
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
}
