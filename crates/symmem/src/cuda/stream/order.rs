//! The order of a group's kernels, which synchronise on the same pads: one after the other, whatever their streams.

use crate::cuda::device::gpu::{Gpu, StreamId};
use crate::cuda::stream::{Event, Stream, Target};
use crate::error::Result;
use crate::group::Group;

/// Where a group's last kernels are.
pub(crate) struct StreamOrder {
    gpu: Gpu,
    /// Of what runs, and of what captures have noted: what was noted last may never run, and is not behind what runs.
    ran: Trace,
    noted: Trace,
    /// Where kernels of the group have been put, graphs of them included.
    used: Vec<StreamId>,
}

/// The last kernel of a group.
struct Trace {
    /// Where it went, and in which capture.
    last: Option<(StreamId, Option<u64>)>,
    event: Event,
    /// The event is that of the last kernel, and not yet to be recorded at its stream's end.
    recorded: bool,
}

impl StreamOrder {
    pub(crate) fn new(gpu: &Gpu, events: [Event; 2]) -> Self {
        let [ran, noted] = events.map(|event| Trace { last: None, event, recorded: false });
        Self { gpu: gpu.clone(), ran, noted, used: Vec::new() }
    }

    /// The device, and the last kernel of those that go where this one does.
    fn trace(&mut self, target: Target<'_>) -> (&Gpu, &mut Trace) {
        let Self { gpu, ran, noted, .. } = self;
        (gpu, if target.capture.is_none() { ran } else { noted })
    }

    /// Has what follows in `to` come after the group's last kernel; and where that is.
    pub(crate) fn after_last<'a>(
        &mut self,
        group: &Group,
        op: &'static str,
        to: &'a Stream,
    ) -> Result<Target<'a>> {
        let target = to.target()?;
        let now = (to.id(), target.capture);
        self.check(group, op, now)?;
        let (gpu, own) = self.trace(target);
        // Both run, or both are noted in one graph: an event orders them.
        let before = own.last.filter(|last| last.0 != now.0 && last.1 == now.1);
        if let Some((stream, _)) = before {
            let event = own.event.raw;
            if own.recorded {
                gpu.call(|driver| driver.stream_wait(to.raw(), event))?;
            } else if gpu.knows(stream) {
                gpu.call(|driver| {
                    driver.event_record(event, stream.raw)?;
                    driver.stream_wait(to.raw(), event)
                })?;
            } else {
                gpu.for_gone(|driver, end| driver.stream_wait(to.raw(), end))?;
            }
        }
        own.last = Some(now);
        self.is_used(now.0);
        Ok(target)
    }

    /// Refuses what cannot be ordered.
    ///
    /// What is done needs no order; nor does what a graph will do, whose launches are the caller's to order. What ran before
    /// its stream was captured is done before a graph of that can run; and the other way round.
    fn check(&self, group: &Group, op: &'static str, now: (StreamId, Option<u64>)) -> Result<()> {
        for trace in [&self.ran, &self.noted] {
            let Some(last) = trace.last else { continue };
            let event = trace.recorded.then_some(trace.event.raw);
            if last.0 == now.0 || last.1 == now.1 || self.gpu.is_done(last, event)? {
                continue;
            }
            let expected = "the stream of the group's last operation, which is under way, since only \
                            one of the two is being captured";
            let got = if last.1.is_some() { "one that is not captured" } else { "another" };
            return Err(group.usage(op, expected.to_owned(), got.to_owned()));
        }
        Ok(())
    }

    /// Notes that the group's kernel is there now.
    pub(crate) fn is_last(&mut self, target: Target<'_>) {
        self.trace(target).1.recorded = false;
        // With one stream there is nobody to wait.
        if self.gpu.has_several_streams() {
            self.mark_last(target);
        }
    }

    /// Marks where the last kernel is, if it is the last thing there, so that one in another stream waits for nothing that
    /// comes later in this one.
    pub(crate) fn mark_last(&mut self, target: Target<'_>) {
        let stream = target.stream;
        let (gpu, trace) = self.trace(target);
        if trace.recorded || trace.last != Some((stream.id(), target.capture)) {
            return;
        }
        let marked = gpu.call(|driver| driver.event_record(trace.event.raw, stream.raw()));
        trace.recorded = marked.inspect_err(|e| tracing::warn!("{e}")).is_ok();
    }

    /// Notes that something of the group is in this stream.
    #[inline]
    pub(crate) fn is_used(&mut self, stream: StreamId) {
        if self.used.last() != Some(&stream) {
            self.use_another(stream);
        }
    }

    fn use_another(&mut self, stream: StreamId) {
        self.used.retain(|known| *known != stream && self.gpu.knows(*known));
        self.used.push(stream);
    }

    /// Whether none of this rank's kernels is under way: in the streams that it was used in, in those that are gone, and in
    /// those of somebody else, who may have launched a graph there.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let used = self.used.iter().filter(|stream| self.gpu.knows(**stream));
        let streams: Vec<_> = used.map(|stream| stream.raw).collect();
        self.gpu.are_idle(&streams)
    }
}
