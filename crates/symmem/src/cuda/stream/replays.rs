//! Small calls that are made again and again, as graphs of one kernel: to launch one costs the host half of what launching the
//! kernel does. Making one takes as long as some dozen launches, so it is done for what has come often.
#![allow(unsafe_code)] // S4

use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::kernels::BuiltIn;
use crate::cuda::group::layout::GroupParameter;
use crate::cuda::stream::Target;
use crate::cuda::stream::graph::Graph;
use crate::error::Result;

/// Calls that are remembered.
const MOST: usize = 16;
/// How often a call comes before it gets a graph.
const OFTEN: u32 = 8;

/// All in which one launch of a group differs from another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Launched {
    kernel: BuiltIn,
    blocks: u32,
    /// Of the group's parameter; the rest of it never changes.
    call: u32,
    timeout: u64,
    /// The other parameters.
    values: [u64; 4],
}

impl Launched {
    pub(in crate::cuda) fn new(
        kernel: BuiltIn,
        blocks: u32,
        group: &GroupParameter,
        values: [u64; 4],
    ) -> Self {
        Self { kernel, blocks, call: group.call, timeout: group.timeout, values }
    }
}

/// What a group has launched, roughly by how often.
#[derive(Default)]
pub(in crate::cuda) struct Replays(Vec<(Launched, Times)>);

enum Times {
    /// So often.
    Counted(u32),
    /// Often.
    Noted(Graph),
    /// Often, but no graph could be made of it.
    Plain,
}

impl Replays {
    /// Puts what `launch` does there; as a graph, if it came often and `replays` are there.
    ///
    /// # Safety
    /// `launch` launches the kernel of `launched`, whose parameters are the group's and what `launched` says.
    pub(in crate::cuda) unsafe fn launch(
        replays: Option<&mut Self>,
        launched: Launched,
        target: Target<'_>,
        launch: &mut dyn FnMut(Target<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(Self(known)) = replays else { return launch(target) };
        let gpu = target.stream.gpu();
        let Some(at) = known.iter().position(|(known, _)| *known == launched) else {
            if known.len() == MOST {
                gpu.at_liberty(|| known.pop());
            }
            known.push((launched, Times::Counted(1)));
            return launch(target);
        };
        // What comes more often moves up: it is found sooner, and others are forgotten first.
        let up = at.saturating_sub(1);
        known.swap(at, up);
        let times = &mut known[up].1;
        if let Times::Counted(count) = times {
            *count += 1;
            if *count >= OFTEN {
                *times = note(gpu, launch);
            }
        }
        match times {
            // SAFETY: the caller promises it of the kernel, which is all that there is in it.
            Times::Noted(graph) => unsafe { graph.replay(target.stream) },
            Times::Counted(_) | Times::Plain => launch(target),
        }
    }
}

/// A graph of what `launch` does, made aside: this thread may be capturing another stream.
fn note(gpu: &Gpu, launch: &mut dyn FnMut(Target<'_>) -> Result<()>) -> Times {
    let graph = gpu.at_liberty(|| {
        let aside = gpu.stream()?;
        aside.capture(|| launch(aside.target()?))
    });
    match graph {
        Ok(graph) => Times::Noted(graph),
        Err(e) => {
            tracing::warn!("a call is launched each time, since no graph could be made of it: {e}");
            Times::Plain
        }
    }
}
